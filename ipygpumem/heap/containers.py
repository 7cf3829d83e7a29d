"""The built-in containers, and which of them count for which purpose."""

from __future__ import annotations

from collections import deque
from typing import Any

CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, deque)
"""Base classes of all containers that are read: no type derives from two of them."""
CONTAINER_TYPES = frozenset(map(id, CONTAINERS))
"""Identities of the built-in containers themselves: asking for the number of their items runs no
user code, as it may for subclasses.
"""
SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
"""Containers whose items have positions."""
GROWING: tuple[Any, ...] = (list, dict, set, deque)
"""Containers to which code adds items: they grow from cell to cell."""
APPENDED: tuple[Any, ...] = (list, dict, deque)
"""Containers whose new items come last; those of a set may come anywhere."""
UNTRACKED: tuple[Any, ...] = (dict, tuple)
"""Containers that the collector stops tracking if they contain only arrays, numbers and text."""
UNTRACKED_TYPES = frozenset(map(id, UNTRACKED))
"""Identities of these types."""
LARGE: tuple[Any, ...] = (dict, list, set)
"""Tracked containers that a heap lists as large ones if they are large by themselves, without their
items.
"""
