"""Trainer callbacks that log each epoch's memory: one file per library, imported by its users."""
