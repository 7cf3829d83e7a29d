"""Functions of ``ipygpumem`` for notebooks and scripts; features of a notebook are
imported late.
"""
