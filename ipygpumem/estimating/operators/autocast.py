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

from ipygpumem.estimating.devices.devices import Devices

# Operators by policy, without their overloads. In autocast's lower type:
_LOWER = """
_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu
addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""  # noqa: E501
# In float32:
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
"""Operators with several arguments: the widest type among these is taken."""
_WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Overloads that have an argument for the result's type, by the operator that has none."""
_KEPT = frozenset({"mkldnn_rnn_layer", "binary_cross_entropy"})
"""Operators that keep the CPU's policy: its own kernel of recurrent layers, and one that CUDA's
autocast refuses.
"""
_CPU, _CUDA = "AutocastCPU", "AutocastCUDA"
# torch's own functions, which an estimate replaces:
_dtype_of: Any = torch.get_autocast_dtype
_is_enabled: Any = torch.is_autocast_enabled
_cast_inputs: Any = torch.amp.autocast_mode._cast
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _with_tensors_converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return an argument of an operator with its tensors converted, also those in lists.

    As in autocast, integers and float64 stay.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors_converted(item, convert) for item in value)
    if _is_eligible(value):
        return convert(value)
    return value


def _is_eligible(value: Any) -> bool:
    """Return True if autocast converts an argument: a tensor of floating-point numbers, except
    float64.
    """
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and value.dtype is not torch.float64


def _in_float32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator with its arguments converted to float32."""
    return operator(*_with_tensors_converted(args, torch.Tensor.float), **kwargs)


def _with_float32_result(operator: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Call an operator whose result is in float32, unless the code names another type.

    From float16, CUDA's softmax converts while it computes, without a converted copy.
    """
    source = args[0]
    names_dtype = any(isinstance(value, torch.dtype) for value in args)
    if dtype is None and not names_dtype and _is_eligible(source):
        dtype = torch.float32
    if dtype is None:
        return operator(*args, **kwargs)
    converts = dtype is torch.float32 and source.dtype is torch.float16
    if converts and operator in _HALF_TO_FLOAT:
        return _HALF_TO_FLOAT[operator](source, args[1], True)
    return operator(*args, **kwargs, dtype=dtype)


