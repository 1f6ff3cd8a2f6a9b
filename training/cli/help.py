"""`--help`: the keys that people change first, with their defaults, on one screen."""

from __future__ import annotations

import re
import textwrap

from extension import load_extensions
from training.config.key_table import Key, list_groups, list_keys
from training.config.schema import CONF

WIDTH = 100
FIRST: dict[str, tuple[str, ...]] = {
    "model and data": ("model_name_or_path", "train_file", "eval_file", "output_dir", "data", "max_seq_length",
                       "data.packing"),
    "layout and batch": ("num_stages", "tensor_parallel_size", "context_parallel_size", "micro_batch_size",
                         "gradient_accumulation_steps", "global_batch_size"),
    "optimization": ("learning_rate", "num_train_epochs", "max_steps", "warmup_ratio", "optimizer", "adapter"),
    "evaluate, save, follow": ("eval_steps", "save_steps", "keep_last", "load_best_model_at_end", "resume", "logger"),
    "memory": ("precision", "zero_stage", "activation_checkpoint_interval", "offload_optimizer"),
    "instead of training": ("plan", "evaluate_only"),
}  # fmt: skip
USAGE = """\
Fine-tunes a language model on pipeline stages. conf/NAME.yaml is a run; any key can be overridden.

  deepspeed [--num_gpus N] trainer_base_ds_mp.py -cn NAME [key=value ...]
  python trainer_base_ds_mp.py -cn NAME plan=true world_size=N hardware=NAME   memory and time
  python trainer_base_ds_mp.py -cn NAME --cfg job                              all keys of that run"""


def render_help() -> str:
    """Return the help: usage, first keys by what they are for, groups, configs and commands of extensions; of this
    project at most 60 lines."""
    keys = list_keys() | list_groups()
    parts = [USAGE]
    for title, names in FIRST.items():
        parts.append("\n".join([f"{title}:", *(_write_key(name, keys[name]) for name in names)]))
    configs = sorted(file.stem for file in CONF.glob("*.yaml"))
    groups = ", ".join(f"{group}=" for group in list_groups())
    parts.append(
        f"groups, each a folder of conf/: {groups}\nall keys: docs/configure.md; Hydra's own options: --hydra-help"
    )
    parts.append(textwrap.shorten(f"-cn {', '.join(configs)}", 3 * WIDTH, placeholder=" ..."))
    commands = [item for extension in load_extensions() for item in extension.commands.items()]
    if commands:
        parts.append("\n".join(["more commands:", *(f"  {command:<60} {purpose}" for command, purpose in commands)]))
    return "\n".join(textwrap.fill(part, WIDTH, subsequent_indent="  ") if "\n" not in part else part for part in parts)


def _write_key(name: str, key: Key) -> str:
    """Return a line: the key with its default, and its comment as far as it fits."""
    default = {"???": "..."}.get(key.default, key.default)
    line = f"  {f'{name}={default}':<42} "
    comment = re.sub(r"`([^`]*)`", r"\1", key.comment)
    return line + textwrap.shorten(comment, WIDTH - len(line), placeholder=" ...")
