"""What ipygpumem knows of IPython and its front-ends: their outputs, errors, sources, displays."""
