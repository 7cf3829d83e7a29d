"""What a device's memory consists of: ``device`` and ``host`` lay the figures out, ``findings`` asks for them."""
