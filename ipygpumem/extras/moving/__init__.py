"""Releases objects, and moves models off a device and back: ``release``, ``purge``, ``offload``."""
