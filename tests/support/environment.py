"""One environment for the whole suite, whatever shell starts it: on the CPU, online, in UTF-8.

DS_ACCELERATOR alone says otherwise: `DS_ACCELERATOR=cuda make test` lets the tests see the GPUs. Cleaned before
anything is imported that reads it (torch, huggingface_hub). Workers and launches inherit it.
"""

from __future__ import annotations

import locale
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Who and where one is, how programs and libraries are found, and what pytest and its plugins tell their processes.
_KEPT = {
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR",
    "CI", "SSL_CERT_FILE", "TORCH_EXTENSIONS_DIR", "MAX_JOBS",
    "CHROMIUM", "ENGINE_WHEELS",
}  # fmt: skip
_KEPT_BEGINNINGS = ("PYTEST_", "COV_", "COVERAGE_")
_SET = {"LC_ALL": "C.UTF-8"}
# Both: the deepspeed launcher lists a GPU for each rank, whether there are any or not, and so shows them again; and
# DeepSpeed's choice is not torch's.
_ON_THE_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
_GPU_VARIABLES = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without variables that would change the result of a test."""
    kept = {key: text for key, text in environ.items() if key in _KEPT or key.startswith(_KEPT_BEGINNINGS)}
    wants_gpus = environ.get("DS_ACCELERATOR", "") not in ("", "cpu")
    return (
        kept | _SET | ({key: environ[key] for key in _GPU_VARIABLES if key in environ} if wants_gpus else _ON_THE_CPU)
    )


def clean_this_process() -> None:
    cleaned = clean(os.environ)
    if not os.access(cleaned.get("HOME", ""), os.W_OK):
        cleaned["HOME"] = tempfile.mkdtemp(prefix="home-of-tests-")  # libraries keep caches there
    os.environ.clear()
    os.environ.update(cleaned)
    os.umask(0o022)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")  # what files are read and written in


def leave_flushing_to_the_system() -> None:
    """Makes `os.fsync` return at once, in this process. A run of a few steps waits for fifty of them, and what is not
    flushed is lost only with the machine."""
    os.fsync = lambda descriptor: None


def hostile_environment(folder: Path) -> dict[str, str]:
    """Returns variables that a shell may have set for other work, each of which would change some test's result."""
    return {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/proc/none",
        "TRANSFORMERS_VERBOSITY": "debug", "TOKENIZERS_PARALLELISM": "maybe", "WANDB_MODE": "disabled",
        "WANDB_DIR": "/proc/none", "WANDB_RUN_GROUP": "mine", "OMP_NUM_THREADS": "64", "CUDA_VISIBLE_DEVICES": "7",
        "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_SIZE": "4",
        "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
        "GLOO_SOCKET_IFNAME": "none0", "TORCH_LOGS": "all", "CXX": "no-compiler", "MPLBACKEND": "none",
        "COLUMNS": "20", "NO_COLOR": "1", "TERM": "dumb", "HYDRA_FULL_ERROR": "1", "http_proxy": "http://127.0.0.1:9",
        "LC_ALL": "POSIX", "LANG": "de_DE.ISO-8859-1", "HOME": str(folder / "no-home"), "MAKEFLAGS": "-n",
    }  # fmt: skip
