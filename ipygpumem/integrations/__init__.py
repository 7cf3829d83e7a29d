"""Callbacks that put into a trainer's own log what its epochs cost: one file for each library, loaded by its users."""
