"""On PYTHONPATH: makes torch report a GPU; a process that uses it is logged in $GPU_LOG, and fails."""

import os
import sys
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class _PatchTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            _add_gpu(module)

        spec.loader.exec_module = load_and_patch
        return spec


def _add_gpu(torch):
    def take(*arguments, **named):
        with open(os.environ["GPU_LOG"], "a") as log:
            log.write("".join(traceback.format_stack()[:-1]) + "\n")
        raise RuntimeError("the GPU was used")

    torch.cuda._lazy_init = take
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")


sys.meta_path.insert(0, _PatchTorch())
