"""The base of the modes that follow torch's storages, in estimates and in ``%%peak``."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipygpumem.estimating.memory.storages import GRADIENTS, OPTIMIZER, StorageLog, tensors_in

_COMPILER = torch._C._dynamo.eval_frame
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def hide_from_compiler(mode: type[TorchDispatchMode]) -> None:
    """Let torch's compiler skip a mode's dispatch without the wrapper that torch puts around it.

    The wrapper imports 1,000 modules, and adds two Python calls to each operation. In an old torch,
    which has no other way, it stays.
    """
    if not hasattr(_COMPILER, "set_code_exec_strategy"):
        return
    dispatch = vars(mode)["__torch_dispatch__"].__wrapped__
    mode.__torch_dispatch__ = dispatch
    skip = _COMPILER._FrameAction.SKIP
    strategy = _COMPILER._FrameExecStrategy(skip, skip)
    _COMPILER.set_code_exec_strategy(dispatch.__code__, strategy)


class StorageFollower(TorchDispatchMode):
    """Sees the operations of code, and notes in a log what their storages are for.

    The subclasses log the storages: of fake tensors, or of real ones.
    """

    def __init__(self, log: StorageLog) -> None:
        super().__init__()
        self.log = log
        self._last_graph = -1
        """torch's number of the last backward pass."""

    def run_decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the parts of a composite operator in inference mode, and return their result.

        The mode then sees each of the parts. Outside inference mode, autograd decomposes such an
        operator before a mode sees it; then, and for other operators, nothing runs, and the result
        is NotImplemented.
        """
        if not torch.is_inference_mode_enabled():
            return NotImplemented
        # Not func.decompose: it prefers code in Python for compilers, if torch has some, such as
        # that of bilinear interpolation, which makes ten results instead of one.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            return NotImplemented
        with self:
            return func._op_dk(_COMPOSITE, *args, **kwargs)

    def note_backward_pass(self) -> bool:
        """Log the start of a backward pass, if the current operation is its first one; return True
        if it is an operation of a backward pass.
        """
        graph = torch._C._current_graph_task_id()
        if graph > self._last_graph:
            self._last_graph = graph
            self.log.backwards.append(self.log.clock)
        return bool(graph != -1)

    def owner(self, _: Any) -> Any:
        """Return the origin of the module that a parameter belongs to; None if it is not known.

        Only ``%%peak`` knows modules, and overrides this.
        """
        return None

    def mark_gradient(self, parameter: Any, gradient: Any) -> None:
        """Mark a parameter's gradient, unless it is None."""
        if gradient is not None:
            self.log.mark(gradient, GRADIENTS, self.owner(parameter))

    def mark_state(self, optimizer: Any, *_: Any) -> None:
        """Mark the tensors of an optimizer's state; torch's hooks pass further arguments."""
        for parameter, state in optimizer.state.items():
            origin = self.owner(parameter)
            for tensor in tensors_in(state):
                self.log.mark(tensor, OPTIMIZER, origin)
