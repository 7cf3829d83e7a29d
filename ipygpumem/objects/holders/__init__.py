"""Finds who keeps an object alive: ``search`` finds the chain of references, ``paths`` puts it in words."""
