"""The flight recorder: recordings that outlive their kernel, and ``%gpumem postmortem``."""
