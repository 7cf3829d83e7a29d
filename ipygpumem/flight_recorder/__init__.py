"""The flight recorder: one append-only file per kernel that outlives it, and what can be read from it afterwards."""
