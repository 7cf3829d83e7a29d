"""Breaks the host's memory down into parts that sum exactly to the total.

The kernel counts the host's pages by several overlapping measures. Each byte belongs to the first
of these that claims it: free, this process (``RssAnon``, ``RssShmem``, ``RssFile``), reclaimable
cache (``MemAvailable`` minus free, or the group's own statistics), child processes (PSS). The rest
belongs to other processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from ipygpumem.inventory.devices.breakdown import Part, Reconciliation, Storage, kind_parts
from ipygpumem.probes import cgroup, own_limits
from ipygpumem.probes.host import HostFigures
from ipygpumem.probes.mappings import OwnPages
from ipygpumem.units import MIB, format_bytes

Resident = Callable[[list[tuple[int, int]]], list[int]]
"""Returns the bytes in RAM of each address range; raises OSError if the system does not report
them.
"""
_OTHERS = "other processes and the system"
MANY_BYTES = 64 * MIB
"""Unnamed bytes from which a note says how many cannot be named."""
MANY_SHARE = 0.1
"""Share of the memory that an experiment keeps from which a note says so, too."""
PYTHON_OBJECTS = "Python objects"
"""Name of a part."""
DATA_OF = "of "
"""Prefix of the kind of a library's memory that is neither a tensor nor a NumPy array."""
PRINTED = "printed by cells"
"""Name of the part with the text that IPython keeps."""
_ADVICE_ON_OBJECTS = {
    PYTHON_OBJECTS: "text, numbers, containers, functions, classes, code of modules",
    PRINTED: "text and displays that IPython keeps for %notebook: %gpumem free drops them",
}
_OF_LIBRARY = "its frames, models, images: delete their names"
_ADVICE_ON_OWN_PAGES = {
    "data of libraries": "written pages of mapped files: freed when the kernel restarts",
    "stacks": "of all threads",
    "free heap pages": "kept by malloc for later: %gpumem free returns them to the system",
    "free blocks of Python": "between objects that are alive: kept by Python for new objects",
}
"""The parts for the fields of ``OwnPages``, in their order, with advice."""
_REST = "libraries' own data and caches: delete names, then %gpumem free"
_NOT_NAMED = "not named"
_OF_NO_OBJECT = (
    "no object accounts for them: tables of C code, such as those of libraries; gaps in malloc"
)
UNACCOUNTED = "no known object and no free page accounts for them"
"""The measured fact about pages without a name."""


def host_parts(
    figures: HostFigures,
    storages: Iterable[Storage] | None,
    resident: Resident,
    objects: Mapping[str, int] | None = None,
) -> Reconciliation:
    """Return the breakdown of the host's memory, or of the container's if that has a limit.

    Args:
        figures: the system's figures.
        storages: the tensors and arrays that Python holds, on any device; None if unknown.
        resident: returns the bytes in RAM of each address range.
        objects: bytes of objects without arrays' data, by part.
    """
    basis = _host_basis(figures)
    claims = _claims(basis, figures)
    own_pages = _own_pages(claims.private, storages, resident, figures.own, objects or {})
    notes = [*_host_notes(claims, figures), *own_pages.notes]
    if figures.children_bytes is None:
        notes.append(f"child processes are not known separately here: they are among the {_OTHERS}")
    shared = claims.shared
    files = claims.files
    if shared < MIB:  # semaphores of libraries, which no user asks about
        shared, files = 0, files + shared
    parts = [
        *own_pages.parts,
        Part("shared memory", shared, _SHARED),
        Part("libraries and mapped files", files, _FILES),
        Part("child processes", claims.children, _WORKERS),
        Part(basis.name_of_others, claims.unclaimed, _OF_OTHERS),
        Part("cache", claims.cache, _CACHE),
        Part("out of reach", basis.withheld_bytes, basis.why_withheld),
        Part("free", claims.free - basis.withheld_bytes, "free now"),
    ]
    return Reconciliation("cpu", basis.total_bytes, basis.name, tuple(parts), tuple(notes))


