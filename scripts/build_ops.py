"""Compiles the small C++ ops that DeepSpeed would otherwise compile in the middle of the first run.

A run that is killed while it compiles leaves a lock behind, and the next one waits on it for ever; so this starts from an empty
folder. `make` runs it once, into the folder that TORCH_EXTENSIONS_DIR names.
"""

from __future__ import annotations

import os
import shutil

from deepspeed.accelerator import get_accelerator


def main() -> None:
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        shutil.rmtree(folder, ignore_errors=True)
    names = ["CPUAdamBuilder"]  # the optimizer of offload_optimizer=cpu
    if get_accelerator().device_name() == "cpu":
        names.append("ShareMemCommBuilder")  # all-reduce between the ranks of a host
    for name in names:
        get_accelerator().create_op_builder(name).load(verbose=False)


if __name__ == "__main__":
    main()
