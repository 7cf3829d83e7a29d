"""Runs experiments and commands on the engines of an ipyparallel cluster, and brings their records home."""
