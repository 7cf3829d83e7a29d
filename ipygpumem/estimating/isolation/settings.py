"""The settings of torch and of the process that code may change, and functions that set them."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch

_Getter = Callable[[], Any]
_Setter = Callable[[Any], object]
_Setting = tuple[_Getter, _Setter]
"""Reads a setting, and sets it to a value that was read."""
_CUDNN = torch.backends.cudnn


@contextlib.contextmanager
def imports_undone() -> Iterator[None]:
    """Restore environment variables and warning filters that imports inside the block change."""
    environment = _environment()
    filters = _warning_filters()
    try:
        yield
    finally:
        if _environment() != environment:
            _set_environment(environment)
        if _warning_filters() != filters:
            _set_warning_filters(filters)


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _warning_filters() -> list[Any]:
    return list(warnings.filters)


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]  # it is a list


def _autocast() -> tuple[Any, ...]:
    """Return the number of open autocast blocks, whether its cache is on, and the settings of each
    kind of device.
    """
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    settings = []
    for kind in ("cpu", "cuda"):
        is_enabled = torch.is_autocast_enabled(kind)
        settings.append((kind, is_enabled, torch.get_autocast_dtype(kind)))
    return nesting, torch.is_autocast_cache_enabled(), settings


def _set_autocast(saved: tuple[Any, ...]) -> None:
    """Restore autocast as ``_autocast`` returned it."""
    nesting, is_cache_enabled, settings = saved
    current_nesting, *_ = _autocast()
    for _ in range(current_nesting - nesting):  # blocks that the code has left open
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(is_cache_enabled)
    for kind, is_enabled, dtype in settings:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)


def _default_device() -> Any:
    """Return the device that ``torch.set_default_device`` has set; None without one."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return getattr(context, "device", None)


def _mode_flags() -> dict[str, bool]:
    """Return torch's flags of the whole process that say which modes are on."""
    flags = vars(_python_dispatch).items()
    return {name: flag for name, flag in flags if name.startswith("_is_in_") and type(flag) is bool}


def _set_mode_flags(flags: dict[str, bool]) -> None:
    """Set the flags, which each mode sets back to what it found.

    A thread that the code has started, such as that of tqdm's progress bar, may still run, and is
    still in the modes. When it leaves them, it sets the flags to the values that it found.
    """
    vars(_python_dispatch).update(flags)
    compiler_flag = flags.get("_is_in_any_mode_without_ignore_compile_internals")
    if compiler_flag is not None:
        _python_dispatch.set_is_in_mode_without_ignore_compile_internals(compiler_flag)


def _setting_of_cudnn(name: str) -> _Setting:
    """Return the getter and the setter of an attribute of ``torch.backends.cudnn``, such as
    ``benchmark``.
    """
    get = functools.partial(getattr, _CUDNN, name)
    put = functools.partial(setattr, _CUDNN, name)
    return get, put


SETTINGS: tuple[_Setting, ...] = (
    (_environment, _set_environment),
    (_warning_filters, _set_warning_filters),
    (os.getcwd, os.chdir),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (_autocast, _set_autocast),
    (_mode_flags, _set_mode_flags),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *map(_setting_of_cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
)
"""Getters and setters of the settings that code may change."""
