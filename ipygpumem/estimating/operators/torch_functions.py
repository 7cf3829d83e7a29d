"""Handles the torch functions that need more of a tensor than a fake one has, or a device."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.devices.devices import CARD, HOST, Devices
from ipygpumem.estimating.devices.named_devices import ON_HOST, STAND_IN
from ipygpumem.estimating.devices.tensor_locations import TensorLocations, is_transformed
from ipygpumem.estimating.operators.card_functions import CardFunctions
from ipygpumem.estimating.operators.cumulative_products import cumprod
from ipygpumem.estimating.operators.packed import PackedSequences, real_values
from ipygpumem.estimating.user_lines import user_line
from ipygpumem.heap.knowledge.frames import stack

UNKNOWN = "this code cannot be estimated, because it needs the values of tensors"
Handler = Callable[..., Any]
"""Called with a torch function and its arguments, instead of the function."""


class TorchFunctions(TorchFunctionMode):
    """Calls a handler instead of each torch function in its table, and redirects devices.

    torch calls a mode for each function of ``torch.overrides``, but not for the functions that such
    a function calls in turn. The estimate replaces those by patches (see ``patches.py``).

    Args:
        devices: the devices of the estimate.
        locations: the location of each tensor, on a card or on the host.
        card: the functions that torch computes in another way on a card.
        upper_bounds: gets the lines whose results are assumed to be as large as possible.
    """

    def __init__(
        self,
        devices: Devices,
        locations: TensorLocations,
        card: CardFunctions,
        upper_bounds: dict[str, None],
    ) -> None:
        super().__init__()
        self._devices = devices
        self._locations = locations
        self._upper_bounds = upper_bounds
        """Lines whose results are assumed to be as large as possible; a set."""
        packed = PackedSequences(self._note_unknown_lengths)
        self.lines_of_recurrent_layers: dict[str, None] = {}
        """Lines that call recurrent layers with other kernels on a card, such as cuDNN's; a set."""
        self._handlers: dict[Any, Handler] = {
            **_VALUE_HANDLERS,
            torch.cumprod: cumprod,
            torch.Tensor.cumprod: cumprod,
            torch.Tensor.pin_memory: self._pin_memory,
            torch.Tensor.device.__get__: self._device_of,
            torch._pack_padded_sequence: packed.pack,
            torch._pad_packed_sequence: packed.pad,
            **self._recurrent_handlers(),
            **_card_handlers(card),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the handler of a torch function if it has one; otherwise the function itself, with
        the available device instead of other ones.
        """
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_of_optimizer = caller.startswith("torch.optim.")  # its step counters stay on the host
        if self._devices.real_device is None or is_of_optimizer:
            return func(*args, **kwargs)
        return self._call_redirected(func, args, kwargs)

    def _recurrent_handlers(self) -> dict[Any, Handler]:
        """Return the handler of each function of a recurrent layer."""
        layers = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
        return dict.fromkeys(layers, self._recurrent_layer)

    def _call_redirected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function with the available device instead of the one that the code names.

        A function that makes a tensor also gets the device if the code names none.
        """
        devices = self._devices
        if func in _MOVES:
            return self._move(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            with devices.placing(devices.location_named_by(device)):
                kwargs = {**kwargs, "device": devices.real_device_instead_of(device)}
                return func(*args, **kwargs)
        if devices.requested_device is None or devices.all_on_cpu:
            return func(*args, **kwargs)
        if func in _device_constructors():
            kwargs = {**kwargs, "device": devices.real_device}
        return func(*args, **kwargs)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that may move a tensor to another device."""
        tensor = args[0]
        if func is torch.Tensor.cpu:
            return self._call_moving(functools.partial(func, **kwargs), tensor, HOST)
        accelerator = _MOVES[func]
        if accelerator:
            devices = self._devices
            devices.accelerators_named_by_code.setdefault(accelerator)
            call = functools.partial(torch.Tensor.to, device=devices.real_device)
            return self._call_moving(call, tensor, CARD)
        return self._move_to_argument(func, args, kwargs)

    def _move_to_argument(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that may move a tensor to the device in its arguments, or to that of
        another tensor in them: ``x.to("cuda")``, ``x.to(device="cuda")``, ``x.to(y)``.
        """
        devices = self._devices
        tensor, *further = args
        target = kwargs.get("device", kwargs.get("other"))
        if further:
            target = further[0]
        location = self._location_named_by(target)
        if location is None:  # such as x.to(torch.float16)
            return func(*args, **kwargs)
        with devices.placing(location):
            real_device = devices.real_device_instead_of(target)
        if further:
            further[0] = real_device
        else:
            kwargs = {**kwargs, "device": real_device}

        def call_with_device(tensor: Any) -> Any:
            return func(tensor, *further, **kwargs)

        return self._call_moving(call_with_device, tensor, location)

    def _location_named_by(self, target: Any) -> str | None:
        """Return the location of a device, or of another tensor; None for neither."""
        if isinstance(target, torch.Tensor):
            return self._locations.of(target)
        return self._devices.location_named_by(target)

    def _call_moving(self, call: Callable[[Any], Any], tensor: Any, location: str) -> Any:
        """Return the result of a call that moves a tensor to a location, and may convert it.

        While the CPU stands for a card, the move itself is a copy. The conversion, as in
        ``x.to("cuda", torch.float16)``, is made on the host.
        """
        devices = self._devices
        if not devices.all_on_cpu:
            with devices.placing(location):
                return call(tensor)
        is_composite = hasattr(type(tensor), "__tensor_flatten__")
        can_be_moved = not is_composite and not is_transformed()
        has_card = devices.assumed_device != "cpu"
        if not can_be_moved or not has_card or location == self._locations.of(tensor):
            return call(tensor)
        if location == HOST:
            return call(self._locations.move(tensor, HOST))
        return self._locations.move(call(tensor), CARD)

    def _device_of(self, original: Any, tensor: Any) -> Any:
        """Return a tensor's device; instead of the CPU, ``ON_HOST`` or ``STAND_IN``."""
        device = original(tensor)
        if device.type != "cpu" or not self._devices.cpu_is_ambiguous:
            return device
        if self._locations.of(tensor) == HOST:
            return ON_HOST
        return STAND_IN

    def _pin_memory(self, _: Any, tensor: Any, *__: Any, **___: Any) -> Any:
        """Return a copy, as that in pinned memory; the tensor itself if host and device count
        together.
        """
        if self._devices.real_device is None:
            return tensor.clone()
        return tensor

    def _recurrent_layer(
        self,
        original: Any,
        input: Any,  # noqa: A002  # torch's name
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a recurrent layer, and note the line if a card's kernels need more memory."""
        device = self._devices.assumed_for(input.device)
        has_own_kernels = torch.backends.cudnn.enabled or self._devices.cpu_is_stand_in
        if has_own_kernels and device.startswith("cuda"):
            self.lines_of_recurrent_layers[user_line()] = None
        if args and _is_batch_sizes(args[0]):  # of a packed sequence: C++ reads their memory
            batch_sizes, *further = args
            args = (real_values(batch_sizes), *further)
        return original(input, *args, **kwargs)

    def _note_unknown_lengths(self) -> None:
        """Note a line that packs sequences of unknown lengths: all count as the longest."""
        self._upper_bounds[user_line()] = None


def _is_batch_sizes(value: Any) -> bool:
    """Return True if the second argument of a recurrent layer has the batches of packed sequences.

    Otherwise it is the state: floating-point numbers, or a tuple.
    """
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype is torch.long


def _refuse_address(*_: Any) -> NoReturn:
    """Raise an EstimateError for ``x.data_ptr()``; if a model is being saved, with a hint."""
    hint = ""
    for frame in stack(sys._getframe(1)):
        if frame.f_code.co_name == "save_pretrained":
            hint = "; leave out that it saves the model: save_strategy='no' for a Trainer"
            break
    line = user_line()
    raise EstimateError(f"{UNKNOWN}: data_ptr in {line}{hint}")


def _reduce_for_copy(original: Any, tensor: Any, protocol: int) -> Any:
    """Return the parts of a fake tensor for ``copy.copy``; raise for pickle, which needs values."""
    for frame in stack(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        if module == "copy":
            return original(tensor, protocol)
        library, _, _ = module.partition(".")
        if library not in ("torch", "ipygpumem"):  # the caller, such as pickle
            break
    raise EstimateError(f"{UNKNOWN}: pickle in {user_line()}")


def _to_array(_: Any, tensor: Any, *__: Any, **___: Any) -> Any:
    """Return a tensor's values as an array; unknown ones all get the same guess."""
    if getattr(tensor, "constant", None) is not None:
        with torch._C._DisableTorchDispatch():
            return tensor.constant.numpy().copy()
    guess = torch.ops.aten._local_scalar_dense(tensor)  # which records the guess
    if type(guess) is int:
        guess = 0  # it may be an index
    numpy = importlib.import_module("numpy")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return numpy.full(tuple(tensor.shape), guess, dtype)


def _format(original: Any, tensor: Any, format_spec: str) -> str:
    """Return the text of ``f"{x:.2f}"``, with a guess for the value of a fake scalar."""
    if not isinstance(tensor, FakeTensor):
        return str(original(tensor, format_spec))
    if tensor.dim():
        return str(tensor)
    return format(tensor.item(), format_spec)


def _set_data(original: Any, tensor: Any, value: Any) -> None:
    """Set the data of a tensor, as in ``x.data = y``, and the device of a fake one."""
    original(tensor, value)
    if isinstance(tensor, FakeTensor):
        tensor.fake_device = value.fake_device


def _deep_copy(original: Any, tensor: Any, memo: Any) -> Any:
    """Return a deep copy of a fake tensor, in a copy of its whole storage, as torch makes it.

    torch would also copy the attributes of a fake tensor. One of them is the real tensor with its
    value, whose copy torch puts into a fake one: that is an error, or breaks the process.
    """
    is_plain = isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
    if not is_plain or not tensor.is_leaf or id(tensor) in memo:
        return original(tensor, memo)
    with torch.no_grad():
        copied = _with_copied_storage(tensor, memo.setdefault("torch", {}))
    copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = _deep_copy(original, tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


def _with_copied_storage(tensor: Any, storages: dict[int, Any]) -> Any:
    """Return a tensor like a fake one, in a copy of its storage.

    Args:
        tensor: the tensor.
        storages: the copies so far, as tensors, by torch's identity of the storage; two views share
            one.
    """
    storage = tensor.untyped_storage()
    whole = storages.get(storage._cdata)
    if whole is None or whole.dtype is not tensor.dtype:
        number = storage.nbytes() // tensor.element_size()
        fills_storage = tensor.is_contiguous() and tensor.numel() == number
        if fills_storage:
            storages[storage._cdata] = copied = tensor.clone()  # with its value, if that is known
            return copied
        storages[storage._cdata] = whole = tensor.new_empty(number)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _unchanged(_: Any, tensor: Any) -> Any:
    return tensor


_MOVES = {
    torch.Tensor.cuda: "cuda:0",
    torch.Tensor.xpu: "xpu:0",
    torch.Tensor.cpu: "",
    torch.Tensor.to: "",
}
"""Functions that may move a tensor, and the accelerator that they name; empty for none."""
_VALUE_HANDLERS: dict[Any, Handler] = {
    torch.Tensor.data_ptr: _refuse_address,
    torch.Tensor.numpy: _to_array,
    torch.Tensor.__array__: _to_array,
    torch.Tensor.__deepcopy__: _deep_copy,
    torch.Tensor.__reduce_ex__: _reduce_for_copy,
    torch.Tensor.__format__: _format,
    torch.Tensor.data.__set__: _set_data,
    torch.Tensor.share_memory_: _unchanged,
}
"""Handlers of functions that need values or addresses, which a fake tensor does not have.

One of them sets the data of a fake tensor: torch would not set its device, too.
"""


def _card_handlers(card: CardFunctions) -> dict[Any, Handler]:
    """Return the handlers of functions with other kernels on a card."""
    handlers: dict[Any, Handler] = {
        torch.lstm_cell: card.lstm_cell,
        torch.gru_cell: card.gru_cell,
        torch._transformer_encoder_layer_fwd: card.encoder_layer,
        torch._native_multi_head_attention: card.multi_head_attention,
        torch.ctc_loss: card.ctc_loss,
        functional.ctc_loss: card.ctc_loss,
        functional.one_hot: card.one_hot,
        torch.isin: card.isin,
    }
    if hasattr(functional, "rms_norm"):  # since torch 2.4
        handlers[functional.rms_norm] = card.rms_norm
    return handlers
