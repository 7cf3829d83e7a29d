"""A cell that makes older records, and reads the rows of the last experiment."""

OLDER_RECORDS = """
import numpy as np
def rows():
    from ipygpumem.shell.app import app_of
    survivors = app_of(get_ipython()).experiments.finished[-1].survivors
    return [(row.objects, row.holder.path, row.holder.advice) for row in survivors]
class Document:
    pass
class Slotted:
    __slots__ = ("number", "words")
def dicts(number):
    return [{"number": each, "text": f"text {each}"} for each in range(number)]
def instances(kind, number):
    made = [kind() for _ in range(number)]
    for position, each in enumerate(made):
        each.number = position
    return made
def texts(number):
    return f"{number} " * 1000
def words(number):
    return [str(each) for each in range(1000, 1000 + number)]
def stays(record):
    return record["text"] if type(record) is dict else record.number
def has_new(record):
    if type(record) is dict:
        return not record.keys() <= {"number", "text", "tags"}
    return getattr(record, "words", None) is not None
"""
"""Makes older records."""
