"""Finds who keeps an object alive: ``search`` finds the chain of references and puts it in words."""
