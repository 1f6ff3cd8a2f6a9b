"""Compiles the one C++ op that DeepSpeed would otherwise compile in the middle of the first run on a CPU.

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
    if get_accelerator().device_name() == "cpu":
        get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)  # all-reduce between the ranks of a host


if __name__ == "__main__":
    main()
