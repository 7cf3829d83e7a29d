"""Finds what keeps an object alive: ``search`` finds the chain of references and describes it."""
