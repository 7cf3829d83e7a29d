"""Replaces Python functions that fail on fake tensors, or that reach out of the estimate.

``torch_functions.py`` has the table of the functions that torch passes to a mode. Here are those
that it does not pass: functions of other libraries, functions that take no tensors, and functions
that torch's own functions call while the modes are off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.nn import functional
from torch.utils import _device
from torch.utils._python_dispatch import _disable_current_modes

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.devices.devices import CARD, HOST, Devices
from ipygpumem.estimating.devices.named_devices import ON_HOST, STAND_IN, names_host
from ipygpumem.estimating.devices.tensor_locations import TensorLocations
from ipygpumem.estimating.operators.autocast import Autocast
from ipygpumem.estimating.operators.card_functions import CardFunctions
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.unfollowed import Unfollowed, is_eager
from ipygpumem.estimating.user_lines import user_line
from ipygpumem.introspect import is_users


def choose_loop(optimizer: Any, devices: Devices, locations: TensorLocations) -> None:
    """Choose an optimizer's loop over its parameters as torch does on accelerators.

    For fake parameters torch would choose the plain loop. On accelerators it chooses ``foreach``,
    which takes more memory because it changes all parameters of a group at once, or the plain loop
    if one of the parameters is on the host.
    """
    if not _has_fast_loop(type(optimizer)):
        return  # such as Adafactor, which always uses the plain loop
    device_type, _, _ = (devices.assumed_device or "cpu").partition(":")
    for group in optimizer.param_groups:
        if _is_loop_chosen(group):
            continue
        are_on_host = [locations.of(parameter) == HOST for parameter in group["params"]]
        if any(are_on_host):
            continue
        device_types = {parameter.device.type for parameter in group["params"]}
        device_types.add(device_type)
        if device_types != {"cpu"}:
            group["foreach"] = True


def _has_fast_loop(kind: type) -> bool:
    """Return True if torch chooses a fast loop for an optimizer's class, or for a base of it."""
    for base in type.mro(kind):
        if base is torch.optim.Optimizer:
            continue
        if hasattr(sys.modules.get(base.__module__), "_default_to_fused_or_foreach"):
            return True
    return False


def _is_loop_chosen(group: dict[str, Any]) -> bool:
    """Return True if the user has chosen the loop for a group of parameters.

    An optimizer without the option ``foreach`` gives no choice; None in it leaves it to torch.
    """
    if group.get("fused") or group.get("differentiable"):
        return True
    return group.get("foreach", False) is not None


MOST_VALUES = 1 << 16
"""Maximum number of elements of a tensor that keeps its values: one that the code makes from
numbers, or one of integers on the host.
"""

NO_PROCESSES = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory": False,
    "timeout": 0,
    "_DataLoader__multiprocessing_context": None,
}
"""Attributes of a data loader that loads in this process, because worker processes cannot get fake
tensors.
"""


def fake_parameter(kind: Any, tensor: Any, *, requires_grad: bool) -> Any:
    """Return a parameter of a library's own class ``kind``, such as bitsandbytes' ``Params4bit``,
    which is also a fake tensor.
    """
    made = torch.Tensor.detach(tensor).requires_grad_(requires_grad)
    made.__class__ = _fake_parameter_class(kind)
    return made


@functools.lru_cache(maxsize=64)
def _fake_parameter_class(kind: Any) -> Any:
    """Return a class for fake tensors that derives from a library's parameter class, too."""

    def detach(tensor: Any) -> Any:
        # Of the same class, as torch.nn.Parameter() demands, and with the same attributes.
        made = fake_parameter(kind, torch.Tensor.detach(tensor), requires_grad=False)
        vars(made).update(vars(tensor))
        return made

    make_class = type(kind)
    bases = (kind, fake_tensor.FakeTensor)
    attributes = {"__module__": kind.__module__, "detach": detach}
    return make_class(kind.__name__, bases, attributes)


_NAMES_HOST = "_ipygpumem_names_host"
"""Attribute of a ``torch.device`` context that the estimated code has made: True if the code itself
names the CPU.
"""


