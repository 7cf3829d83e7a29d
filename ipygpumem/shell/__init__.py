"""The interface to IPython: events, magics, configuration, and the object that holds a shell's
state.
"""
