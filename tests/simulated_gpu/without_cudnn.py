"""Switches cuDNN off once torch is imported: its engines are not simulated, torch's own kernels do
nothing instead.

build.py puts this module into the environment of the simulated card, where a .pth file imports it
at every start.
"""

import importlib.abc
import importlib.util
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.backends.cudnn.enabled = False
            module.backends.cuda.enable_cudnn_sdp(False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterTorch())