_SHARED = "data loaders' batches, pinned memory, /dev/shm: close their creator"
_FILES = "code and mapped data: dropped by the kernel when it needs room"
_WORKERS = "such as data loaders; shared pages count by share where that is known (PSS): end them"
_OF_OTHERS = "end what you do not need, such as other notebooks' kernels"
_CACHE = "cached files: the system frees them when memory is needed"


class _HostBasis(NamedTuple):
    """The memory that is broken down, the machine's or that of a container, in the kernel's
    figures.
    """

    name: str
    total_bytes: int
    free_bytes: int
    file_bytes: int
    cache_bytes: int
    name_of_others: str
    withheld_bytes: int
    """Bytes that are free, but not for this process."""
    why_withheld: str


def _host_basis(figures: HostFigures) -> _HostBasis:
    """Return the memory to break down: the container's, if its limit is below the machine's RAM,
    else the machine's. Free memory beyond a limit on this process counts as withheld.
    """
    basis = _machine_as_basis(figures)
    group = figures.group
    if group is not None and group.limit_bytes < figures.ram_bytes:
        basis = _container_as_basis(figures, group)
    limit = figures.limit
    if limit is None:
        return basis
    beyond_limit_bytes = basis.free_bytes - limit.available_bytes
    if beyond_limit_bytes <= basis.withheld_bytes:
        return basis
    size = format_bytes(limit.limit_bytes)
    what = own_limits.QUANTITIES[limit.name]
    why = f"{limit.name} allows this process {size} of {what}: {_RAISE_LIMIT}"
    return basis._replace(withheld_bytes=beyond_limit_bytes, why_withheld=why)


_RAISE_LIMIT = "raise it (ulimit, or %gpumem guard off)"
_IN_USE_OUTSIDE = "within the container's limit, but in use by the rest of the machine"


def _machine_as_basis(figures: HostFigures) -> _HostBasis:
    """Return the memory to break down if there is no container: the machine's."""
    return _HostBasis(
        name="the machine's RAM",
        total_bytes=figures.ram_bytes,
        free_bytes=figures.free_bytes,
        file_bytes=figures.file_bytes,
        cache_bytes=figures.available_bytes - figures.free_bytes - figures.file_bytes,
        name_of_others=_OTHERS,
        withheld_bytes=0,
        why_withheld=_IN_USE_OUTSIDE,
    )


def _container_as_basis(figures: HostFigures, group: cgroup.ControlGroup) -> _HostBasis:
    """Return the memory to break down within a container's limit."""
    free_bytes = max(0, group.limit_bytes - group.used_bytes)
    file_bytes = min(figures.file_bytes, group.mapped_bytes)
    return _HostBasis(
        name="the container's limit (cgroup)",
        total_bytes=group.limit_bytes,
        free_bytes=free_bytes,
        file_bytes=file_bytes,
        cache_bytes=group.cache_bytes - file_bytes,
        name_of_others="other processes in the container",
        withheld_bytes=max(0, free_bytes - figures.available_bytes),
        why_withheld=_IN_USE_OUTSIDE,
    )


class _Claims(NamedTuple):
    """Bytes of each kind of pages. A page of several kinds counts for the first of them."""

    free: int
    private: int
    """This process's own pages."""
    shared: int
    """Pages of shared memory of this process."""
    files: int
    """Pages of files that this process has mapped."""
    cache: int
    """Cached files that the system may drop."""
    children: int
    """Pages of child processes."""
    unclaimed: int
    """Pages of other processes and of the system."""


def _claims(basis: _HostBasis, figures: HostFigures) -> _Claims:
    """Divide the host's memory among the kinds of pages.

    The kernel's figures overlap: a page of a mapped file is in the page cache, too. So each figure
    gets at most the bytes that the figures before it leave of the total.
    """
    in_order = (
        basis.free_bytes,
        figures.private_bytes,
        figures.shared_bytes,
        basis.file_bytes,
        basis.cache_bytes,
        figures.children_bytes or 0,
    )
    unclaimed = basis.total_bytes
    claimed = []
    for size_bytes in in_order:
        claim = max(0, min(size_bytes, unclaimed))
        claimed.append(claim)
        unclaimed -= claim
    return _Claims._make([*claimed, unclaimed])