def _in_widest(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator in float32 if one of its arguments has this type, otherwise in autocast's
    lower type.
    """
    dtypes = {value.dtype for value in args if isinstance(value, torch.Tensor)}
    if torch.float32 in dtypes:
        return _in_float32(operator, *args, **kwargs)
    return _in_lower(operator, *args, **kwargs)


class Autocast:
    """Lets ``torch.autocast`` act as on a card while the CPU stands for one."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._policies = CudaPolicies()

    def close(self) -> None:
        """Restore the CPU's own policies."""
        self._policies.close()

    def is_enabled(self, device_type: str = "cuda") -> bool:
        """Return True if autocast is enabled for a device, or for the CPU that stands for it."""
        if self._devices.cpu_is_stand_in:
            device_type = "cpu"
        return bool(_is_enabled(device_type))

    def dtype(self, device_type: str = "cuda") -> Any:
        """Return autocast's lower type for a device, such as float16."""
        if self._devices.cpu_is_stand_in and self.is_enabled(device_type):
            device_type = "cpu"
        return _dtype_of(device_type)

    def cast(self, value: Any) -> Any:
        """Return a value as autocast converts it for an operator in its lower type.

        Without autocast, that is the value itself.
        """
        if not self.is_enabled():
            return value
        device_type = "cpu"
        if isinstance(value, torch.Tensor):
            device_type = value.device.type
        return _cast_inputs(value, device_type, self.dtype())

    # Replacements of torch's functions, which get the original function as their first argument.

    def begin(
        self,
        original: Any,
        block: Any,
        device_type: str,
        dtype: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialize a ``torch.autocast`` block of any device as one of the CPU, with CUDA's
        policies.
        """
        if device_type != "cpu":
            self._policies.register()
            dtype = dtype or _dtype_of(device_type)
            device_type = "cpu"
        original(block, device_type, dtype, *args, **kwargs)

    def clear_cache(self, original: Any) -> None:
        """Stand for ``torch.clear_autocast_cache``: drop the converted weights."""
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
    """Registers CUDA's policies for the CPU's autocast, from ``register`` until ``close``.

    Known limit: until then they also apply to CPU autocast in other threads.
    """

    def __init__(self) -> None:
        self._library: Any = None
        """torch's handle of the registration, which ends when it is freed; None before the first
        use.
        """
        self._weights: dict[int, tuple[Any, Any]] = {}
        """Weights and their converted copies, by the identity of the weight."""

    def register(self) -> None:
        """Register the policies, once."""
        if self._library is not None:
            return
        self._library = torch._C._dispatch_library("IMPL", "aten", _CPU, __file__, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the CPU's policy is replaced
            for name, policy in _policies():
                kernel = self._kernel(name, policy)
                self._library.impl(name, _CPU, kernel)

    def close(self) -> None:
        """Restore the CPU's own policies."""
        self._library = None
        self.forget_weights()

    def forget_weights(self) -> None:
        """Drop the converted weights, as torch does at the end of the outermost autocast."""
        self._weights.clear()

    def _kernel(self, name: str, policy: Any) -> Any:
        """Return the function that torch calls for an operator inside an autocast block.

        Args:
            name: the operator with its overload, such as ``norm.Scalar``.
            policy: runs the operator with arguments of the type that CUDA would use; None to leave
                the arguments unchanged.
        """
        if policy is None:
            return torch.library.fallthrough_kernel
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name)
        overload_to_call = _WITH_DTYPE.get(name, overload)
        operator = getattr(packet, overload_to_call or "default")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_CPU_KEY):
                if policy is _in_lower:
                    args = _with_tensors_converted(args, self._converted_copy)
                return policy(operator, *args, **kwargs)

        return kernel

    def _converted_copy(self, tensor: Any) -> Any:
        """Return a tensor in autocast's lower type; as in torch, converted weights are cached."""
        dtype = _dtype_of("cpu")
        if not is_cached(tensor):
            return tensor.to(dtype)
        key = id(tensor)
        if key not in self._weights:
            self._weights[key] = (tensor, tensor.to(dtype))
        _, converted = self._weights[key]
        return converted


def is_cached(tensor: Any) -> bool:
    """Return True for a tensor whose converted copy autocast keeps: a weight that trains."""
    if tensor.dtype is not torch.float32 or not torch.is_autocast_cache_enabled():
        return False
    return bool(tensor.requires_grad and tensor.is_leaf and not tensor._is_view())


def _in_lower(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator in the lower type, to which its arguments have been converted."""
    return operator(*args, **kwargs)


_ATEN = torch.ops.aten
_HALF_TO_FLOAT = {
    _ATEN.softmax.int: _ATEN._softmax,
    _ATEN.log_softmax.int: _ATEN._log_softmax,
}
"""Operators that CUDA computes from float16 into float32 without a converted copy."""


@functools.cache
def _policies() -> list[tuple[str, Any]]:
    """Return the operators whose policy on CUDA differs from the CPU's, and CUDA's policy.

    None as policy: CUDA's autocast leaves the arguments of the operator unchanged.
    """
    changes: list[tuple[str, Any]] = []
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    policies = _policies_by_packet()
    for full_name in torch._C._dispatch_get_all_op_names():
        library, _, name = full_name.partition("::")
        packet, _, _ = name.partition(".")
        if library != "aten" or packet in _KEPT:
            continue
        cuda_policy = None
        if has_kernel(full_name, _CUDA):
            cuda_policy = policies.get(packet)
        cpu_policy = None
        if has_kernel(full_name, _CPU):
            cpu_policy = _in_lower
        if cuda_policy is not cpu_policy:
            changes.append((name, cuda_policy))
    return changes


def _policies_by_packet() -> dict[str, Any]:
    """Return CUDA's policies by the names of operators without their overloads."""
    return {
        **dict.fromkeys(_LOWER.split(), _in_lower),
        **dict.fromkeys(_FLOAT32.split(), _in_float32),
        **dict.fromkeys(_FLOAT32_RESULT.split(), _with_float32_result),
        **dict.fromkeys(_WIDEST.split(), _in_widest),
    }
