"""The model card of a run: what it was made of, how, and how it went, from the files of `output_dir` alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from filesystem import write_atomically
from masking import mask
from training.checkpoint.run_folder import RunFolder
from training.config.sources import HELD_OUT
from training.objectives.objective import Objective
from training.objectives.registry import OBJECTIVES
from training.observability.run_page import RunHistory, read_history, read_lines

if TYPE_CHECKING:  # most runs write no model card
    from huggingface_hub import EvalResult

README, PLOT = "README.md", "loss.png"
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
Facts = Mapping[str, Any]


def write_card(run: RunFolder, folder: Path, repo_id: str, license: str | None) -> None:
    """Write README.md, and the losses as loss.png, into `folder`, an export of a run. license: of the base model; None
    where it is not known. Raises UserError where the run has left no metrics."""
    history = read_history(run)
    draw_losses(history, folder / PLOT)
    write_atomically(folder / README, render_card(run, folder, history, repo_id, license))


def find_base(run: RunFolder) -> str | None:
    """Return the base model of a run: a hub id without its revision, or a path. None for one from scratch."""
    config = _read(run.facts).get("config", {})
    name = config.get("model_name_or_path")
    if not name or config.get("init") == "random":
        return None
    repository = name.partition("@")[0]
    return repository if HUB_ID.fullmatch(repository) and not Path(name).exists() else name


def find_license(folder: Path) -> str | None:
    """Return the licence that the model card in a folder states, None where there is none that can be read."""
    file = folder / README
    text = file.read_text(errors="replace") if file.is_file() else ""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        fields = yaml.safe_load(found.group(1)) if found else None
    except yaml.YAMLError:
        return None
    return fields.get("license") if isinstance(fields, dict) else None


def render_card(run: RunFolder, folder: Path, history: RunHistory, repo_id: str, license: str | None) -> str:
    """Return the text of the model card. folder: the export, of which the kind of model is read."""
    facts, done = _read(run.facts), _read(run.completed)
    config = facts.get("config", {})
    base = find_base(run)
    is_adapter = (folder / "adapter_config.json").is_file()
    rows = [
        ("base model", f"`{base}`" if base else "none: trained from scratch"),
        ("licence of the base", license or "not stated where it was read from; see the base model"),
        *_describe_training(config, history, done),
        *_describe_machine(facts),
        *((name, fact["summary"]) for name, fact in facts.get("facts", {}).items() if "summary" in fact),
    ]
    kind = "A LoRA adapter (peft) for" if is_adapter else "A fine-tuned model, from"
    intro = f"{kind} `{base}`." if base else "A model trained from scratch."
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    sections = [
        f"# {repo_id.rpartition('/')[2]}",
        intro,
        f"| | |\n|---|---|\n{table}",
        f"## Data\n\n{_render_data(config, facts.get('data', {}))}",
        f"## Losses\n\n{_render_losses(history)}\n\n![Losses over steps]({PLOT})",
        f"## How it was made\n\n```bash\n{facts.get('environment', {}).get('command', '')}\n```",
    ]
    header = _describe_header(config, base, license, is_adapter)
    if results := list_results(find_evaluation(run, history), header["pipeline_tag"], facts.get("data", {})):
        header |= {"model_name": repo_id.rpartition("/")[2], "eval_results": results}
    return f"---\n{_render_header(header)}\n---\n\n" + "\n\n".join(sections) + "\n"


def find_evaluation(run: RunFolder, history: RunHistory) -> Facts:
    """Return what the evaluation of the exported step has reported, by name. Empty for a run that has not ended, and
    where that step was not evaluated."""
    done = _read(run.completed)
    if done.get("step", -1) < history.last.get("step", 0):
        return {}
    step = done.get("best_step", done["step"])
    records = [each for each in read_lines(run.metrics) if each.get("step") == step and "eval_loss" in each]
    return records[-1] if records else {}


def list_results(evaluation: Facts, task: str, data: Mapping[str, Sequence[Facts]]) -> list[EvalResult]:
    """Return the figures of an evaluation as the hub lists them. data: what each key's files became, as `run.json` has
    it; an evaluation file of several has a key such as `eval_file.math`, and figures such as `eval_math_loss`."""
    from huggingface_hub import EvalResult

    files = {
        key.partition(".")[2]: [f"{'held out of ' * (key == HELD_OUT)}{file['name']}" for file in listed]
        for key, listed in data.items()
        if key != "train_file"
    }
    results = []
    for key, value in evaluation.items():
        is_figure = key.startswith("eval_") and not key.endswith("_tokens") and isinstance(value, int | float)
        if not is_figure or not math.isfinite(value):
            continue
        figure = key.removeprefix("eval_")
        name = max((name for name in files if name and figure.startswith(f"{name}_")), key=len, default="")
        names = files.get(name) or [*chain.from_iterable(files.values())] or ["the evaluation files"]
        described = ", ".join(names)
        results.append(
            EvalResult(
                task_type=task,
                dataset_type=next(_list_hub_data(names[0]), described) if len(names) == 1 else described,
                dataset_name=described,
                metric_type=figure.removeprefix(f"{name}_") if name else figure,
                metric_name=key,
                metric_value=value,
            )
        )
    return results


def draw_losses(history: RunHistory, file: Path) -> None:
    """Draw the losses of training and evaluations over steps. A run without any gets an empty chart."""
    from matplotlib.figure import Figure  # here: it takes long to import

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in history.curves.items():
        if name == "loss" or re.fullmatch(r"eval_(\w+_)?loss", name):
            points = curve.describe()
            axes.plot(points["step"], points["mean"], label=name, marker="o" if len(points["step"]) < 30 else "")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per target token")
    if axes.lines:
        axes.legend()
    figure.savefig(file, dpi=120)


def _describe_header(config: Facts, base: str | None, license: str | None, is_adapter: bool) -> dict[str, Any]:
    """Return the fields by which the hub lists a model; None where one is not known."""
    is_on_hub = base is not None and HUB_ID.fullmatch(base) is not None and not Path(base).exists()
    objective = OBJECTIVES.get(str(config.get("task") or (config.get("data") or {}).get("name")), Objective())
    is_plain_adapter = is_adapter and objective.made_for == Objective.made_for
    return {
        "base_model": base if is_on_hub else None,
        "base_model_relation": ("adapter" if is_adapter else "finetune") if is_on_hub else None,
        "license": license,
        "library_name": "peft" if is_plain_adapter else objective.made_for,
        "pipeline_tag": objective.pipeline_tag,
        "datasets": sorted(set(_list_hub_data(config.get("train_file")))) or None,
        "tags": ["llm-pipeline", "deepspeed", *([] if not is_adapter else ["lora"])],
    }


def _render_header(fields: Facts) -> str:
    """Return the fields as YAML, with the evaluations as the hub's `model-index`."""
    from huggingface_hub import ModelCardData

    return ModelCardData(**fields).to_yaml()


