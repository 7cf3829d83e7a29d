"""Tests that import large libraries into the test process."""
