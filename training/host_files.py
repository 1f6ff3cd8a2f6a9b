"""Whether all hosts read the same: models, tokenizer, tokenized data, labels, and the code of a user.

Each host may have copies of its own. Stages of different models, or inputs and targets of different samples, would
train without any error. So before anything is built, the hosts compare a fingerprint of each file that one of them may
read; of each tensor a sample (`models/weights/fingerprint.py`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import xxhash
from transformers import PreTrainedTokenizerBase

from data.storage.cache import describe_tokenizer
from data.storage.hashes import read_hashes
from data.storage.tokenized import CORPORA_FILE, SUMMARY_FILE, load_summary
from errors import UserError
from extension import list_own_names
from filesystem import hash_file
from models.layers.fused_kernels import find_triton_obstacle
from models.storage.manifest import MANIFEST_NAME, has_manifest
from models.weights.fingerprint import fingerprint_files
from training.distributed.process import has_accelerator
from training.distributed.ranks import raise_together
from training.inputs.datasets import build_row_plan
from training.objectives.registry import describe_objective
from training.optim.optimizer import compiles_update
from training.setup import Run, RunSetup

Files = dict[str, tuple[str, str]]  # what it is, in words -> its fingerprint, and where it is
_MISSING = ("none", "nowhere")  # what a host lacks
_MOST_NAMED = 5  # of what no two hosts have in common


def check_same_files(run: Run, datasets: Mapping[str, Path], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that this host reads what the others do, and compiles what they compile. All ranks call it, in a process
    group. Raises UserError, on all of them, where hosts differ, or one cannot read its files."""
    ranks = run.ranks
    if ranks.local_size == ranks.world_size:
        return
    own: Files | None = None
    error = None
    try:
        if ranks.local_rank == 0:
            own = list_files(run.setup, datasets, tokenizer)
    except (UserError, OSError, ValueError) as mistake:
        error = UserError(f"{socket.gethostname()} cannot compare what it reads with other hosts: {mistake}")
    raise_together(error)
    found: list[tuple[str, Files | None, str | None]] = [("", None, None)] * ranks.world_size
    dist.all_gather_object(found, (socket.gethostname(), own, _find_obstacle(run)))
    differences = describe_differences([(host, files) for host, files, _ in found if files is not None])
    error = None
    if differences is not None and ranks.is_main:
        error = UserError(f"hosts read different copies of {differences}; copy the right one to all hosts")
    raise_together(error)
    raise_together(compare_obstacles([(host, obstacle) for host, _, obstacle in found]) if ranks.is_main else None)


def _find_obstacle(run: Run) -> str | None:
    """Return why this rank cannot compile the optimizer's update, if the run would compile it."""
    return find_triton_obstacle() if has_accelerator() and compiles_update(run.config, True) else None


def compare_obstacles(found: Sequence[tuple[str, str | None]]) -> UserError | None:
    """Return the error where some ranks can compile the optimizer's update and others cannot: two formulas would update
    the copies of a weight, which would drift apart. found: the host of each rank, and what keeps it from compiling."""
    if len({obstacle is None for _, obstacle in found}) < 2:
        return None
    host, obstacle = next(each for each in found if each[1] is not None)
    return UserError(
        f"some hosts can compile the optimizer's update, and {host} cannot: {obstacle}; all have to update alike, so "
        "install it there"
    )


def describe_differences(hosts: Sequence[tuple[str, Files]]) -> str | None:
    """Return, in words, the first of what hosts read that differs, and all that no two of them have in common; None
    where all is the same. hosts: the name and the files of each."""
    differing: dict[str, list[str]] = {}  # name -> the fingerprint on each host
    for name in {name: None for _, files in hosts for name in files}:
        contents = [files.get(name, _MISSING)[0] for _, files in hosts]
        if len(set(contents)) > 1:
            differing[name] = contents
    if not differing:
        return None
    name, contents = next(iter(differing.items()))
    usual = max(contents, key=contents.count)
    other = next(content for content in contents if content != usual)
    described = []
    for host, files in (hosts[contents.index(each)] for each in (usual, other)):
        fingerprint, place = files.get(name, _MISSING)
        described.append(f"{host} has {fingerprint} ({place})")
    unshared = [name for name, contents in differing.items() if len(set(contents)) == len(hosts)]
    return f"{name}: {', '.join(described)}{_describe_unshared(unshared)}"


def _describe_unshared(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"; no two hosts have in common: {', '.join(names[:_MOST_NAMED])}{more}"


def list_files(setup: RunSetup, datasets: Mapping[str, Path], tokenizer: PreTrainedTokenizerBase) -> Files:
    """Return what this host reads. Raises UserError, OSError and ValueError for what cannot be read."""
    config = setup.config
    found: Files = {}
    sources = {"the model": setup.source, "the reference model": setup.reference}
    if setup.auxiliary is not None:
        sources[setup.auxiliary.model.key] = setup.auxiliary.setup.source
    for what, source in sources.items():
        for file, fingerprint in fingerprint_files(source).items() if source is not None else ():
            name = f"{file.name} of {what}"
            same = found.get(name, ("", ""))[0]  # of an adapter whose base is an adapter: one more file of that name
            found[name] = (same + fingerprint, str(file))
    if setup.resume_from is not None and has_manifest(setup.resume_from):
        manifest = setup.resume_from / MANIFEST_NAME
        found["the checkpoint that is resumed"] = (hash_file(manifest), str(manifest))
    extensions = ", ".join(list_own_names())
    found["the list of extensions"] = (_hash(extensions), extensions or "none")
    found["the tokenizer"] = (_hash(describe_tokenizer(tokenizer)), str(tokenizer.name_or_path))
    for key, folder in datasets.items():
        found[f"the tokens of {key}"] = (_hash(load_summary(folder).fingerprints), str(folder))
        plan = build_row_plan(config, key)
        for each in [folder] if plan.is_trivial else [folder, plan.folder(folder)]:
            for name, written in read_hashes(each).items():
                if name not in (SUMMARY_FILE, CORPORA_FILE):  # which have paths
                    found[f"{name} of the tokenized {key}"] = (written, str(each / name))
    described = describe_objective(config) | {"data.labels": str(config.data.labels)}
    return found | {name: (_hash(value), value) for name, value in described.items()}


def _hash(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())
