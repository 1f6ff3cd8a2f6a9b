"""The outcome of a proof: how far loss and gradients of the stages are from those of plain transformers, on the screen
and in `output_dir`/proof.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from console import pluralize
from errors import UserError
from extensions.proof.plain import PlainStep
from extensions.proof.recorded import FILE, describe_proven
from extensions.proof.staged import StagedStep
from filesystem import write_atomically
from masking import mask_text
from models.generic.proof import BOUND, find_difference
from training.checkpoint.run_folder import RunFolder
from training.config.schema import RunConfig
from training.observability.environment import describe_environment

Certificate = dict[str, Any]  # the content of the file


def compare(staged: StagedStep, plain: PlainStep, freezes: bool) -> dict[str, Any]:
    """Return the distances of a step from the same one by plain transformers, ready for JSON. A distance is the
    difference over the plain value; of a tensor, its largest elements'.

    freezes: whether the run trains fewer tensors than the plain model. Raises UserError where the two have gradients of
    other tensors.
    """
    theirs = {name: plain.gradients[name] for name in staged.gradients.keys() & plain.gradients.keys()}
    others = staged.gradients.keys() - theirs.keys()
    if not freezes:
        others |= plain.gradients.keys() - theirs.keys()
    if others or not theirs:
        named = min(others, default="none of the trained tensors")
        raise UserError(f"proof=true: '{named}' has a gradient on one side alone: the stages train other tensors")
    worst, name = find_difference(staged.gradients, theirs)
    broken = [name for name, gradient in staged.gradients.items() if not gradient.isfinite().all()]
    if broken:
        worst, name = math.inf, broken[0]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in theirs.values()))
    return {
        "loss": staged.loss,
        "plain_loss": plain.loss,
        "loss_distance": _compute_distance(staged.loss, plain.loss),
        "gradient_norm": staged.norm,
        "plain_gradient_norm": norm,
        "gradient_norm_distance": _compute_distance(staged.norm, norm),
        "worst_gradient": name,
        "worst_gradient_distance": worst,
        "bound": BOUND,
        "tensors": len(theirs),
        "parameters": sum(gradient.numel() for gradient in theirs.values()),
        "tokens": staged.num_tokens,
        "targets": staged.num_targets,
    }


def _compute_distance(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs) if math.isfinite(ours) else math.inf


def is_passed(found: Mapping[str, Any]) -> bool:
    """Return whether all distances are within the bound."""
    return all(found[name] < BOUND for name in ("loss_distance", "gradient_norm_distance", "worst_gradient_distance"))


def check_passed(found: Mapping[str, Any]) -> None:
    """Raise UserError for a distance that is not within the bound."""
    if not is_passed(found):
        raise UserError(
            f"proof=true: the step is not that of transformers: the loss differs by {found['loss_distance']:.1e}, the "
            f"norm by {found['gradient_norm_distance']:.1e}, the gradient of '{found['worst_gradient']}' by "
            f"{found['worst_gradient_distance']:.1e}; this layout would train something else, so give another one, and "
            "report this one"
        )


def list_facts(found: Mapping[str, Any], model: str, layout: str) -> dict[str, str]:
    """Return the facts of the table. model, layout: those of the small run, in words."""
    facts = {"small model": model, "layout": layout}
    for what, name in (("loss", "loss"), ("gradient norm", "gradient_norm")):
        ours, theirs = found[name], found[f"plain_{name}"]
        facts[what] = f"{ours:.7g}, transformers {theirs:.7g}: distance {found[f'{name}_distance']:.1e}"
    facts["worst gradient"] = f"{found['worst_gradient']}: distance {found['worst_gradient_distance']:.1e}"
    facts["compared"] = (
        f"{pluralize(found['tensors'], 'gradient')} of {found['parameters']:,} parameters, over "
        f"{found['tokens']:,} tokens, {found['targets']:,} of them targets"
    )
    facts["result"] = f"{'equal' if is_passed(found) else 'NOT equal'}, by the bound {found['bound']:.0e}"
    return facts


def summarize(found: Mapping[str, Any], layout: str) -> str:
    """Return a proof in a sentence."""
    most = max(found["loss_distance"], found["gradient_norm_distance"], found["worst_gradient_distance"])
    return (
        f"a small model at this layout ({layout}) has the loss and the {found['tensors']} gradients of plain "
        f"transformers within {most:.0e} (fp32, {found['targets']:,} targets)"
    )


def save_certificate(
    config: RunConfig, architecture: PretrainedConfig, hosts: Sequence[str], found: Mapping[str, Any], layout: str
) -> Path:
    """Write the outcome of a proof into `output_dir`. config, architecture: the user's."""
    environment = describe_environment(hosts)
    certificate: Certificate = {
        "passed": is_passed(found),
        "summary": summarize(found, layout),
        **found,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": mask_text(environment["command"]),
        "device": environment["device"],
        "proven": describe_proven(config, architecture, len(hosts), environment),
    }
    folder = RunFolder(config.output_dir)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_atomically(folder.path / FILE, json.dumps(certificate, indent=2) + "\n")
    return folder.path / FILE
