"""``%%estimate --fit``: estimates the code with one change after another, then with several."""

from __future__ import annotations

import time
import types
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from IPython.utils.capture import capture_output

from ipygpumem.errors import DeviceError, EstimateError, UnitError, describe_error, quoted
from ipygpumem.estimating import loading
from ipygpumem.estimating.records import (
    FITS,
    FRAGMENTATION,
    PERHAPS,
    DeviceEstimate,
    Estimate,
)
from ipygpumem.extras.fit.applying import EQUAL, Change, ChangedRun
from ipygpumem.extras.fit.changes import batch_in_parts, candidates, untried
from ipygpumem.extras.fit.observing import Observed
from ipygpumem.probes.accelerators import parse_device
from ipygpumem.report.devices import device_label
from ipygpumem.report.estimate import estimate_report
from ipygpumem.report.layout import Fact, Listing, Report, Table
from ipygpumem.report.words import clean, count
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options
from ipygpumem.units import MIB, as_typed, checked_bytes, format_bytes, format_in


class Trial(NamedTuple):
    """An estimate of the code with changes, and its floating-point operations."""

    changes: Sequence[Change]
    """The changes; empty for the code as it is."""
    estimate: Estimate
    flops: int
    """Number of operations."""

    @property
    def fits(self) -> bool:
        """True if the code then fits, as far as an estimate can tell.

        A smaller batch does not remove a doubt about an operator or a compiler, so that such a
        "perhaps" is an answer. With a doubt about fragmentation the search goes on.
        """
        verdict = self.estimate.verdict
        if verdict == PERHAPS:
            return FRAGMENTATION not in self.doubts
        return verdict == FITS

    @property
    def doubts(self) -> tuple[str, ...]:
        """The reasons why the code fits perhaps, on all devices."""
        doubts: dict[str, None] = {}
        for device in self.estimate.devices:
            if device.verdict == PERHAPS:
                doubts.update(dict.fromkeys(device.doubts))
        return tuple(doubts)

    @property
    def device(self) -> DeviceEstimate:
        """The device that lacks most memory, among those whose memory is known."""
        devices = [device for device in self.estimate.devices if device.room_bytes is not None]
        return max(devices, key=lambda device: device.required_bytes - (device.room_bytes or 0))

    @property
    def title(self) -> str:
        """The names of the changes."""
        return _joined_titles(self.changes)


def _joined_titles(changes: Iterable[Change]) -> str:
    """Return the names of changes that are made together."""
    return " + ".join(change.title for change in changes)


def of_cell(app: App, options: Options, code: types.CodeType) -> list[Report]:
    """Return the reports of a cell's estimate, and of the changes with which it fits."""
    __tracebackhide__ = True  # of the user's errors
    running = app.context.cells.running()
    if running and running[-1].fit is not None:
        raise EstimateError("%%estimate: --fit does not work below %%autofit")
    search = ChangeSearch(app, options, code)
    base = search.trial_with(search.unchanged)
    reports = [estimate_report(base.estimate, options.fit)]
    if not base.estimate.devices:
        raise EstimateError("--fit: the cell makes no tensor to fit")
    if not base.estimate.verdict:
        why = "the memory of the device is not known here: give a size, such as --fit 24GiB"
        raise EstimateError(f"--fit: {why}")
    if options.batch and not search.findings.batch.rows:
        raise EstimateError(
            f"--batch {options.batch}: neither the cell nor the notebook has this name"
        )
    answer = report_of_unchanged(base)
    if answer is not None:
        return [*reports, answer]
    with app.context.display.working("estimating changes") as progress:
        search.run(base, progress)
    return [*reports, search.report(base)]


def report_of_unchanged(base: Trial) -> Report | None:
    """Return the report of code that fits without a change, perhaps; None if it does not."""
    if not base.fits:
        return None
    if not base.doubts:
        return Report("fit", "fit · it fits without a change")
    depends = ", ".join(map(clean, base.doubts))
    return Report("fit", f"fit · it fits perhaps without a change: it depends on {depends}")


