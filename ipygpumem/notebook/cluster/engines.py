"""Asks the engines of an ipyparallel cluster, and waits for those that answer.

An engine works off what it is sent in order, so a question that follows a cell is answered when the cell is over.
Questions travel as text for ``eval``: a function would travel as bytecode, which another Python cannot read.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ipygpumem.errors import ClusterError
from ipygpumem.merging import engine_numbers
from ipygpumem.notebook.cluster.controller import SILENT, Controller, is_closed
from ipygpumem.objects import interrupts
from ipygpumem.objects.progress import Progress, unseen

_MODULE = "ipygpumem.notebook.engine"
_POLL_SECONDS = 0.1
_PURGES = 3
_GRACE_SECONDS = 10.0
"""So long an engine that got our Ctrl-C has to answer."""

_NEWS_SECONDS = 0.5
"""So long it may take to hear that an engine has begun a cell."""

_HUB_SECONDS = 5.0
"""So long the hub has to drop answers."""

_LOST = ("EngineError", "TaskAborted")

Asked = dict[int, Any]
"""ipyparallel's ``AsyncResult`` by engine."""


class Engines:
    """Some engines of a cluster.

    Args:
        client: ipyparallel's.
        numbers: its ids of the engines.
        controller: what is known of the cluster's controller.
    """

    def __init__(self, client: Any, numbers: Sequence[int], controller: Controller | None = None) -> None:
        self.client = client
        self.numbers = tuple(numbers)
        self.controller = controller or Controller(client)

    def only(self, numbers: Iterable[int]) -> Engines:
        """Return some of the engines."""
        return Engines(self.client, tuple(numbers), self.controller)

    def ask(self, function: str, *words: object) -> Asked:
        """Let each engine call a function of ``engine.py`` with plain values, and return what will have the answers."""
        return self.ask_each(function, dict.fromkeys(self.numbers, words))

    def ask_each(self, function: str, words: Mapping[int, tuple[object, ...]]) -> Asked:
        """Let each engine call it with values of its own."""
        call = f"__import__('importlib').import_module({_MODULE!r}).answer({function!r}, *"
        return self._each(lambda view, number: view.apply_async(eval, f"{call}{words[number]!r})", {}))

    def run(self, source: str) -> Asked:
        """Let each engine run a cell."""
        return self._each(lambda view, _: view.execute(source, silent=False, block=False))

    def _each(self, send: Callable[[Any, int], Any]) -> Asked:
        there, asked = set(() if is_closed(self.client) else self.client.ids), Asked()
        for number in self.numbers:
            if number in there:
                # It may have died just now.
                with contextlib.suppress(LookupError, sys.modules["ipyparallel.error"].NoEnginesRegistered):
                    asked[number] = send(self.client[number], number)
        return asked

    def wait(
        self,
        asked: Asked,
        seconds: float | None = None,
        *,
        progress: Progress = unseen,
        to_all: bool = False,
        anew: bool = False,
    ) -> bool:
        """Wait for all answers, for so long at most; a Ctrl-C, and a controller that is silent, end the waiting.

        Args:
            asked: what to wait for.
            seconds: so long at most.
            progress: is told how many have answered.
            to_all: a Ctrl-C goes to the engines that run the cell, too.
            anew: a Ctrl-C of before, which has been noted, does not end it.

        Returns:
            Whether there was a Ctrl-C.
        """
        with interrupts.noted() as struck:
            heard = len(struck) if anew else 0
            self._wait(asked, seconds, progress, struck, heard)
            interrupted = len(struck) > heard
            if interrupted and to_all:
                heard = len(struck)  # at one more it has been long enough
                begun = {number: asked[number] for number in self.interrupt(asked)}
                self._wait(begun, _GRACE_SECONDS, progress, struck, heard)
        return interrupted

    def _wait(self, asked: Asked, seconds: float | None, progress: Progress, struck: list[int], heard: int) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        while (waiting := unanswered(asked)) and len(struck) == heard:
            progress(1 - len(waiting) / len(asked))
            left = _POLL_SECONDS if until is None else min(_POLL_SECONDS, until - time.monotonic())
            if left <= 0 or self.controller.is_silent:
                return
            asked[waiting[0]].wait(left)

    def answers(self, asked: Asked) -> tuple[dict[int, Any], dict[int, str]]:
        """Return what the engines have answered, and why others have not."""
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for number in self.numbers:
            result = asked.get(number)
            if result is None:
                failed[number] = "is not there any more"
            elif not result.ready():
                failed[number] = self._unanswered()
            else:
                answer, why = _answer(result)
                if why:
                    failed[number] = why
                else:
                    found[number] = answer
        return found, failed

    def lost(self, results: Asked) -> dict[int, str]:
        """Return the engines whose cell has no end, and why: they died, or do not answer."""
        found: dict[int, str] = {}
        for number, result in results.items():
            if not result.ready():
                goes_on = "goes on, and its experiment stays open"
                found[number] = self._unanswered(
                    f": its cell {goes_on if self.has_begun(result) else 'has not begun, and is taken back'}"
                )
            elif (error := error_of(result)) is not None and getattr(error, "ename", "") in _LOST:
                found[number] = _why(error)
        return found

    def _unanswered(self, more: str = "") -> str:
        return f"has not answered{f', {SILENT}' if self.controller.is_silent else more}"

    def check(self, asked: Asked) -> None:
        """Raise where answers are lacking since the controller is silent.

        Raises:
            ClusterError: it is.
        """
        if (waiting := unanswered(asked)) and self.controller.is_silent:
            verb = "has" if len(waiting) == 1 else "have"
            raise ClusterError(f"{engine_numbers(waiting)} {verb} not answered, {SILENT}")

    def has_begun(self, result: Any) -> bool:
        """Whether an engine has begun its cell: before, it runs something else of the user's."""
        return self.client.metadata[result.msg_ids[0]]["execute_input"] is not None

    def interrupt(self, cells: Asked) -> list[int]:
        """Send a Ctrl-C to the engines that run these cells, and return them; take back cells that have not begun."""
        if is_closed(self.client):
            return []
        until = time.monotonic() + _NEWS_SECONDS
        while not all(self.has_begun(cells[number]) for number in unanswered(cells)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        begun = [number for number in unanswered(cells) if self.has_begun(cells[number])]
        if begun:
            self.client.send_signal(signal.SIGINT, targets=begun, block=False)
        if later := [cells[number] for number in unanswered(cells) if number not in begun]:
            self.client.abort(later, block=False)
        return begun

    def forget(self, *several: Asked) -> None:
        """Drop the answers from the client's cache and the hub's, and take back what has not begun."""
        results = [result for asked in several for result in asked.values()]
        done = [message for result in results if result.ready() for message in result.msg_ids]
        late = [result for result in results if not result.ready()]
        if late and not is_closed(self.client):
            self.client.abort(late, block=False)
        if done:
            self.client.purge_local_results(done)
        if done and not self.controller.is_silent:
            purge = threading.Thread(target=self._forget_at_hub, args=(done,), daemon=True)
            purge.start()
            purge.join(_HUB_SECONDS)  # of a controller that has stopped no answer comes, ever

    def _forget_at_hub(self, messages: list[str]) -> None:
        """Let the hub drop answers; it may get them a moment after us, and those of dead engines never."""
        for _ in range(_PURGES):
            try:
                self.client.purge_hub_results(messages)
            except Exception as error:  # noqa: PERF203  # of any type: the hub's own
                if getattr(error, "ename", "") != "IndexError":
                    raise
                time.sleep(_POLL_SECONDS / 2)
            else:
                return
        for message in messages if len(messages) > 1 else ():
            self._forget_at_hub([message])


def unanswered(asked: Asked) -> list[int]:
    """Return the engines that have not answered yet."""
    return [number for number, result in asked.items() if not result.ready()]


def failed(results: Asked) -> list[int]:
    """Return the engines whose cell has ended with an error."""
    return [number for number, result in results.items() if result.ready() and error_of(result) is not None]


def error_of(result: Any) -> BaseException | None:
    """Return the error of an answer that is there."""
    found: BaseException | None = result.exception(timeout=0)
    return found


def _answer(result: Any) -> tuple[Any, str]:
    error = error_of(result)
    if error is not None:
        return None, _why(error)
    answer = result.get(timeout=0)
    return (answer["value"], "") if "value" in answer else (None, answer["error"])


def _why(error: BaseException) -> str:
    name = getattr(error, "ename", type(error).__name__)
    text = str(getattr(error, "evalue", error)).partition("\n")[0]
    if name in ("ModuleNotFoundError", "ImportError"):
        return f"has no ipygpumem, or an older one ({text})"
    if name == "EngineError":
        return "died"
    return f"{name}: {text}"


def show_outputs(results: Asked) -> None:
    """Print and display what the cells did, one engine after the other."""
    for number, result in results.items():
        if result.ready() and result.wait_for_output(1):
            if len(results) > 1 and (result.stdout or result.stderr or result.outputs or result.execute_result):
                sys.stdout.write(f"[engine {number}]\n")
            result.display_outputs()


def raise_errors(results: Asked) -> None:
    """Raise the errors of the cells that have ended, as ``%%px`` does."""
    __tracebackhide__ = True
    errors = [error_of(results[number]) for number in failed(results)]
    if errors:
        sys.modules["ipyparallel.error"].collect_exceptions(errors, "execute")
