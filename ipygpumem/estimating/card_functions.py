"""Calls torch functions as a card would: with its kernels, and their allocations.

Each method is called with torch's function and its arguments, instead of the function. Its own
arguments have torch's names, because code may pass them by name. Where the code runs on a card, or
is to run on the CPU, most methods call torch's function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ipygpumem.estimating import fused
from ipygpumem.estimating.autocast import Autocast
from ipygpumem.estimating.devices import Devices


class CardFunctions:
    """Functions of torch that allocate other memory on a card than on the CPU."""

    def __init__(self, devices: Devices, autocast: Autocast) -> None:
        self._devices = devices
        self._autocast = autocast

    def _is_on_card(self, tensor: Any) -> bool:
        return self._devices.is_elsewhere or tensor.device.type == "cuda"

    # -- recurrent layers and transformers ---------------------------------------------------------

    def lstm_cell(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return the next state of an LSTM."""
        if not self._is_on_card(input):
            return original(input, *args, **kwargs)
        return fused.lstm_cell(*self._converted((input, *args)), **kwargs)

    def gru_cell(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return the next state of a GRU."""
        if not self._is_on_card(input):
            return original(input, *args, **kwargs)
        return fused.gru_cell(*self._converted((input, *args)), **kwargs)

    def _converted(self, values: Any) -> list[Any]:
        """Return the arguments of a cell as autocast converts them: all before the first product.

        Weights that train are left to the products, because autocast keeps their copies.
        """
        if not self._autocast.is_enabled():
            return list(values)
        converted = list[Any]()
        for value in values:
            if isinstance(value, (tuple, list)):
                converted.append(self._converted(value))
            elif isinstance(value, torch.Tensor) and not (value.is_leaf and value.requires_grad):
                converted.append(self._autocast.cast(value))
            else:
                converted.append(value)
        return converted

    def encoder_layer(self, original: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a transformer's encoder layer."""
        function = fused.encoder_layer if self._is_on_card(source) else original
        return function(source, *args, **kwargs)

    def multi_head_attention(self, original: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Return attention with several heads, and its weights if they are wanted."""
        function = fused.multi_head_attention if self._is_on_card(query) else original
        return function(query, *args, **kwargs)

    def attention(
        self, original: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return scaled dot product attention, from the kernel that torch chooses on a card."""
        if not self._devices.is_elsewhere:
            return original(query, key, value, *args, **kwargs)

        def by_products(*args: Any, **kwargs: Any) -> Any:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return original(*args, **kwargs)

        cast = self._autocast.cast
        items = [cast(item) for item in (query, key, value, *args)]
        options = {name: cast(item) for name, item in kwargs.items()}
        return fused.attention(by_products, *items, **options)

    # -- single operations -------------------------------------------------------------------------

    def softmax(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return softmax; a card converts float16 to float32 without a converted copy."""
        return self._to_float32(torch.ops.aten._softmax, original, input, args, kwargs)

    def log_softmax(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Return the logarithm of softmax, in the same way."""
        return self._to_float32(torch.ops.aten._log_softmax, original, input, args, kwargs)

    def _to_float32(self, kernel: Any, original: Any, source: Any, args: Any, kwargs: Any) -> Any:
        converts = source.dtype is torch.float16 and kwargs.get("dtype") is torch.float32
        if not converts or self._autocast.is_enabled() or not self._devices.is_elsewhere:
            return original(source, *args, **kwargs)
        dim = kwargs["dim"] if "dim" in kwargs else args[0]
        return kernel(source, dim, True)

    def linear(self, original: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
        """Return a linear map; torch adds the bias in place, but not for fake tensors."""
        is_one_product = input.dim() == 2 or input.is_contiguous()
        if bias is None or is_one_product or weight.dim() != 2:
            return original(input, weight, bias)
        return original(input, weight).add_(bias)

    def dropout(
        self,
        original: Any,
        input: Any,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        """Return dropout; a card saves a byte for each number, the CPU a number."""
        drops = training and 0 < p < 1 and not inplace
        if drops and self._devices.is_elsewhere:
            return torch.native_dropout(input, p, True)[0]
        return original(input, p, training, inplace)

    def torchs_dropout(self, original: Any, input: Any, p: float, train: bool) -> Any:  # noqa: A002
        """Return the dropout of ``torch.dropout``, in the same way."""
        if train and 0 < p < 1 and self._devices.is_elsewhere:
            return torch.native_dropout(input, p, True)[0]
        return original(input, p, train)

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
        fuses = has_kernel and (weight is None or weight.dtype is input.dtype)
        if self._devices.is_elsewhere and (fuses or self._autocast.is_enabled()):
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
        lengths = [
            torch.as_tensor(length, device=log_probs.device)
            for length in (input_lengths, target_lengths)
        ]
        return original(log_probs, targets, *lengths, *args, **kwargs)
