"""Loads and unloads the extension; every registration with the shell pushes its own undo."""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from traitlets import TraitError
from traitlets.config import Config

from ipygpumem import interrupts
from ipygpumem.errors import NOT_LOADED, NotLoadedError
from ipygpumem.shell.commands.declarations import Features
from ipygpumem.shell.config import IPyGpuMem, config_of
from ipygpumem.shell.dispatch import GpuMemMagics
from ipygpumem.shell.error_isolation import ErrorIsolation
from ipygpumem.shell.ipython.rewriting import loop_over_body, raise_at_start, rewrite_cell

if TYPE_CHECKING:
    from ipygpumem.shell.app import App  # see ``Extension.app``


def load(shell: Any, features: Features) -> None:
    """Install the extension in ``shell``, unless it is loaded."""
    if config_of(shell) is None:
        Extension(shell, features)


def unload(shell: Any) -> None:
    """Remove the extension from ``shell``; print a warning if experiments were open."""
    config = config_of(shell)
    if config is None:
        raise NotLoadedError(NOT_LOADED)
    abandoned = config.extension.remove()
    if abandoned:
        names = ", ".join(map(repr, abandoned))
        print(
            f"ipygpumem: unloaded with open experiments ({names}); their names are kept.",
            file=sys.stderr,
        )


