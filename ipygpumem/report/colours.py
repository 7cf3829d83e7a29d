"""Colours with the same meaning in reports, pictures and the panel.

Their contrast is at least 3:1 on white and on the dark themes' backgrounds.
"""

IN_USE = "#1e88e5"
PEAK = "#ef6c00"
OUT_OF_MEMORY = "#e53935"
TEXT = "#767676"
"""Text and lines of pictures, which cannot know the page's theme."""
