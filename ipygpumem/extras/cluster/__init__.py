"""``--on``: experiments and commands on the engines of an ipyparallel cluster."""