class ChangeSearch:
    """The search for changes of one cell.

    ``run`` estimates each change alone, and then, if none is enough, several together. The first
    change that fits is the best, because ``candidates`` yields the cheapest first.

    Args:
        app: the extension.
        options: the options of ``%%estimate --fit``.
        code: the cell's code.
    """

    def __init__(self, app: App, options: Options, code: types.CodeType) -> None:
        self._namespace = app.context.namespace
        self._code = code
        self._batch = options.batch
        self._device, self._room_bytes = _device_and_memory(options)
        self._size = options.fit
        """The value of ``--fit``: a size as the user typed it, whose unit the report uses, or a
        device."""
        self._deadline = time.monotonic() + (
            options.timeout or loading.import_estimator().TIMEOUT_SECONDS
        )
        """Time on ``time.monotonic`` after which no further change is tried."""
        self._estimates = 0
        """Number of estimates so far."""
        self._assumed: list[str] = options.assume
        self.findings = Observed(options.batch, app.context.namespace)
        """The findings of the first run, from which the changes are chosen."""
        self.unchanged = Change(title="", line="", results="", apply=self.findings.apply)
        """No change: only observes the run."""
        self.trials: list[Trial] = []
        """The changes with which the code needs less memory."""
        self.best: Trial | None = None
        """The cheapest that fits; if none does, the combination that needs least."""
        self.useless: list[Trial] = []
        """The changes with which it does not need less; a combination with one of them may."""
        self.failed: list[str] = []
        """Titles of changes that could not be estimated, each with the reason."""

    def trial_with(self, *changes: Change) -> Trial:
        """Return an estimate with changes."""
        __tracebackhide__ = True  # of the user's errors
        self._estimates += 1
        estimation = loading.new_estimation(
            self._device,
            self._room_bytes,
            max(1.0, self._deadline - time.monotonic()),
            self._assumed,
        )
        run = ChangedRun(estimation, estimation.copies.namespace(self._namespace), changes)
        return Trial(changes, estimation.of_code(self._code, self._namespace, run), run.flops)

    def _trial_or_none(self, *changes: Change) -> Trial | None:
        """Return an estimate with changes, or None if the code then fails or the time is up.

        The code's output, which the first run has shown, is not shown again.
        """
        title = _joined_titles(changes)
        if time.monotonic() > self._deadline:
            self.failed.append(f"{title}: not tried, since the time is up (--timeout)")
            return None
        try:
            with capture_output():
                return self.trial_with(*changes)
        except Exception as error:
            self.failed.append(f"{title}: {describe_error(error)}")
            return None

    def run(self, base: Trial, progress: Any) -> None:
        """Try each change, then combinations.

        Args:
            base: the estimate without a change.
            progress: is called with the share of the work that is done.
        """
        changes = list(candidates(self.findings))
        for number, change in enumerate(changes):
            progress(number / (2 * len(changes)))
            self._note_first_fitting(base, [change])
            if number == 0:  # parts of the batch are the second cheapest change
                self._note_first_fitting(base, list(batch_in_parts(self.findings, self._batch)))
        self.best = next((trial for trial in self.trials if trial.fits), None)
        if self.best is None:
            self.best = self._combined(base, progress)
        if self.best is None or not self.best.fits:
            self.best = self._first_perhaps() or self.best

    def _first_perhaps(self) -> Trial | None:
        """Return the first change with which the code fits perhaps, which fragmentation decides."""
        for trial in self.trials:
            if trial.estimate.verdict == PERHAPS:
                return trial
        return None

    def _note_first_fitting(self, base: Trial, changes: Sequence[Change]) -> None:
        """Note the trial of the first of ``changes`` with which the code fits; if it fits with none
        of them, that of the last one.

        Each of them needs less memory than the one before, so that the search bisects.
        """
        trials: dict[int, Trial | None] = {}

        def fits(number: int) -> bool:
            """Return True if the code fits with a change; keep the trial."""
            trial = trials[number] = self._trial_or_none(changes[number])
            return trial is not None and trial.fits

        first_fitting = bisect_left(range(len(changes)), True, key=fits)
        trial = trials.get(min(first_fitting, len(changes) - 1))
        if trial is None:  # there are no changes, or this one could not be estimated
            return
        if trial.device.required_bytes < base.device.required_bytes:
            self.trials.append(trial)
        else:
            self.useless.append(trial)

    def _combined(self, base: Trial, progress: Any) -> Trial | None:
        """Return the best combination of several changes; None if no two of them help together."""
        best = self._combined_until_it_fits(base, progress)
        if best.fits:
            best = self._without_unnecessary(best)
        return best if len(best.changes) > 1 else None

    def _combined_until_it_fits(self, base: Trial, progress: Any) -> Trial:
        """Return a combination of changes, made by adding one after the other until the code fits.

        A change that does not lower the memory is left out again.
        """
        best = base._replace(changes=())
        # Another change may have lowered the peak that hid a useless one.
        singles = [*self.trials, *self.useless]
        for done, single in enumerate(singles):
            progress(0.5 + done / (2 * len(singles)))
            (change,) = single.changes
            changes = [*_combinable(best.changes, change), change]
            trial = single if len(changes) < 2 else self._trial_or_none(*changes)
            if trial is not None and trial.device.required_bytes < best.device.required_bytes:
                best = trial
            if best.fits:
                break
        return best

    def _without_unnecessary(self, best: Trial) -> Trial:
        """Return a combination with milder or fewer changes with which the code still fits.

        It tries to replace each change from the last but one back to the first. The last change
        has made it fit, and stays.
        """
        for change in best.changes[-2::-1]:
            for replacement in self._milder_replacements(change):
                changes = _replaced(best.changes, change, replacement)
                trial = self._trial_or_none(*changes) if len(changes) > 1 else None
                if trial is not None and trial.fits:
                    best = trial
                    break
        return best

    def _milder_replacements(self, change: Change) -> list[list[Change]]:
        """Return the replacements of a change, the mildest first: nothing, or fewer parts of the
        batch.
        """
        if change.excludes != "batch":
            return [[]]
        sizes = batch_in_parts(self.findings, self._batch)
        return [[], *([size] for size in sizes if size.passes < change.passes)]

    # -- the report ------------------------------------------------------------------------------

    def report(self, base: Trial) -> Report:
        """Return the table of changes, and the best of them."""
        best = self.best
        trials = list(self.trials)
        if best is not None and len(best.changes) > 1:
            trials.append(best)
        table = Table.of(
            [_trial_row(trial, base, self._size) for trial in trials], {"peak", "needs"}
        )
        facts = [
            Fact("no effect", [clean(trial.title) for trial in self.useless]),
            Fact("not possible", [*map(clean, self.failed + self._unsafe_checkpoints())]),
        ]
        fitting = [trial for trial in self.trials if trial.estimate.verdict in (FITS, PERHAPS)]
        listings = [_listing("write", _titled_lines(fitting))]
        notes: list[str] = []
        if best is not None and best.estimate.verdict in (FITS, PERHAPS):
            listings.append(_listing(_title_of_best(best), _code_of(best.changes)))
        else:
            notes.append(self._nothing_found(base.device))
            listings.append(Listing("not estimated", self._untried(base.device)))
        return Report("fit", self._head(base.device), notes, [table], facts, listings)

    def _head(self, device: DeviceEstimate) -> list[str]:
        """Return the parts of the report's first line."""
        all_changes = count(len(self.trials) + len(self.useless), "change")
        return [
            "fit",
            f"{device_label(device.device)} {self._room_text(device)}",
            _fitting_text(self.trials, all_changes),
            count(self._estimates, "estimate"),
        ]

    def _room_text(self, device: DeviceEstimate) -> str:
        """Return the size of the memory into which the code must fit, in the unit that the user
        typed.
        """
        if self._room_bytes is None:
            return format_bytes(device.room_bytes or 0)
        return as_typed(self._size)

    def _unsafe_checkpoints(self) -> list[str]:
        """Return the kinds of blocks that must not run twice, with the reasons."""
        refused = [blocks for blocks in self.findings.blocks.values() if blocks.reason]
        return [f"checkpoint {blocks.name}: {blocks.reason}" for blocks in refused]

    def _untried(self, device: DeviceEstimate) -> list[str]:
        """Return the changes that were not estimated, and the most that each would save."""
        texts = []
        for title, saved_bytes in untried(self.findings, device.parts):
            texts.append(clean(f"{title}: up to {format_in(saved_bytes, self._size)} less"))
        return texts

    def _nothing_found(self, device: DeviceEstimate) -> str:
        """Return the note of a search that has found no change with which the code fits."""
        text = f"Nothing found for {self._room_text(device)}"
        if self.best is None:
            return text
        needed = format_in(self.best.device.required_bytes, self._size)
        return f"{text}: all of them together need {needed}"