def _host_notes(claims: _Claims, figures: HostFigures) -> list[str]:
    """Return a note, in a list, on pages of this process that its container is not charged for;
    nothing if there are none.
    """
    missing = figures.rss_bytes - claims.private - claims.shared - claims.files
    if missing <= 0:
        return []
    size = format_bytes(missing)
    return [f"{size} of this process's RSS are not charged to it here: shared files, mostly"]


class _PartsOfPages(NamedTuple):
    """The parts of this process's own pages."""

    parts: list[Part]
    notes: Sequence[str] = ()
    """The reason why there is only one part."""


def _own_pages(
    size: int,
    storages: Iterable[Storage] | None,
    resident: Resident,
    own: OwnPages | None,
    objects: Mapping[str, int],
) -> _PartsOfPages:
    """Return the parts of this process's own pages: arrays in RAM by kind, objects, free pages of
    malloc, and pages without a name. If the arrays' bytes in RAM are unknown, all pages are one
    part.

    Args:
        size: bytes of all these pages.
        storages: as for ``host_parts``.
        resident: as for ``host_parts``.
        own: the pages that the kernel and malloc report; None if they are unknown.
        objects: as for ``host_parts``.
    """
    single_part = [Part("this process", size, _REST)]
    try:
        kinds = _resident_by_kind(storages or (), resident)
    except OSError as error:
        note = f"the arrays' bytes in RAM are unknown here ({error.strerror})"
        return _PartsOfPages(single_part, [note])
    unnamed_bytes = size - kinds.total()
    if unnamed_bytes < 0:
        note = (
            "the arrays that Python holds are larger than this process's own pages: they cannot be "
            "separated"
        )
        return _PartsOfPages(single_part, [note])
    parts = _parts_of_arrays(kinds)
    named = dict(objects)
    if own is not None:
        named |= zip(_ADVICE_ON_OWN_PAGES, own, strict=True)
    # Each part gets at most the bytes that are still unnamed, so that all parts sum to the total.
    for name, size_bytes in named.items():
        advice = _ADVICE_ON_OWN_PAGES.get(name) or _ADVICE_ON_OBJECTS.get(name, _OF_LIBRARY)
        claim = min(unnamed_bytes, size_bytes)
        parts.append(Part(name, claim, advice))
        unnamed_bytes -= claim
    if not parts:
        return _PartsOfPages(single_part)
    return _PartsOfPages([*parts, Part(_NOT_NAMED, unnamed_bytes, _OF_NO_OBJECT)])


def _parts_of_arrays(kinds: Mapping[str, int]) -> list[Part]:
    """Return the parts of tensors and arrays, and of other memory that libraries keep, by kind."""
    of_arrays: dict[str, int] = {}
    of_libraries = list[Part]()
    for kind, size_bytes in kinds.items():
        if kind.startswith(DATA_OF):
            of_libraries.append(Part(f"data {kind}", size_bytes, _OF_LIBRARY))
        else:
            of_arrays[kind] = size_bytes
    return kind_parts("arrays", of_arrays) + of_libraries


def _resident_by_kind(storages: Iterable[Storage], resident: Resident) -> Counter[str]:
    """Return the bytes in RAM of the storages on the host, by kind.

    Raises:
        OSError: the system does not report them.
    """
    kinds: Counter[str] = Counter()
    on_host = _disjoint(item for item in storages if item.device == "cpu")
    if not on_host:
        return kinds
    ranges = [(item.address, item.size_bytes) for item in on_host]
    for item, size_bytes in zip(on_host, resident(ranges), strict=True):
        kinds[item.kind] += size_bytes
    return kinds


def _disjoint(storages: Iterable[Storage]) -> list[Storage]:
    """Return the storages by address, each without the bytes that an earlier one covers: arrays may
    share memory, and no byte may count twice.
    """
    disjoint = []
    reached = 0
    for item in sorted(storages, key=attrgetter("address")):
        start = max(item.address, reached)
        end = item.address + item.size_bytes
        if start < end:
            disjoint.append(item._replace(address=start, size_bytes=end - start))
            reached = end
    return disjoint