class Patch(NamedTuple):
    """A value that replaces an attribute during the estimate."""

    owner: Any
    """The module or class that has the attribute; None if it is not installed."""
    name: str
    """The name of the attribute."""
    value: Any
    """The value that it has during the estimate."""
    reason: str
    """Why the attribute must be replaced."""


class Wrapper(NamedTuple):
    """A function that is called instead of another one, with that one as its first argument.

    The other fields are those of ``Patch``.
    """

    owner: Any
    name: str
    function: Callable[..., Any]
    """Is called with the replaced function, and then its arguments."""
    reason: str

    def patch(self) -> Patch:
        """Return the patch that calls ``function`` with the replaced one, then its arguments."""
        original = getattr(self.owner, self.name)
        function = self.function

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return Patch(self.owner, self.name, call, self.reason)


class Patches:
    """All replacements of one estimate.

    Args:
        note: adds a line to the notes.
        unfollowed: gets the kinds of code that a replacement notices.
        devices: the devices of the estimate.
        autocast: the replacements of autocast's functions.
        card: the replacements of functions with other kernels on a card.
        functions: the mode that handles torch's functions.
        threads_modes: returns all modes, as a context, for a thread that the code starts.
    """

    def __init__(
        self,
        note: Note,
        unfollowed: Unfollowed,
        devices: Devices,
        autocast: Autocast,
        card: CardFunctions,
        functions: AbstractContextManager[Any],
        threads_modes: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._unfollowed = unfollowed
        self._devices = devices
        self._autocast = autocast
        self._card = card
        self._functions = functions
        self._threads_modes = threads_modes
        self._files = SavedFiles(note)
        self._operator_patches_applied: list[Any] = []
        """The replacements of operators that are in force, in order, as patches of
        ``unittest.mock``.
        """
        self._other_patches: list[Any] = []
        """All other replacements that are in force, in order."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace all of them during the block."""
        replacements = [
            *self._fake_tensor_patches(),
            *self._effect_patches(),
            *self._run_patches(),
            *self._compiler_patches(),
            *self._device_context_patches(),
            *_patches_of_kept_arguments(),
        ]
        with ExitStack() as stack:
            stack.callback(self._autocast.close)
            self._other_patches = _mock_patches(replacements)
            self._operator_patches_applied = _mock_patches(self._operator_patches())
            applied = [*self._other_patches, *self._operator_patches_applied]
            for mock_patch in applied:
                stack.enter_context(mock_patch)
            stack.enter_context(_libraries_import_originals(applied))
            # A function that was compiled before the estimate must run as it is written.
            if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _operator_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements of operators, such as ``torch.softmax``, which torch's compiler
        looks up by their identities.
        """
        if self._devices.all_on_cpu:
            return [*self._card_patches(), *self._autocast_patches()]
        return self._card_patches()

    def _fake_tensor_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements in torch's own fake tensors."""
        mode = fake_tensor.FakeTensorMode
        tensor = fake_tensor.FakeTensor
        original_make = torch.Tensor._make_subclass
        make = staticmethod(functools.partial(_make_fake_parameter, original_make))
        no_references = SimpleNamespace(getweakrefs=_no_references)
        return [
            Patch(fake_tensor.log, "disabled", True, "the errors that it logs are raised, too"),
            Patch(mode, "avoid_device_init", True, "torch.tensor would allocate on a device"),
            Patch(fake_tensor, "init_gpu_context", _do_nothing, "it allocates on the device"),
            Patch(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_VALUES, "values may be sizes"),
            Wrapper(tensor, "tolist", _to_list, "it needs values, and no mode is asked"),
            Patch(torch.Tensor, "record_stream", _do_nothing, "it refuses our streams"),
            Patch(torch.Tensor, "_make_subclass", make, "it makes parameters, and asks no mode"),
            Patch(torch.utils, "weakref", no_references, "swap_tensors refuses them"),
            Wrapper(torch.utils, "swap_tensors", _swap_values, "it swaps values, too"),
        ]

    def _effect_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements of functions with effects outside the estimate."""
        files = self._files
        # Imported here, since the estimated code may import it, and a trainer saves at its end.
        safetensors = None
        if importlib.util.find_spec("safetensors"):
            safetensors = importlib.import_module("safetensors.torch")
        return [
            Wrapper(torch, "save", files.save, "fake tensors have no values to save"),
            Wrapper(torch, "load", files.load, "the file may be one that was not saved"),
            Wrapper(safetensors, "serialize", files.serialize, "as torch.save"),
            Wrapper(safetensors, "serialize_file", files.serialize, "as torch.save"),
            Patch(safetensors, "_flatten", _no_tensors, "it reads addresses"),
            Patch(safetensors, "_flatten_as_ptr", _no_tensors, "it reads addresses"),
            Patch(torch, "set_num_threads", _do_nothing, "it would last"),
        ]

    def _run_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements of functions that run code elsewhere: in processes, in threads,
        in a backward pass, or only for some values.
        """
        loader = torch.utils.data.DataLoader
        scaler = torch.amp.GradScaler
        autograd = torch.autograd
        hooks = autograd.graph.saved_tensors_hooks
        run_backward = self._run_backward
        return [
            Wrapper(loader, "__init__", _load_in_this_process, "processes get no fake tensors"),
            Wrapper(threading.Thread, "start", self._start_thread, "modes belong to a thread"),
            Wrapper(scaler, "_maybe_opt_step", _always_step, "an overflow is a value"),
            Wrapper(autograd, "_engine_run_backward", run_backward, "backward leaves modes"),
            Wrapper(hooks, "__init__", self._set_saved_tensor_hooks, "as backward"),
        ]

    def _compiler_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements of compilers, and of the transforms of ``torch.func``."""
        make_script = self._unfollowed.call_script_maker
        items: list[Patch | Wrapper] = [
            Wrapper(torch, "compile", self._skip_compiling, "fake tensors are not compiled"),
            Wrapper(torch.nn.Module, "compile", self._skip_compiling_module, "as torch.compile"),
            Wrapper(torch.jit, "script", self._compile_script, "it fuses operations"),
            Wrapper(torch.jit, "trace", make_script, "as torch.jit.script"),
            Wrapper(torch.jit, "load", make_script, "as torch.jit.script"),
        ]
        for owner, name, function in self._unfollowed.transform_wrappers():
            items.append(Wrapper(owner, name, function, "its memory is not known"))
        return items

    def _device_context_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements of functions that make a device of the one that the code names,
        so that it is unclear afterwards whether the code named the CPU.
        """
        context = _device.DeviceContext
        parse_to = self._parse_arguments_of_to
        call = self._call_in_device_context
        return [
            Wrapper(torch._C._nn, "_parse_to", parse_to, "it makes another device of one"),
            Wrapper(context, "__init__", _note_named_device, "its device is made of the code's"),
            Wrapper(context, "__torch_function__", call, "called after our mode"),
        ]

    def _card_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements of functions with other kernels on a card.

        torch's own functions, such as ``multi_head_attention_forward``, call these with modes off.
        """
        card = self._card
        off = "called by torch's own functions with modes off"
        return [
            Wrapper(functional, "linear", card.linear, off),
            Wrapper(functional, "dropout", card.dropout, off),
            Wrapper(torch, "dropout", card.torchs_dropout, off),
            Wrapper(functional, "scaled_dot_product_attention", card.attention, off),
            Wrapper(torch, "softmax", card.softmax, off),
            Wrapper(torch.Tensor, "softmax", card.softmax, off),
            Wrapper(torch, "log_softmax", card.log_softmax, off),
            Wrapper(torch.Tensor, "log_softmax", card.log_softmax, off),
            Wrapper(
                torch.overrides, "has_torch_function", _has_foreign_class, "it counts our modes"
            ),
        ]

    def _autocast_patches(self) -> list[Patch | Wrapper]:
        """Return the replacements of autocast's functions, which take no tensors."""
        autocast = self._autocast
        module = torch.amp.autocast_mode
        why = "the CPU stands for the device"
        items: list[Patch | Wrapper] = [
            Wrapper(module.autocast, "__init__", autocast.begin, why),
            Wrapper(module, "_cast", autocast.cast_inputs, why),
            Wrapper(torch, "is_autocast_enabled", autocast.is_enabled_for, why),
            Wrapper(torch, "get_autocast_dtype", autocast.dtype_for, why),
            Wrapper(torch, "get_autocast_gpu_dtype", autocast.dtype_for, why),
            Wrapper(torch, "clear_autocast_cache", autocast.clear_cache, why),
        ]
        supports = "_get_capturable_supported_devices"
        for name, optimizers in list(sys.modules.items()):
            if name.startswith("torch.optim."):
                items.append(Patch(optimizers, supports, _supports_cpu, why))
        return items

    # -- the replacements --------------------------------------------------------------------------

    def _start_thread(self, original: Any, thread: Any) -> None:
        """Start a thread, in whose code the modes are active if the estimated code starts it.

        Threads of other code, such as the kernel's, start as usual.
        """
        is_estimated_code = torch._C._len_torch_dispatch_stack() > 0
        if is_estimated_code:
            run = thread.run

            def run_in_modes() -> None:
                with self._threads_modes():
                    run()

            thread.run = run_in_modes
        original(thread)

    def _skip_compiling(self, _: Any, model: Any = None, **options: Any) -> Any:
        """Stand for ``torch.compile(model)``: note it, and return the model as it is.

        Without a model, return a decorator that returns its function.
        """
        self._unfollowed.note_compiled(is_eager=is_eager(options))
        if model is None:
            return _unchanged
        return model

    def _skip_compiling_module(self, *_: Any, **options: Any) -> None:
        """Stand for ``module.compile()``: note it, and leave the module as it is."""
        self._unfollowed.note_compiled(is_eager=is_eager(options))

    def _compile_script(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``torch.jit.script`` while torch's own operators are in place.

        The compiler finds operators by the identity of functions, such as ``functional.linear``,
        and keeps those that it finds first for good. It also calls the user's code, whose effects
        and threads must stay inside the estimate: therefore only the first call, which lists the
        operators and runs no code of the user, sees all originals.
        """
        with _with_originals([*self._other_patches, *self._operator_patches_applied]):
            torch.jit._builtins._get_builtin_table()
        with _with_originals(self._operator_patches_applied):
            return self._unfollowed.call_script_maker(original, *args, **kwargs)

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass in the mode of torch's functions, which ``Tensor.backward`` has left.

        The pass may call these functions: a checkpoint runs the user's code again.
        """
        with self._functions:
            return original(*args, **kwargs)

    def _set_saved_tensor_hooks(self, original: Any, hooks: Any, pack: Any, unpack: Any) -> None:
        """Set hooks of saved tensors, such as those of ``save_on_cpu``.

        They run in the mode of torch's functions, which the operation that saves a tensor has left.
        """

        def run_in_mode(hook: Any, saved: Any) -> Any:
            with self._functions:
                return hook(saved)

        original(
            hooks, functools.partial(run_in_mode, pack), functools.partial(run_in_mode, unpack)
        )

    def _parse_arguments_of_to(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the parsed arguments of ``Module.to``, of which a device is the first.

        A CPU becomes ``ON_HOST`` if the code itself names it, as in ``model.to("cpu")``, otherwise
        ``STAND_IN``. torch would return a new device, of which that is not known.
        """
        device, *further = original(*args, **kwargs)
        if device is None or device.type != "cpu" or not self._devices.cpu_is_ambiguous:
            return device, *further
        named = kwargs.get("device", kwargs.get("tensor"))
        if args:
            named = args[0]
        if isinstance(named, torch.Tensor):
            named = named.device
        if names_host(named):
            return ON_HOST, *further
        return STAND_IN, *further

    def _call_in_device_context(
        self,
        _: Any,
        context: Any,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Call a function of torch inside ``with torch.device("cuda"):``.

        One that makes a tensor, such as ``torch.zeros``, gets the device that stands for the
        context's, unless the call names another one.
        """
        options = dict(kwargs or {})
        is_constructor = func in _device._device_constructors()
        if not is_constructor or options.get("device") is not None:
            return func(*args, **options)
        location = HOST if vars(context).get(_NAMES_HOST) else CARD
        with self._devices.placing(location):
            options["device"] = self._devices.real_device_instead_of(context.device)
        return func(*args, **options)


def _note_named_device(original: Any, context: Any, device: Any) -> None:
    """Stand for the initialization of ``with torch.device(device):``.

    An attribute of the context notes if the code itself names the CPU.
    """
    original(context, device)
    vars(context)[_NAMES_HOST] = names_host(device)


def _patches_of_kept_arguments() -> list[Patch | Wrapper]:
    """Return the replacements of functions that drop their arguments early, to free memory."""
    gaussian_loss = _unseen_by_modes(functional.gaussian_nll_loss)
    stft = _unseen_by_modes(torch.stft)
    why = "a mode keeps its arguments"
    return [
        Patch(functional, "gaussian_nll_loss", gaussian_loss, why),
        Patch(torch, "stft", stft, why),
        Patch(torch.functional, "stft", stft, why),
    ]


def _mock_patches(items: list[Patch | Wrapper]) -> list[Any]:
    """Return a patch of ``unittest.mock`` for each replacement.

    An attribute that this version of torch does not have is not replaced.
    """
    mock_patches = []
    for item in items:
        if not hasattr(item.owner, item.name):
            continue
        if isinstance(item, Wrapper):
            item = item.patch()
        mock_patches.append(patch.object(item.owner, item.name, item.value))
    return mock_patches


class SavedFiles:
    """Stands for functions that save and load files. It saves nothing, and explains the error when
    the code then loads a file that is missing for that reason.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._files: dict[Any, Any] = {}
        """Files by their paths, or by the identity of a file object, which this keeps unique."""

    def save(self, _: Any, obj: Any, f: Any, *__: Any, **___: Any) -> None:
        """Stand for ``torch.save(obj, f)``, whose arguments the code may pass by name."""
        self._files[_key_of_file(f)] = f
        self._note(f"{user_line()}: torch.save wrote nothing")

    def load(self, original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a file, or raise an error that names the reason if it was not saved."""
        try:
            return original(f, *args, **kwargs)
        except Exception as error:
            if _key_of_file(f) not in self._files:
                raise
            reason = "torch.save wrote nothing, so it cannot be loaded"
            raise EstimateError(f"{reason} in {user_line()}") from error

    def serialize(self, *_: Any, **__: Any) -> bytes:
        """Stand for the functions of safetensors that write, and return an empty file's bytes."""
        self._note(f"{user_line()}: safetensors wrote nothing")
        return b""


def _key_of_file(file: Any) -> Any:
    """Return the path of a file, or the identity of a file object."""
    if isinstance(file, (str, os.PathLike)):
        return Path(file).absolute()
    return id(file)


def _unchanged(function: Any) -> Any:
    return function


def _no_references(_: Any) -> list[Any]:
    return []


def _do_nothing(*_: Any) -> None:
    return None


def _no_tensors(*_: Any) -> dict[str, Any]:
    return {}


def _supports_cpu(*_: Any, **__: Any) -> list[str]:
    return ["cpu"]


def _make_fake_parameter(original: Any, kind: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``Tensor._make_subclass``, with which a library's class makes a parameter.

    From a fake tensor it makes a fake parameter of that class.
    """
    is_fake = isinstance(data, fake_tensor.FakeTensor)
    if not is_fake or not issubclass(kind, torch.nn.Parameter):
        return original(kind, data, *args, **kwargs)
    requires_grad = kwargs.get("require_grad", False)
    if args:
        requires_grad = args[0]
    return fake_parameter(kind, data, requires_grad=bool(requires_grad))


def _swap_values(original: Any, first: Any, second: Any) -> None:
    """Stand for ``torch.utils.swap_tensors``, with which ``Module.to`` may move a parameter.

    Between devices of one type the first tensor gets the data of the second one; ``Module.to``
    drops the second one then.
    """
    if first.device.type == second.device.type:
        first.data = second.data
    else:
        original(first, second)


def _to_list(_: Any, tensor: Any) -> Any:
    """Stand for ``x.tolist()``: return nested lists of values; unknown ones all get one guess."""
    if tensor.constant is not None:
        with torch._C._DisableTorchDispatch():
            return tensor.constant.tolist()
    values: Any = torch.ops.aten._local_scalar_dense(tensor)  # which records the guess
    if type(values) is int:
        values = 0  # it may be an index
    for length in reversed(tensor.shape):
        values = [values] * length
    return values


def _load_in_this_process(original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    """Stand for the initialization of a data loader, which then starts no processes."""
    original(loader, *args, **kwargs)
    vars(loader).update(NO_PROCESSES)


def _always_step(_: Any, scaler: Any, optimizer: Any, __: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the optimizer's step, which a ``GradScaler`` skips if a gradient has overflowed.

    That is unknown, and the first step allocates the optimizer's state.
    """
    return optimizer.step(*args, **kwargs)


_PLAIN_CLASSES = (type(None), torch.Tensor, torch.nn.Parameter, fake_tensor.FakeTensor)
"""Classes that override no torch functions."""


def _has_foreign_class(original: Any, items: Any) -> bool:
    """Stand for ``has_torch_function``: return True if an item has a class that overrides torch
    functions.

    torch itself also returns True inside a mode, and then modules do not use their fused kernels.
    """
    has_other_class = any(type(item) not in _PLAIN_CLASSES for item in items)
    return has_other_class and bool(original(items))


def _unseen_by_modes(function: Any) -> Any:
    """Return a copy of a torch function that modes do not see; they see the functions it calls.

    A mode would keep all arguments until the function ends, also those that the function drops
    earlier.
    """
    has_torch_function = torch.overrides.has_torch_function

    def is_any_foreign(*items: Any) -> bool:
        return _has_foreign_class(has_torch_function, items)

    names = dict(function.__globals__)
    for check in ("has_torch_function_unary", "has_torch_function_variadic"):
        names[check] = is_any_foreign
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


@contextmanager
def _libraries_import_originals(mock_patches: list[Any]) -> Iterator[None]:
    """Let libraries that are imported inside the block get torch's own functions and tensors.

    A library keeps for good what it imports, as in ``from torch import save``. The user's modules
    are forgotten after the estimate (``rollback.py``), and get the replacements.
    """
    # It imports modules of torch itself when it is first entered, as ``f"{x}"`` does: within
    # ``exec_module`` it would ask for the module that is being imported.
    with _disable_current_modes():
        pass
    # The base class of the loaders of all Python files.
    basics: Any = importlib._bootstrap_external._LoaderBasics  # type: ignore[attr-defined]
    original = basics.exec_module
    is_importing = False

    def exec_module(loader: Any, module: Any) -> None:
        nonlocal is_importing
        if is_importing or is_users(loader.path):
            original(loader, module)
            return
        is_importing = True
        try:
            with (
                _with_originals(mock_patches),
                _disable_current_modes(),
                torch._C.DisableTorchFunction(),
            ):
                original(loader, module)
        finally:
            is_importing = False

    with patch.object(basics, "exec_module", exec_module):
        yield


@contextmanager
def _with_originals(mock_patches: list[Any]) -> Iterator[None]:
    """Restore torch's own functions during the block.

    Args:
        mock_patches: patches of ``unittest.mock``, each of which replaces one function.
    """
    undone: list[tuple[Any, Any]] = []
    """The patches to undo, each with the value that is there now."""
    for mock_patch in mock_patches:
        # Code that is being compiled may import a library: then some are undone already.
        is_applied = hasattr(mock_patch, "target")
        if is_applied:
            # The code may have replaced the replacement.
            current = vars(mock_patch.target).get(mock_patch.attribute, mock_patch.new)
            undone.append((mock_patch, current))
    for mock_patch, _ in reversed(undone):
        mock_patch.__exit__(None, None, None)
    try:
        yield
    finally:
        for mock_patch, current in undone:
            mock_patch.__enter__()
            setattr(mock_patch.target, mock_patch.attribute, current)
