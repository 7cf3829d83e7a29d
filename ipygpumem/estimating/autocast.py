"""Applies CUDA's autocast policies to fake tensors on the CPU that stand for tensors on CUDA.

The lists are from torch's documentation (notes/amp, "CUDA Op-Specific Behavior") and from
ATen/autocast_mode.h.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ipygpumem.estimating.devices import Devices

_LOWER = """
_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu
addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""  # noqa: E501
_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""  # noqa: E501
_FLOAT32_RESULT = (
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm"
)
"""Operators with an argument for the result's type: it is set to float32, and the input is not
converted.
"""
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)
_WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_KEPT = frozenset({"mkldnn_rnn_layer", "binary_cross_entropy"})
"""Operators that keep the CPU's policy: its own kernel of recurrent layers, and one that CUDA's
autocast refuses.
"""
_CPU, _CUDA = "AutocastCPU", "AutocastCUDA"
# Before they are replaced:
_dtype_of: Any = torch.get_autocast_dtype
_is_enabled: Any = torch.is_autocast_enabled
_cast_inputs: Any = torch.amp.autocast_mode._cast
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return an argument with its tensors converted; as in autocast, integers and float64 stay."""
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(item, convert) for item in value)
    return convert(value) if _is_eligible(value) else value


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _float32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*_converted(args, torch.Tensor.float), **kwargs)


def _float32_result(operator: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    number = next(
        (number for number, value in enumerate(args) if isinstance(value, torch.dtype)), None
    )
    if number is None and dtype is None and _is_eligible(args[0]):
        dtype = torch.float32
    if operator in _HALF_TO_FLOAT and args[0].dtype is torch.float16 and dtype is torch.float32:
        return _HALF_TO_FLOAT[operator](args[0], args[1], True)
    return operator(*args, **kwargs, **({} if dtype is None else {"dtype": dtype}))


def _widest(operator: Any, *args: Any, **kwargs: Any) -> Any:
    widest = any(_is_eligible(value) and value.dtype is torch.float32 for value in args)
    return (_float32 if widest else _lower)(operator, *args, **kwargs)


class Autocast:
    """Makes the autocast of code whose tensors are on the CPU that of the card they stand for."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._policies = CudaPolicies()

    def close(self) -> None:
        """Restore the CPU's own policies."""
        self._policies.close()

    def is_enabled(self, device_type: str = "cuda") -> bool:
        """Return True if autocast is enabled for a device, or for the CPU that stands for it."""
        return bool(_is_enabled("cpu" if self._devices.is_elsewhere else device_type))

    def dtype(self, device_type: str = "cuda") -> Any:
        """Return the type to which autocast converts."""
        if self._devices.is_elsewhere and self.is_enabled(device_type):
            device_type = "cpu"
        return _dtype_of(device_type)

    def cast(self, value: Any) -> Any:
        """Return an argument as autocast converts it for an operator in its lower type."""
        if not self.is_enabled():
            return value
        is_tensor = isinstance(value, torch.Tensor)
        return _cast_inputs(value, value.device.type if is_tensor else "cpu", self.dtype())

    # Replacements of torch's functions, which are called with the original function first.

    def begin(
        self,
        original: Any,
        block: Any,
        device_type: str,
        dtype: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialize a ``torch.autocast`` of any device as one of the CPU, with CUDA's policies."""
        if device_type != "cpu":
            self._policies.register()
            dtype = dtype or _dtype_of(device_type)
            device_type = "cpu"
        original(block, device_type, dtype, *args, **kwargs)

    def clear_cache(self, original: Any) -> None:
        """Drop the converted weights."""
        self._policies.forget_weights()
        original()

    def cast_inputs(self, original: Any, value: Any, _: str, dtype: Any) -> Any:
        """Convert the arguments of a function decorated with ``torch.amp.custom_fwd``."""
        return original(value, "cpu", dtype)

    def is_enabled_for(self, _: Any, device_type: str = "cuda") -> bool:
        """Stand for ``torch.is_autocast_enabled``."""
        return self.is_enabled(device_type)

    def dtype_for(self, _: Any, device_type: str = "cuda") -> Any:
        """Stand for ``torch.get_autocast_dtype``."""
        return self.dtype(device_type)


class CudaPolicies:
    """Registers CUDA's policies for the CPU's autocast key, from the first use until ``close``.

    Known limit: until then they also apply to CPU autocast in other threads.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._weights: dict[int, tuple[Any, Any]] = {}

    def register(self) -> None:
        """Register the policies, once."""
        if self._library is not None:
            return
        self._library = torch._C._dispatch_library("IMPL", "aten", _CPU, __file__, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the CPU's policy is replaced
            for name, policy in _policies():
                self._library.impl(name, _CPU, self._kernel(name, policy))

    def close(self) -> None:
        """Restore the CPU's own policies."""
        self._library = None
        self.forget_weights()

    def forget_weights(self) -> None:
        """Drop the converted weights, as torch does at the end of the outermost autocast."""
        self._weights.clear()

    def _kernel(self, name: str, policy: Any) -> Any:
        if policy is None:
            return torch.library.fallthrough_kernel
        packet, _, overload = name.partition(".")
        operator = getattr(
            getattr(torch.ops.aten, packet), _WITH_DTYPE.get(name, overload or "default")
        )

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_CPU_KEY):
                if policy is _lower:
                    args = _converted(args, self._lowered)
                return policy(operator, *args, **kwargs)

        return kernel

    def _lowered(self, tensor: Any) -> Any:
        """Return a tensor in autocast's type; as in torch, converted weights are cached."""
        dtype = _dtype_of("cpu")
        is_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf
        if not is_weight or tensor._is_view() or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(dtype)
        return self._weights[id(tensor)][1]


def _lower(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


_HALF_TO_FLOAT = {
    torch.ops.aten.softmax.int: torch.ops.aten._softmax,
    torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax,
}
"""Operators that CUDA computes from float16 into float32 without a converted copy."""


@functools.cache
def _policies() -> list[tuple[str, Any]]:
    """Return the operators whose policy on CUDA differs from the CPU's, and that policy; None: CUDA
    does not cast.
    """
    found: list[tuple[str, Any]] = []
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    lists = (
        (_LOWER, _lower),
        (_FLOAT32, _float32),
        (_FLOAT32_RESULT, _float32_result),
        (_WIDEST, _widest),
    )
    known = {base: policy for names, policy in lists for base in names.split()}
    for full in torch._C._dispatch_get_all_op_names():
        library, _, name = full.partition("::")
        base = name.partition(".")[0]
        on_cpu, on_cuda = has(full, _CPU), has(full, _CUDA)
        policy = known.get(base) if on_cuda else None
        is_same = policy is _lower if on_cpu else policy is None
        if library == "aten" and base not in _KEPT and not is_same:
            found.append((name, policy))
    return found
