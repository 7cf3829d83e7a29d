"""Calls torch functions as a card would: with its kernels, and their allocations.

Each method is called with torch's function and its arguments, instead of the function. Its own
arguments have torch's names, because code may pass them by name. Where the code runs on a card, or
is to run on the CPU, most methods call torch's function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ipygpumem.estimating.devices.devices import Devices
from ipygpumem.estimating.operators import fused
from ipygpumem.estimating.operators.autocast import Autocast, is_cached
from ipygpumem.estimating.operators.guesses import KnownValues
from ipygpumem.estimating.operators.largest import is_known
from ipygpumem.estimating.unfollowed import Unfollowed
from ipygpumem.estimating.user_lines import user_line


class CardFunctions:
    """Functions of torch that allocate other memory on a card than on the CPU.

    Args:
        devices: the devices of the estimate.
        autocast: converts arguments as a card's autocast does.
        values: the values of fake tensors that are known.
        unfollowed: gets the lines whose memory is not followed exactly.
    """

    def __init__(
        self, devices: Devices, autocast: Autocast, values: KnownValues, unfollowed: Unfollowed
    ) -> None:
        self._devices = devices
        self._autocast = autocast
        self._values = values
        self._unfollowed = unfollowed

    def _is_on_card(self, tensor: Any) -> bool:
        """Return True if a tensor is on a card, or on the CPU while that stands for one."""
        return self._devices.cpu_is_stand_in or tensor.device.type == "cuda"

    # -- recurrent layers and transformers ---------------------------------------------------------

    def lstm_cell(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return the next state of an LSTM."""
        if not self._is_on_card(input):
            return original(input, *args, **kwargs)
        values = self._autocast_arguments((input, *args))
        return fused.lstm_cell(*values, **kwargs)

    def gru_cell(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return the next state of a GRU."""
        if not self._is_on_card(input):
            return original(input, *args, **kwargs)
        values = self._autocast_arguments((input, *args))
        return fused.gru_cell(*values, **kwargs)

    def _autocast_arguments(self, values: Any) -> list[Any]:
        """Return the arguments of a recurrent cell as autocast converts them before the first
        product.

        The last argument is converted first. For a weight that trains, the argument stays: its
        converted copy goes into autocast's cache, where the products find it.
        """
        if not self._autocast.is_enabled():
            return list(values)
        converted = [self._autocast_argument(value) for value in reversed(values)]
        return converted[::-1]

    def _autocast_argument(self, value: Any) -> Any:
        """Return an argument of a cell as autocast converts it: a tensor, or several states."""
        if isinstance(value, (tuple, list)):
            return [self._autocast_argument(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if not is_cached(value):
            return self._autocast.cast(value)
        _fill_cache(value)
        return value

    def encoder_layer(self, original: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a transformer's encoder layer."""
        if self._is_on_card(source):
            return fused.encoder_layer(source, *args, **kwargs)
        return original(source, *args, **kwargs)

    def multi_head_attention(self, original: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Return attention with several heads, and its weights if the code asks for them."""
        if self._is_on_card(query):
            return fused.multi_head_attention(query, *args, **kwargs)
        return original(query, *args, **kwargs)

    def attention(
        self, original: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return scaled dot product attention, from the kernel that torch chooses on a card."""
        if not self._devices.cpu_is_stand_in:
            return original(query, key, value, *args, **kwargs)

        backends = torch.nn.attention

        def attend_by_products(*args: Any, **kwargs: Any) -> Any:
            with backends.sdpa_kernel(backends.SDPBackend.MATH):
                return original(*args, **kwargs)

        cast = self._autocast.cast
        items = [cast(item) for item in (query, key, value, *args)]
        options = {name: cast(item) for name, item in kwargs.items()}
        return fused.attention(attend_by_products, *items, **options)

    # -- single operations -------------------------------------------------------------------------

    def softmax(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return softmax; a card converts float16 to float32 without a converted copy."""
        kernel = torch.ops.aten._softmax
        return self._call_converting_kernel(kernel, original, input, args, kwargs)

    def log_softmax(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return the logarithm of softmax; a card converts float16 as for softmax."""
        kernel = torch.ops.aten._log_softmax
        return self._call_converting_kernel(kernel, original, input, args, kwargs)

    def _call_converting_kernel(
        self, kernel: Any, original: Any, source: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call a card's kernel that converts float16 to float32, if the code asks for that:
        ``softmax(x, -1, dtype=torch.float32)``; otherwise call ``original``.
        """
        wants_float32 = kwargs.get("dtype") is torch.float32
        converts = wants_float32 and source.dtype is torch.float16
        runs_on_card = self._devices.cpu_is_stand_in
        if not converts or not runs_on_card or self._autocast.is_enabled():
            return original(source, *args, **kwargs)
        dim = kwargs["dim"] if "dim" in kwargs else args[0]
        half_to_float = True
        return kernel(source, dim, half_to_float)

    def linear(self, original: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
        """Return a linear map that has one result, as on a card.

        A batch that is not contiguous, such as ``x.transpose(0, 1)``, is first multiplied without
        the bias. torch then adds the bias to the product in place; for fake tensors it would make a
        second result.
        """
        if bias is None or weight.dim() != 2:
            return original(input, weight, bias)
        adds_bias_in_product = input.dim() == 2 or input.is_contiguous()
        if adds_bias_in_product:
            return original(input, weight, bias)
        return original(input, weight).add_(bias)

    def one_hot(self, original: Any, input: Any, num_classes: int = -1) -> Any:  # noqa: A002
        """Return one-hot vectors: zeros, among which ones are set, as torch makes them on a card.

        For fake tensors torch would compare all positions with the labels.
        """
        if num_classes == -1:
            num_classes = self._number_of_classes(input)
        is_mistake = num_classes < 1 or input.dtype is not torch.long  # torch raises its error
        if is_mistake or torch._C._are_functorch_transforms_active():
            return original(input, num_classes)
        positions = input.unsqueeze(-1)
        zeros = input.new_zeros(*input.shape, num_classes)
        return zeros.scatter_(-1, positions, 1)

    def _number_of_classes(self, labels: Any) -> int:
        """Return the number of classes that labels have, their largest value and one more; note the
        line if it is a guess.
        """
        largest = labels.max()
        count = int(largest) + 1
        has_bound = self._values.largest(labels, default=None) is not None
        if not is_known(largest) and not has_bound:
            self._unfollowed.note_one_hot_line(user_line(), count)
        return count

    def isin(
        self,
        original: Any,
        elements: Any,
        test_elements: Any,
        *,
        assume_unique: bool = False,
        invert: bool = False,
    ) -> Any:
        """Return a mask of the elements that are among ``test_elements``, with a card's
        allocations.

        torch compares each element with each of a few values, and sorts both if these are many.
        """
        values = (elements, test_elements)
        are_tensors = all(isinstance(value, torch.Tensor) for value in values)
        if not are_tensors or elements.dtype is not test_elements.dtype:
            return original(*values, assume_unique=assume_unique, invert=invert)
        if not self._is_on_card(elements) or 0 in (elements.numel(), test_elements.numel()):
            return original(*values, assume_unique=assume_unique, invert=invert)
        result = torch.empty_like(elements, dtype=torch.bool)
        # torch calls the kernels without autograd, and without a line of Python in between.
        with torch.no_grad():
            # torch's own limit, from measurements of both ways.
            has_few_values = test_elements.numel() < int(10 * elements.numel() ** 0.145)
            if has_few_values:
                _compare_with_each(elements, test_elements, result)
            else:
                _sort_with(elements, test_elements, result, assume_unique=assume_unique)
        return result

    def dropout(
        self,
        original: Any,
        input: Any,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        """Return dropout; for backward a card saves a byte for each number, the CPU a number."""
        if inplace or not self._takes_cards_dropout(p, training=training):
            return original(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    def torchs_dropout(self, original: Any, input: Any, p: float, train: bool) -> Any:  # noqa: A002
        """Return the dropout of ``torch.dropout``; a card saves bytes as for ``dropout``."""
        if not self._takes_cards_dropout(p, training=train):
            return original(input, p, train)
        return torch.native_dropout(input, p, True)[0]

    def _takes_cards_dropout(self, p: float, *, training: bool) -> bool:
        """Return True if dropout runs a kernel, and that of a card for which the CPU stands."""
        if not training or not self._devices.cpu_is_stand_in:
            return False
        return 0 < p < 1

    def rms_norm(
        self,
        original: Any,
        input: Any,  # noqa: A002
        normalized_shape: Any,
        weight: Any = None,
        eps: float | None = None,
    ) -> Any:
        """Return the RMS norm; a card's kernel saves as much as that of the layer norm.

        The CPU runs several kernels.
        """
        has_kernel = hasattr(torch.ops.aten, "_fused_rms_norm")
        has_one_type = weight is None or weight.dtype is input.dtype
        fuses = has_kernel and has_one_type
        if self._devices.cpu_is_stand_in and (fuses or self._autocast.is_enabled()):
            return functional.layer_norm(input, normalized_shape, weight)
        return original(input, normalized_shape, weight, eps)

    def ctc_loss(
        self,
        original: Any,
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the CTC loss, with the lengths on the device of the scores.

        For fake tensors torch takes a path that cannot read lengths on the host.
        """
        device = log_probs.device
        input_lengths = torch.as_tensor(input_lengths, device=device)
        target_lengths = torch.as_tensor(target_lengths, device=device)
        return original(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _compare_with_each(elements: Any, test_elements: Any, result: Any) -> None:
    """Fill ``result`` for ``torch.isin`` by comparing each element with each value.

    The steps are those of ATen/native/TensorCompare.cpp.
    """
    shape = [1] * elements.dim() + [test_elements.numel()]
    result.copy_(elements.unsqueeze(-1).eq(test_elements.reshape(shape)).any(-1))


def _sort_with(elements: Any, test_elements: Any, result: Any, *, assume_unique: bool) -> None:
    """Fill ``result`` for ``torch.isin`` by sorting the elements together with the values.

    An element that is among the values is next to an equal one then. The steps, and so the
    allocations, are those of ATen/native/TensorCompare.cpp.
    """
    position_of_each = None
    if assume_unique:
        both = torch.cat([elements.ravel(), test_elements.ravel()])
    else:
        different_elements, position_of_each = torch._unique(elements, False, True)
        different_values, _ = torch._unique(test_elements, False)
        both = torch.cat([different_elements, different_values])
        del different_elements, different_values
    in_order, positions = both.sort(stable=True, dim=0)
    is_repeated = torch.empty_like(in_order, dtype=torch.bool)
    is_repeated[:-1].copy_(in_order[1:].eq(in_order[:-1]))
    is_among = torch.empty_like(is_repeated)
    is_among.index_copy_(0, positions, is_repeated)  # back into the order of ``both``
    if position_of_each is None:
        result.copy_(is_among[: elements.numel()].view_as(elements))
    else:
        result.copy_(is_among[position_of_each])


def _fill_cache(weight: Any) -> None:
    """Let autocast convert a weight and keep the copy.

    ``einsum("ab->ab", weight)`` computes nothing, but autocast converts its argument.
    """
    dims = "abcdef"[: weight.dim()]
    torch._C._VariableFunctions.einsum(f"{dims}->{dims}", [weight])