def _combinable(changes: Sequence[Change], change: Change) -> list[Change]:
    """Return the items of ``changes`` that can be combined with ``change``: of two changes of one
    kind, such as two numbers of parts, one excludes the other.
    """
    return [other for other in changes if not change.excludes or other.excludes != change.excludes]


def _replaced(
    changes: Sequence[Change], change: Change, replacement: Sequence[Change]
) -> list[Change]:
    """Return changes, with ``replacement`` at the place of one of them."""
    new: list[Change] = []
    for other in changes:
        if other is change:
            new += replacement
        else:
            new.append(other)
    return new


def _title_of_best(best: Trial) -> str:
    """Return the title of the code to paste."""
    perhaps = f" perhaps ({', '.join(best.doubts)})" if best.doubts else ""
    return f"cheapest that fits{perhaps}: {best.title}"


def _listing(title: str, lines: Sequence[str]) -> Listing:
    """Return a listing of code."""
    return Listing(clean(title), [*map(clean, lines)], code=True)


def _titled_lines(trials: Sequence[Trial]) -> list[str]:
    """Return the code of each trial's change, below its title."""
    lines = []
    for trial in trials:
        change = trial.changes[0]
        lines += [f"# {change.title}", *change.line.split("\n")]
    return lines


def _code_of(changes: Sequence[Change]) -> list[str]:
    """Return the code of changes, each line once."""
    lines: dict[str, None] = {}
    for change in changes:
        lines.update(dict.fromkeys(change.line.split("\n")))
    return list(lines)


