"""Puts together what several processes of one job have measured; it asks none of them."""
