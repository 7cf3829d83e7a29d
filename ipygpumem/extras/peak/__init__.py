"""``%%peak``: runs code and shows what the memory held at its highest moment."""