def _list_hub_data(entry: Any) -> Iterator[str]:
    """Yield the data sets of the hub in `train_file`."""
    if isinstance(entry, list):
        for part in entry:
            yield from _list_hub_data(part)
    elif isinstance(entry, dict):
        yield from _list_hub_data(entry.get("path"))
    elif isinstance(entry, str) and entry.startswith("hf:"):
        yield entry.removeprefix("hf:").partition("?")[0]


def _describe_training(config: Facts, history: RunHistory, done: Facts) -> Iterator[tuple[str, str]]:
    task = config.get("task") or config.get("data", {}).get("name", "")
    yield "task", f"{task}, rows of up to {config.get('max_seq_length', 0):,} tokens"
    step = done.get("step") or history.last.get("step", 0)
    yield "steps", f"{step:,}, {history.last.get('num_tokens', 0):,} tokens"
    if "best_step" in done:
        metric = f"{config.get('metric_for_best_model')} ({done['best_metric']:.4f})"
        yield "exported", f"step {done['best_step']:,}, the best by {metric}"
    rate = f"{config.get('learning_rate')}, {config.get('lr_scheduler_type')}"
    yield "optimizer", f"{config.get('optimizer', {}).get('name')}, learning rate {rate}, seed {config.get('seed')}"
    adapter = config.get("adapter", {})
    if adapter.get("name") == "lora":
        yield "adapter", f"r {adapter['r']}, alpha {adapter['lora_alpha']}, on {adapter['target_modules']}"


def _describe_machine(facts: Facts) -> Iterator[tuple[str, str]]:
    config, environment = facts.get("config", {}), facts.get("environment", {})
    sizes = {name: config.get(f"{name}_size", 1) for name in ("tensor_parallel", "context_parallel")}
    ranks, stages = sum(environment.get("hosts", {}).values()), config.get("num_stages", 1)
    replicas = ranks // (stages * sizes["tensor_parallel"] * sizes["context_parallel"])
    axes = [_count(stages, "stage"), _count(replicas, "replica")]
    axes += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    yield "layout", f"{', '.join(axes)}; ZeRO stage {config.get('zero_stage')}, {config.get('precision')}"
    hosts = _count(len(environment.get("hosts", {})), "host")
    yield "hardware", f"{ranks} x {environment.get('device')} on {hosts}"
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())
    source = f"; llm-pipeline {environment['git']}" if environment.get("git") else ""
    yield "versions", f"Python {environment.get('python')}, {packages}{source}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _render_data(config: Facts, data: Mapping[str, Sequence[Facts]]) -> str:
    """Return the files with their counts; of a stream, which is not counted before, what `train_file` says."""
    lines = [
        f"| `{key}` | `{file['name']}` | {file['samples']:,} | {file['tokens']:,} | {file['targets']:,} |"
        for key, files in data.items()
        for file in files
    ]
    streamed = "" if "train_file" in data else f"Streamed from `{json.dumps(config.get('train_file'))}`.\n\n"
    if not lines:
        return streamed.strip()
    return "\n".join([f"{streamed}| key | file | samples | tokens | target tokens |\n|---|---|---|---|---|", *lines])


def _render_losses(history: RunHistory) -> str:
    rows = []
    for name, curve in history.curves.items():
        if name == "loss" or re.fullmatch(r"eval_(\w+_)?loss", name):
            first, last = curve.buckets[0], curve.buckets[-1]
            rows.append(
                f"| `{name}` | {first.total / first.count:.4f} | {last.total / last.count:.4f} | {last.step:,} |"
            )
    return "\n".join(["| | first report | last report | at step |\n|---|---|---|---|", *rows])


def _read(file: Path) -> dict[str, Any]:
    return mask(json.loads(file.read_text())) if file.is_file() else {}  # an earlier version wrote secrets as well
