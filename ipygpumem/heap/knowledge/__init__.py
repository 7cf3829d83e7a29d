"""The one knowledge of objects: where walks stop, what an object refers to, and how many bytes it
has itself.
"""
