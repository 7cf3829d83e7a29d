"""The edge to IPython: events, magics, configuration, and the one object that holds a shell's state."""