class Extension:
    """The extension's registrations with one shell.

    Loading only registers. The services are built as the first cell begins, before it is measured:
    a kernel that loads the extension at its start is ready earlier, and no import waits for the
    moment when memory is short.
    """

    def __init__(self, shell: Any, features: Features) -> None:
        self._shell = shell
        self._features = features
        self._undo: list[Callable[[], object]] = []
        self._isolation = ErrorIsolation()
        self._config = config = _configured(shell)
        self._app: App | None = None
        self._building = threading.RLock()
        """Held while the services are built; the cells of subshells begin in several threads."""
        self._missed: Any = None
        """The ``info`` of a cell that began when the services could not be built."""
        config.extension = self
        self._signal_error: BaseException | None = None
        """The exception of a signal that arrived in our hook before a cell; the cell's code raises
        it.
        """
        try:
            self._register(config)
        except BaseException:
            self.remove()
            raise

    @property
    def app(self) -> App:
        """The services of this shell, built on first use."""
        with self._building:
            if self._app is None:
                from ipygpumem.shell.app import App  # 100 modules that loading does not need

                app = App(
                    self._shell, self._config, features=self._features, isolation=self._isolation
                )
                app.context.cells.missed = self._missed
                self._install_binding_recorder(app)
                self._app = app
            return self._app

    @property
    def command_names(self) -> list[str]:
        """The names of all magics, without ``%``."""
        return self._features.commands.names

    def _register(self, config: IPyGpuMem) -> None:
        """Install all parts of the extension; each pushes its undo."""
        self._install_options(config)
        self._install_observers_of_code()
        self._install_cell_hooks()
        self._install_magics()
        # These are optional: their failure does not stop loading.
        self._isolation.run_all("completion", (self._install_completers, "completion is off"))
        if config.recorder:
            self._isolation.run_all("the recorder", (self._start_recorder, "the recorder is off"))

    def _start_recorder(self) -> None:
        """Start the flight recorder, because the option ``recorder`` is set."""
        self.app.recorder.start_if_it_can(tell=True)

    def _install_options(self, config: IPyGpuMem) -> None:
        """Let ``%config`` find the options, and apply changes of them at once."""
        self._append_to(functools.partial(getattr, self._shell, "configurables"), config)
        config.observe(self._host_peak_changed, "host_peak")
        config.observe(lambda change: self.app.recorder.switched(change), "recorder")

    def _install_observers_of_code(self) -> None:
        """Let IPython pass the syntax trees of all code that it compiles to ``_code_seen``."""
        code_seen = self._isolation.wrap(
            "code_seen",
            self._code_seen,
            lost="open experiments cannot tell the code's own names",
            instead=self._code_missed,
            on_signal=self._raise_in_code,
        )
        self._first_transformer = _CodeTransformer(code_seen, self._raise_in_code, may_change=False)
        self._last_transformer = _CodeTransformer(code_seen, self._raise_in_code, may_change=True)
        self._shell.ast_transformers.append(self._last_transformer)
        self._undo.append(self._stop_observing)

    def _install_binding_recorder(self, app: App) -> None:
        """Give instrumented code the mapping in which it looks up events."""
        from ipygpumem.scope.instrumenting import BINDING_RECORDER  # with the App, not at loading

        code = app.experiments.code
        trap = self._shell.builtin_trap
        recorder = code.binding_recorder
        recorder.record = self._isolation.wrap(
            "names",
            recorder.record,
            lost="names of the running code are kept",
            instead=code.save_after_missed_event,
        )
        # Stays in the running cell's builtins: its instrumented code may still use it.
        trap.auto_builtins[BINDING_RECORDER] = recorder
        if BINDING_RECORDER in vars(builtins):  # set by an earlier load, for a running cell
            setattr(builtins, BINDING_RECORDER, recorder)
        elif trap._nested_level:
            trap.add_builtin(BINDING_RECORDER, recorder)
        self._undo.append(lambda: trap.auto_builtins.pop(BINDING_RECORDER, None))

    def _install_cell_hooks(self) -> None:
        """Call the session at the start and the end of each cell, and rewrite first lines."""
        no_report = "this cell has no report"
        self._register_callback(
            "pre_run_cell",
            self._cell_begins,
            lost="it was not measured",
            instead=self._cell_missed,
            on_signal=self._keep_for_code,
        )
        self._register_callback(
            "post_run_cell", self._cell_ends, lost=no_report, on_signal=self._fail_cell
        )
        self._register_callback(
            "post_run_cell",
            self._ensure_cell_ended,
            lost=no_report,
            instead=self._forget_cell,
            on_signal=self._fail_cell,
        )
        rewrite = self._isolation.wrap(
            "rewriting",
            rewrite_cell,
            lost="a first line such as %%experiment is not applied",
            instead=lambda lines: lines,
        )
        self._append_to(
            functools.partial(getattr, self._shell, "input_transformers_cleanup"), rewrite
        )

    def _install_completers(self) -> None:
        """Complete the lines of our magics."""
        for name in self.command_names:
            completer = functools.partial(_completions, self, name)
            self._register_completer(f"%{name}", completer)
            self._register_completer(f"%%{name}", completer)
        has_matchers = hasattr(sys.modules["IPython.core.completer"], "CompletionContext")
        if has_matchers:  # from IPython 8.6 on
            self._append_to(self._matchers, _matcher(self))

    def _matchers(self) -> list[Any]:
        """Return the completer's list of matchers, as it is now."""
        matchers: list[Any] = getattr(self._shell.Completer, "custom_matchers", [])
        return matchers

    def _cell_begins(self, info: Any) -> None:
        """Begin a cell; this builds the services for the first one."""
        self._signal_error = None
        with interrupts.reraise_swallowed():
            self._isolation.run_all(
                "pre_run_cell", (self._observe_both_ends, "other transformers may hide code")
            )
            self.app.session.cell_begins(info)

    def _keep_for_code(self, error: BaseException, _: Any) -> None:
        """Store the exception of a signal that arrived in our hook before a cell: ``_code_seen``
        lets the cell's code raise it.
        """
        self._signal_error = error

    def _cell_missed(self, info: Any) -> None:
        """Note a cell whose start our hook has missed, because it has failed."""
        self._missed = info
        if self._app is not None:
            self._app.context.cells.missed = info

    # A cell that ends before there is an App is the one that loads the extension, or a blank one.

    def _cell_ends(self, result: Any) -> None:
        """End a cell: free, record, report."""
        if self._app is not None:
            self._app.session.cell_ends(result)

    def _ensure_cell_ended(self, result: Any) -> None:
        """End a cell whose ``_cell_ends`` was interrupted."""
        self._missed = None
        if self._app is not None:
            self._app.session.ensure_cell_ended(result)

    def _forget_cell(self, result: Any) -> None:
        """Remove a cell whose ``_ensure_cell_ended`` has failed."""
        if self._app is not None:
            self._app.context.cells.forget(result)

    def _fail_cell(self, error: BaseException, result: Any) -> None:
        """Give a cell the exception of a signal that arrived in our hook at its end."""
        self.app.session.fail_cell(error, result)

    def _raise_in_code(self, error: BaseException, tree: Any) -> None:
        """Let the code itself raise the exception: IPython would print it, and unregister our
        transformer.
        """
        raise_at_start(tree, error, self._shell)

    def _code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Prepare the scopes for code that runs next, and make our changes to its tree: look-ups
        that report its bindings, the loop of ``%%autofit``, and a signal's exception to raise.
        """
        if self._signal_error is not None:
            error, self._signal_error = self._signal_error, None
            raise_at_start(tree, error, self._shell)
        if self._app is not None:  # else no experiment can be open
            self._app.experiments.code.code_seen(tree, may_change=may_change, is_timed=is_timed)
        loop_over_body(tree, self._shell)

    def _code_missed(self, tree: Any, **options: bool) -> None:
        """Prepare the scopes for code in which ``_code_seen`` has failed."""
        if self._app is not None:
            self._app.experiments.code.code_missed(tree, **options)

    def _observe_both_ends(self) -> None:
        """Observe code before and after the user's transformers, if there are any: if one of them
        raises, IPython skips the transformers after it.
        """
        transformers = self._shell.ast_transformers
        if len(transformers) == 1 and transformers[0] is self._last_transformer:
            return
        foreign = self._foreign_transformers()
        if foreign:
            transformers[:] = [self._first_transformer, *foreign, self._last_transformer]
        else:
            transformers[:] = [self._last_transformer]

    def _stop_observing(self) -> None:
        """Remove our transformers."""
        self._shell.ast_transformers[:] = self._foreign_transformers()

    def _foreign_transformers(self) -> list[Any]:
        """Return the transformers of users and other extensions."""
        ours = {id(self._first_transformer), id(self._last_transformer)}
        return [item for item in self._shell.ast_transformers if id(item) not in ours]

    # -- parts that undo themselves --------------------------------------------------------------

    def _append_to(self, find_list: Callable[[], list[Any]], item: Any) -> None:
        """Append ``item`` to a list, and remove it at the end.

        Args:
            find_list: returns the list; it is called again at the end, because other code may have
                replaced the list.
            item: the item.
        """
        find_list().append(item)
        self._undo.append(lambda: find_list().remove(item))

    def _register_callback(
        self, name: str, callback: Callable[..., None], **isolation: Any
    ) -> None:
        """Call ``callback`` at an event of IPython, isolated as ``ErrorIsolation.wrap`` says."""
        isolated = self._isolation.wrap(name, callback, **isolation)
        self._append_to(functools.partial(self._shell.events.callbacks.__getitem__, name), isolated)

    def _install_magics(self) -> None:
        """Register the magics; at the end, earlier magics of the same names are put back."""
        manager = self._shell.magics_manager
        ours = GpuMemMagics(self._shell, self._features.commands, self)
        earlier = dict[tuple[str, str], Any]()
        for kind, names in ours.magics.items():
            for name in names:
                earlier[kind, name] = manager.magics[kind].get(name)
        # every Magics object adds itself there
        self._undo.append(lambda: self._shell.configurables.remove(ours))
        self._shell.register_magics(ours)
        for (kind, name), magic in earlier.items():
            self._undo.append(functools.partial(_put_back, manager.magics[kind], name, magic))
        self._undo.append(lambda: manager.registry.pop(GpuMemMagics.__name__, None))

    def _register_completer(self, key: str, completer: Callable[..., list[str]]) -> None:
        """Complete the lines that begin with ``key``."""
        self._shell.set_hook("complete_command", completer, str_key=key)
        self._undo.append(
            lambda: self._shell.strdispatchers["complete_command"].strs.pop(key, None)
        )

    def _host_peak_changed(self, change: Any) -> None:
        """Measure the host's peak as the changed option ``host_peak`` says."""
        app = self._app
        if app is not None:  # else the host's probe is built with the new option
            app.context.meter.change(lambda: app.host.use_mark(exact=change["new"] == "kernel"))

    def remove(self) -> list[str]:
        """Undo every registration in reverse order; return the names of open experiments."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception as error:  # already removed by other code; undo the rest
                print(f"ipygpumem: unloading: {type(error).__name__}: {error}", file=sys.stderr)
        if self._app is None:
            return []
        return self._app.close()


def _configured(shell: Any) -> IPyGpuMem:
    """Return the configured options; an invalid one is reported and keeps its default."""
    try:
        return IPyGpuMem(parent=shell)
    except TraitError:
        given = shell.config.IPyGpuMem
        for name in list(given):  # %config keeps refused values, and a file may hold anything
            try:
                IPyGpuMem(config=Config(IPyGpuMem={name: given[name]}))
            except TraitError as error:  # noqa: PERF203  # check each option
                del given[name]
                print(f"ipygpumem: option {name} is set to its default: {error}", file=sys.stderr)
        return IPyGpuMem(parent=shell)


class _CodeTransformer:
    """AST transformer that passes on the tree of all code compiled by the shell, and may change it
    in place.
    """

    def __init__(
        self,
        callback: Callable[..., None],
        on_signal: Callable[[BaseException, Any], None],
        *,
        may_change: bool,
    ) -> None:
        self._callback = callback
        self._on_signal = on_signal
        self._may_change = may_change

    def visit(self, node: Any) -> Any:
        """Pass on a tree; IPython calls it for each piece of code, and %timeit for its own."""
        is_timed = sys._getframe(2).f_code.co_name == "timeit"
        try:
            self._callback(node, may_change=self._may_change, is_timed=is_timed)
        except BaseException as error:  # a signal may arrive before the callback handles it
            if not interrupts.is_from_signal(error):
                raise
            self._on_signal(error, node)
        return node


def _put_back(magics: dict[str, Any], name: str, earlier: Any) -> None:
    """Give ``name`` its earlier magic; remove it if that is None."""
    magics.pop(name, None)
    if earlier is not None:
        magics[name] = earlier


def _completions(extension: Extension, magic: str, shell: Any, event: Any) -> list[str]:
    """Return the completions of a line of ``magic``; ``event`` is IPython's."""
    from ipygpumem.shell.commands.completion import complete  # on the first Tab

    app = extension.app
    return complete(app.commands, app, app.context.namespace, magic, event)


def _matcher(extension: Extension) -> Callable[[Any], dict[str, Any]]:
    """Return a matcher that suppresses all other completions in lines of our magics, such as Jedi's
    names.
    """
    names = extension.command_names

    def ipygpumem_matcher(context: Any) -> dict[str, Any]:
        words = context.line_with_cursor.split()
        word = words[0] if words else ""
        magic = word.lstrip("%")
        if word not in (f"%{magic}", f"%%{magic}") or magic not in names:
            return {"completions": []}
        event = SimpleNamespace(
            line=context.line_with_cursor, text_until_cursor=context.text_until_cursor
        )
        completions = list[SimpleNamespace]()
        for text in _completions(extension, magic, shell=None, event=event):
            if text.startswith(context.token):
                completions.append(SimpleNamespace(text=text, type=""))
        return {"completions": completions, "suppress": True, "ordered": True}

    ipygpumem_matcher.matcher_api_version = 2  # type: ignore[attr-defined]  # as IPython's own decorator does
    return ipygpumem_matcher
