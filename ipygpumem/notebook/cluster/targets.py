"""Finds the engines that ``--on`` names."""

from __future__ import annotations

import re
import sys
from typing import Any

from ipygpumem.errors import ClusterError
from ipygpumem.introspect import is_exactly
from ipygpumem.merging import engine_numbers
from ipygpumem.notebook.cluster.controller import is_closed
from ipygpumem.notebook.cluster.engines import Engines

_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_ANSWER_SECONDS = 30.0
_HOW = "import ipyparallel; rc = ipyparallel.Cluster(n=4).start_and_connect_sync(activate=True)"


def engines_of(shell: Any, words: str) -> Engines:
    """Return the engines that ``all``, ``0-3,5``, ``gpu`` or the name of a view stands for.

    Raises:
        ClusterError: there is no cluster, or it has no such engine.
    """
    named = shell.user_ns.get(words)
    if is_exactly(named, _library("DirectView"), _library("BroadcastView")):
        client, numbers = named.client, named.targets
        if is_closed(client):
            raise ClusterError(f"--on {words}: the client of that view is closed")
        return _checked(client, client.ids if numbers == "all" or numbers is None else numbers)
    client = _client(shell)
    if words == "all":
        return _checked(client, client.ids)
    if words == "gpu":
        return _with_cards(_checked(client, client.ids))
    if not _NUMBERS.fullmatch(words):
        raise ClusterError(f"--on {words}: write all, gpu, numbers of engines such as 0-3 or 0,2, or a view's name")
    return _checked(client, [number for part in words.split(",") for number in _range(part)])


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), min(int(last or first), int(first) + 1_000_000) + 1)


def _checked(client: Any, numbers: Any) -> Engines:
    wanted = [numbers] if type(numbers) is int else list(dict.fromkeys(numbers))
    there = client.ids
    if not there:
        raise ClusterError("the cluster has no engine: none has started yet, or all have died")
    lacking = [number for number in wanted if number not in there]
    if not wanted:
        raise ClusterError(f"--on names no engine; the cluster has {engine_numbers(there)}")
    if lacking:
        raise ClusterError(f"the cluster has no {engine_numbers(lacking)}; it has {engine_numbers(there)}")
    return Engines(client, wanted)


def _with_cards(engines: Engines) -> Engines:
    asked = engines.ask("has_card")
    engines.wait(asked, _ANSWER_SECONDS)
    found, failed = engines.answers(asked)
    engines.forget(asked)
    with_card = [number for number, has in found.items() if has]
    if not with_card:
        why = f": engine {next(iter(failed))} {next(iter(failed.values()))}" if failed else ""
        raise ClusterError(f"--on gpu: no engine has a GPU{why}")
    return engines.only(with_card)


def _library(name: str) -> Any:
    return getattr(sys.modules.get("ipyparallel"), name, ())


def _client(shell: Any) -> Any:
    """Return the client of the active view, or the only one that a name of the notebook's holds."""
    if "ipyparallel" not in sys.modules:
        raise ClusterError(f"--on needs a running cluster: pip install ipyparallel, then {_HOW}")
    if sys.modules["ipyparallel"].version_info[0] < 8:
        raise ClusterError("--on needs ipyparallel 8 or newer")
    magics = shell.magics_manager.registry.get("ParallelMagics")
    view = getattr(magics, "view", None)
    if view is not None and not is_closed(view.client):
        return view.client
    kind = _library("Client")
    found = [value for value in list(shell.user_ns.values()) if type(value) is kind]
    clients = {id(client): client for client in found if not is_closed(client)}
    if len(clients) > 1:
        raise ClusterError("--on: there are several clusters; name a view, such as view = rc[:] and --on view")
    if not clients:
        raise ClusterError(f"--on needs a running cluster: {_HOW}")
    return next(iter(clients.values()))
