"""The proof of a run's own config, which the run records of itself.

Each run that trains asks for it, so what takes long to import waits until there is one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from extension import ROOT, load_extensions
from training.checkpoint.run_folder import RunFolder
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import RunConfig
from training.observability.environment import describe_environment

FILE = "proof.json"  # in output_dir
PACKAGES = ("models", "data", "training", "extensions")  # the folders of the project's modules


def find_certificate(config: RunConfig, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the proof in `output_dir` by the name `proof`. Return nothing if there is none, if it has failed, or if it
    was made with another config, model, code, or number of ranks. Return nothing either if the run has a key that
    `proof=true` refuses, such as a loss of the user's own, since the proof was made without it."""
    file = RunFolder(config.output_dir).path / FILE
    if not file.is_file():
        return {}
    from extensions.proof.plain import check_provable
    from training.plan_command.run import describe_model

    asked: dict[str, Any] = {"proof": True}
    with suppress(OSError, ValueError, KeyError, TypeError):  # a file that is damaged, and UserError
        certificate = json.loads(file.read_text())
        check_together(CheckedConfig(replace(config, **asked)))
        check_provable(config)
        proven = describe_proven(config, describe_model(config).config, len(hosts), describe_environment(hosts))
        if certificate["passed"] and certificate["proven"] == proven:
            return {"proof": certificate}
    return {}


def describe_proven(
    config: RunConfig, architecture: PretrainedConfig, num_ranks: int, environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a proof is of, ready for JSON: the keys that it takes over, the model's config, and the code."""
    from extensions.proof.small_run import describe_keys

    model = hashlib.sha256(architecture.to_json_string(use_diff=False).encode()).hexdigest()[:16]
    code = {"packages": environment["packages"], "source": _hash_source()}
    return {"keys": describe_keys(config, num_ranks), "model": model, **code}


def _hash_source() -> str:
    """Return a hash of the project's modules and of those of users' extensions: a commit does not tell edits apart, and
    an image has none."""
    digest = hashlib.sha256()
    own = [each.folder for each in load_extensions() if not each.is_shipped]
    for folder in (ROOT, *(ROOT / name for name in PACKAGES), *own):
        for file in sorted(folder.glob("*.py") if folder == ROOT else folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder.parent)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
