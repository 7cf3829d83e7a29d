"""Advice on numbers of a wider dtype than they need, in tensors and NumPy arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ipygpumem.advising.contents import pieces
from ipygpumem.advising.copies import own_bytes
from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.records import Finding
from ipygpumem.advising.rewriting import rewritings
from ipygpumem.objects.arrays import library_type

LOSSLESS = "it holds each value exactly today; results of computing with it may need the wider one"


def doubles(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield torch's tensors of float64."""
    kind = library_type("torch", "Tensor")
    found = [
        (item, place)
        for item, place in (look.spots(kind) if kind is not None else ())
        if str(look.read("dtype", item)) == "torch.float64" and not look.read("requires_grad", item)
    ]
    for one in rewritings(look, found, ".float()"):
        keys = {key: own_bytes(look, item) for item in one.only if (key := look.key(item)) is not None}
        dropped = set(map(id, one.only))
        whole = {key for key, size in keys.items() if size == look.sizes[key]}
        shares = {k: look.sizes[k] // 2 for k in whole if look.dies(k, dropped) and not graphs.saves(k)}
        are = "is" if len(one.items) == 1 else f"has {len(one.items):,} tensors of"
        what = f"{one.place} {are} float64"
        condition = "if float32 is precise enough: it keeps 7 digits of 16"
        yield from look.by_device("precision", shares, what, one.code, condition)


def arrays(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield NumPy's arrays of which a narrower dtype holds each value."""
    kind = library_type("numpy", "ndarray")
    for item, place in look.spots(kind) if kind is not None else ():
        key, size = look.key(item), own_bytes(look, item)
        if key is None or size < look.least or size != look.sizes[key] or not place.takes:
            continue
        if not look.is_only_at(item, place) or not look.dies(key, {id(item)}):
            continue
        narrow = narrower(look, item)
        if narrow is not None:
            yield from look.by_device(
                "narrower dtype",
                {key: size - size // int(item.itemsize) * narrow.itemsize},
                f"{place.code} is {item.dtype}, and {narrow} holds each of its values",
                f'{place.code} = {place.code}.astype("{narrow}")',
                LOSSLESS,
            )


def narrower(look: Look, array: Any) -> Any:
    """Return the narrowest dtype that holds each value of an array; None if that is its own, or not known."""
    numpy: Any = sys.modules["numpy"]
    kind = array.dtype.kind
    if kind not in "iuf" or not array.dtype.isnative or not array.size or not look.may_read(int(array.nbytes)):
        return None
    if kind == "f":
        narrow = numpy.dtype("float32")
        return narrow if array.itemsize > narrow.itemsize and _fits_floats(numpy, array, narrow) else None
    low, high = int(array.min()), int(array.max())
    for width in (1, 2, 4):
        info = numpy.iinfo(f"{kind}{width}")
        if width < array.itemsize and info.min <= low and high <= info.max:
            return info.dtype
    return None


def _fits_floats(numpy: Any, array: Any, narrow: Any) -> bool:
    if not (array.flags.c_contiguous or array.ndim == 1):
        array = array.T
    if not (array.flags.c_contiguous or array.ndim == 1):
        return False
    with numpy.errstate(all="ignore"):
        for piece in pieces(array.reshape(-1)):
            back = piece.astype(narrow).astype(array.dtype)
            if not ((back == piece) | (piece != piece)).all():  # what is not a number is not itself
                return False
    return True