def _trial_row(trial: Trial, base: Trial, size: str) -> dict[str, str]:
    """Return the table's row of a trial.

    Args:
        trial: the estimate with changes.
        base: the estimate without a change.
        size: a size in the unit for the figures.
    """
    return {
        "change": clean(trial.title),
        "peak": format_in(trial.device.peak_bytes, size),
        "needs": format_in(trial.device.required_bytes, size),
        "fits": _fits_text(trial),
        "results": _effects_on_results(trial.changes),
        "cost": ", ".join(_costs(trial, base)),
    }


def _costs(trial: Trial, base: Trial) -> list[str]:
    """Return the additional costs of changes: the share of further floating-point operations, and
    the number of passes for each of the code's.
    """
    passes = max(change.passes for change in trial.changes)
    costs = []
    if base.flops:
        further_share = trial.flops * passes / base.flops - 1
        if abs(further_share) >= 0.005:
            costs.append(f"{further_share:+.0%} FLOPs")
    if passes > 1:
        costs.append(f"{passes} passes")
    return costs


def _fits_text(trial: Trial) -> str:
    """Return "yes", "no", or "perhaps" with the reasons."""
    verdict = trial.estimate.verdict
    if verdict == PERHAPS:
        return f"perhaps ({', '.join(map(clean, trial.doubts))})"
    return "yes" if verdict == FITS else "no"


def _fitting_text(trials: Sequence[Trial], all_changes: str) -> str:
    """Return how many changes fit for certain, and how many perhaps: ``2 of 7 changes fit, 1
    perhaps``.
    """
    verdicts = [trial.estimate.verdict for trial in trials]
    text = f"{verdicts.count(FITS)} of {all_changes} fit"
    number_of_perhaps = verdicts.count(PERHAPS)
    if number_of_perhaps:
        text += f", {number_of_perhaps} perhaps"
    return text


def _effects_on_results(changes: Sequence[Change]) -> str:
    """Return the effects of changes on the code's results, joined by semicolons; "equal" only if
    there is no other effect.
    """
    effects = dict.fromkeys(part for change in changes for part in change.results.split("; "))
    if len(effects) > 1:
        effects.pop(EQUAL, None)
    return "; ".join(effects)


def _device_and_memory(options: Options) -> tuple[str | None, int | None]:
    """Return the device, and the bytes into which the code must fit, from the options.

    For ``--fit 24GiB`` the device is that of ``--device``, if it was given. For ``--fit cuda:0``
    the bytes are None: that device's own memory.

    Raises:
        EstimateError: the value of ``--fit`` is neither of both, or options contradict each other.
    """
    if options.device_memory is not None:
        raise EstimateError("--fit says how much memory there is: leave out --device-memory")
    try:
        return options.device, checked_bytes(options.fit, minimum=MIB)
    except UnitError as error:
        if options.fit[:1].isdigit():
            raise EstimateError(f"--fit: {error}") from None
    try:
        device = parse_device(options.fit)
    except DeviceError:
        wrong = (
            f"{quoted(options.fit)} is neither a size, such as 24GiB, nor a device, such as cuda:0"
        )
        raise EstimateError(f"--fit: {wrong}") from None
    if options.device is not None:
        raise EstimateError("--fit names a device: leave out --device")
    return device, None
