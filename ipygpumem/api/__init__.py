"""What users call from Python, in scripts too: each function is ``ipygpumem.NAME``. What a notebook adds comes last."""
