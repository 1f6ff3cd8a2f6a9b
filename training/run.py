"""One training run, from a composed config to an exported model. Read this first to see the order of things."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data import loader as loaders
from data.order import GlobalOrder
from data.rows import count_rows
from data.tokenized import load_summary
from errors import UserError
from models.adapters import Adapter
from models.architecture import Layer, build_layers, check_length, choose_attention
from models.conversion import export_hugging_face
from models.weights import WeightSource, open_weights
from training.checkpoint import TrainerState, load_checkpoint, read_state, remove_leftovers
from training.checks import check_config, check_deepspeed_version, check_model_fields
from training.config import AdapterName, AttnImplementation, Precision, RunConfig, to_typed
from training.engine import initialize_engine
from training.inspection import print_inspection
from training.layout import Layout, build_layout
from training.loop import Horizon, TrainingLoop
from training.metrics import Reporter, build_reporters
from training.partition import compute_bounds
from training.pipeline import StageModule
from training.preparation import build_row_plan, prepare_file
from training.ranks import Ranks, exit_on_user_error, read_ranks
from training.requests import exit_code
from training.resume import Resumable, check_resumable, choose_whole, find_resume
from training.run_folder import RunFolder
from training.trainable import build_adapter, check_freeze, check_same_adapter, export_adapter, read_trained_adapter, save_adapter_config

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
# Ranks wait this long for rank 0 of their host to tokenize.
PREPARATION_TIMEOUT = timedelta(hours=12)


def run(composed: DictConfig) -> None:
    """Checks everything that can be known, then trains. A UserError ends the process with one line."""
    ranks = read_ranks()
    with exit_on_user_error(ranks, speaks=ranks.is_main):
        config = to_typed(composed)
        if config.inspect_data:
            return inspect_data(config, ranks)
        plan = check_run(config, ranks)
    folder = RunFolder(config.output_dir)
    send_noise_to_log(folder.path / "logs" / f"rank_{ranks.rank}.log")
    with exit_on_user_error(ranks, says_rank=True):
        signum = train(config, plan, folder, ranks)
    dist.destroy_process_group()
    if signum:
        sys.exit(exit_code(signum))


def inspect_data(config: RunConfig, ranks: Ranks) -> None:
    """Tells what the model will see. One process is enough: no layout, device or process group is asked for. Raises UserError."""
    if not ranks.is_main:
        return
    check_config(config, has_accelerator=True)
    tokenizer = load_tokenizer(config, open_weights(_weights_path(config), config.trust_remote_code))
    print_inspection(config, tokenize(config, tokenizer, ranks), tokenizer)


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """What the checks have found out on the way."""

    source: WeightSource
    layers: list[Layer]
    layout: Layout
    bounds: list[int]
    adapter: Adapter | None
    resume_from: Path | None
    resumable: Resumable | None  # what resume_from is chosen from


def check_run(config: RunConfig, ranks: Ranks) -> CheckedRun:
    """Everything that can be known to be wrong before a process group exists; the same on all ranks.

    Raises UserError.
    """
    has_accelerator = get_accelerator().device_name() != "cpu"
    check_deepspeed_version()
    check_config(config, has_accelerator)
    check_attention(config.attn_implementation, has_accelerator)
    folder = RunFolder(config.output_dir)
    folder.check_usable(config.resume is not None, config.overwrite_output_dir)
    resumable = find_resume(config.resume, folder.checkpoints, config.trust_checkpoint) if config.resume else None
    resume_from = resumable.candidates[0] if resumable else None
    source = open_weights(_source_path(config, resume_from), config.trust_remote_code)
    if config.overwrite_output_dir:
        folder.check_keeps(source.path)
    check_model_fields(config.model, source.config, str(source.path))
    source.config._attn_implementation = choose_attention(source.config, config.attn_implementation.value)
    check_length(source.config, config.max_seq_length)
    layers = build_layers(source.config)
    source.check_complete(layers)
    check_freeze(config, layers)
    adapter = build_adapter(config, layers)
    check_same_adapter(config, adapter, resume_from)
    layout = build_layout(config, ranks.world_size, len(layers), has_accelerator)
    bounds = compute_bounds(layers, layout.num_stages, config.partition_method)
    return CheckedRun(source, layers, layout, bounds, adapter, resume_from, resumable)


def _source_path(config: RunConfig, resume_from: Path | None) -> str:
    """Where this run's weights lie. The checkpoint of a LoRA run holds the adapter alone, beside the model it started from."""
    return _weights_path(config) if resume_from is None or config.adapter.name is AdapterName.lora else str(resume_from)


def _weights_path(config: RunConfig) -> str:
    path = config.model_name_or_path
    if path.startswith("outputs/demo/") and not Path(path).exists():
        raise UserError(f"model_name_or_path={path} is not there yet: run `make demo` once, it makes the demo's model and data")
    return path


def check_attention(implementation: AttnImplementation, has_accelerator: bool) -> None:
    """Raises UserError for a kernel that this machine cannot run."""
    if implementation in (AttnImplementation.flash_attention_2, AttnImplementation.flash_attention_3):
        package = "flash_attn" if implementation is AttnImplementation.flash_attention_2 else "flash_attn_interface"
        from importlib.util import find_spec

        if not has_accelerator or find_spec(package) is None:
            raise UserError(f"attn_implementation={implementation.value} needs a GPU and the package {package}; use sdpa")
    if implementation is AttnImplementation.flex_attention and not has_accelerator:
        raise UserError("attn_implementation=flex_attention has no backward pass on a CPU; use sdpa")


def send_noise_to_log(file: Path) -> None:
    """What libraries print goes to this rank's log file; stderr stays for us, for errors, and for stack traces."""
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout = open(file, "a", buffering=1)
    handler = logging.StreamHandler(sys.stdout)
    for name in (None, "DeepSpeed", "transformers", "datasets"):
        logging.getLogger(name).handlers = [handler]
    for name in ("DeepSpeed", "transformers", "datasets"):
        logging.getLogger(name).propagate = False
    logging.captureWarnings(True)


def say(ranks: Ranks, text: str) -> None:
    if ranks.is_main:
        print(text, file=sys.__stderr__, flush=True)


def train(config: RunConfig, plan: CheckedRun, folder: RunFolder, ranks: Ranks) -> int:
    """The run itself: prepare the data, join the ranks, build the stage, train, export. Returns the signal that ended it early, or 0."""
    if ranks.is_main:
        folder.take()
    with exit_on_user_error(ranks, speaks=ranks.is_main):
        tokenizer = load_tokenizer(config, plan.source)
    if ranks.local_rank == 0:
        tokenize(config, tokenizer, ranks)  # the other ranks of the host wait for the process group meanwhile
    take_device(ranks)
    deepspeed.init_distributed(timeout=PREPARATION_TIMEOUT)
    dist.barrier()
    datasets = tokenize(config, tokenizer, ranks, log=False)  # finds it done
    if plan.resumable is not None:
        plan = take_up(plan, choose_whole(plan.resumable, lambda text: say(ranks, text)), config)
    horizon, start = agree_on_horizon(config, plan, datasets, ranks)
    say(ranks, f"{plan.layout.describe()}\nlayers a stage: {_sizes(plan.bounds)}; steps {start.step} to {horizon.last_step} of {horizon.total_steps}")

    module = StageModule(
        plan.layers, plan.bounds, plan.source, DTYPES[config.precision], config.activation_checkpoint_interval, plan.adapter, config.freeze
    )
    engine = initialize_engine(module, config, plan.layout)
    if plan.resume_from is not None:
        load_checkpoint(engine, plan.resume_from, start)
    train_loader, eval_loader = build_loaders(config, plan.layout, datasets, horizon, module, tokenizer, ranks)
    reporters: list[Reporter] = []
    if ranks.is_main:
        if config.overwrite_output_dir:
            folder.clear()  # only now: a run that could not start has deleted nothing
        prepare_folder(config, plan.source, tokenizer, folder, plan.adapter)
        run_config = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        reporters = build_reporters(config.logger, folder.path, run_config, start.step, horizon.last_step)

    loop = TrainingLoop(engine, train_loader, eval_loader, config, horizon, start, folder, reporters)
    state = loop.run()
    for reporter in reporters:
        reporter.close()
    if loop.signum:
        say(ranks, f"stopped by {signal.Signals(loop.signum).name} at step {state.step}; go on with resume=latest")
    elif ranks.is_main:
        export(plan, folder)
        folder.write_completed({"step": state.step, "num_tokens": state.num_tokens, **(loop.last_eval or {})})
        exported = "Hugging Face model" if plan.adapter is None else "peft adapter"
        say(ranks, f"done: {state.step} steps; checkpoint in {folder.checkpoints}, {exported} in {folder.export}")
    dist.barrier()
    folder.release()
    return loop.signum


def take_up(plan: CheckedRun, step_dir: Path, config: RunConfig) -> CheckedRun:
    """The plan with the weights of the checkpoint `step_dir`: the model's, or the adapter's beside the model it started from."""
    if plan.adapter is not None:
        adapter = dataclasses.replace(plan.adapter, tensors=read_trained_adapter(step_dir, plan.layers))
        return dataclasses.replace(plan, resume_from=step_dir, adapter=adapter)
    return dataclasses.replace(plan, resume_from=step_dir, source=open_weights(str(step_dir), config.trust_remote_code))


def export(plan: CheckedRun, folder: RunFolder) -> None:
    """What was trained, for others to load: a Hugging Face model, or a peft folder."""
    if plan.adapter is not None:
        export_adapter(folder.checkpoints, plan.layers, folder.export)
    else:
        export_hugging_face(open_weights(str(folder.checkpoints)), folder.export, overwrite=True)


def prepare_folder(
    config: RunConfig, source: WeightSource, tokenizer: PreTrainedTokenizerBase, folder: RunFolder, adapter: Adapter | None
) -> None:
    """What lies beside the checkpoints: the run's config, and the model's config.json and tokenizer. Main rank only."""
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.checkpoints)
    tokenizer.save_pretrained(folder.checkpoints)
    OmegaConf.save(OmegaConf.structured(config), folder.path / "config.yaml")
    if adapter is not None:
        save_adapter_config(adapter, folder.checkpoints)
    if source.path.resolve() == folder.checkpoints.resolve():  # resumed: it is all there
        return
    source.config.save_pretrained(folder.checkpoints)
    generation_config = source.path / "generation_config.json"
    if generation_config.is_file():
        shutil.copyfile(generation_config, folder.checkpoints / "generation_config.json")


def load_tokenizer(config: RunConfig, source: WeightSource) -> PreTrainedTokenizerBase:
    """Raises UserError when there is none, or when it has more tokens than the embedding has rows."""
    path = config.tokenizer_name_or_path or str(source.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer in {path} ({str(error).splitlines()[0]}); set tokenizer_name_or_path") from None
    if len(tokenizer) > source.config.vocab_size:
        raise UserError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, the embedding {source.config.vocab_size} rows; "
            "grow it with convert2ckpt.py --add_special_tokens, or give the tokenizer of this model"
        )
    return tokenizer


def tokenize(config: RunConfig, tokenizer: PreTrainedTokenizerBase, ranks: Ranks, log: bool = True) -> dict[str, Path]:
    """Key of the files -> folder of the tokenized samples, which whoever comes first makes."""
    tell = (lambda text: say(ranks, text)) if log and ranks.is_main else None
    return {key: prepare_file(config, key, tokenizer, tell) for key in ("train_file", "eval_file") if getattr(config, key) is not None}


def take_device(ranks: Ranks) -> None:
    """This rank's GPU; without one, its share of the host's cores, or the ranks fight over them."""
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(ranks.local_rank)
        return
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks.local_size)
    torch.set_num_threads(share)
    if share * ranks.local_size <= len(cores):
        os.sched_setaffinity(0, cores[ranks.local_rank * share : (ranks.local_rank + 1) * share])


def agree_on_horizon(config: RunConfig, plan: CheckedRun, datasets: dict[str, Path], ranks: Ranks) -> tuple[Horizon, TrainerState]:
    """How long the run is and where it starts: computed by rank 0, told to the others."""
    agreed: list[Any] = [None]
    if ranks.is_main:
        agreed = [compute_horizon(config, plan, datasets)]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def compute_horizon(config: RunConfig, plan: CheckedRun, datasets: dict[str, Path]) -> tuple[Horizon, TrainerState]:
    layout = plan.layout
    num_samples = count_rows(datasets["train_file"], build_row_plan(config, "train_file"))
    unit = "packed rows" if config.data.packing else "samples"
    steps_per_epoch = GlobalOrder(num_samples, layout.global_batch_size, config.seed, unit).steps_per_epoch
    total_steps = config.max_steps or max(1, round(config.num_train_epochs * steps_per_epoch))
    start = TrainerState(
        0, 0, layout.num_stages, layout.dp_size, layout.global_batch_size, layout.micro_batch_size, num_samples, total_steps, config.seed,
        config.precision.value, config.optimizer.name.value,
    )  # fmt: skip
    if plan.resume_from is not None:
        saved = read_state(plan.resume_from)
        for difference in check_resumable(saved, start, plan.resume_from, config.resume_allow_changes):
            print(f"resume: {difference}", file=sys.__stderr__, flush=True)
        start = dataclasses.replace(start, step=saved.step, num_tokens=saved.num_tokens)
    last_step = total_steps if config.stop_after_steps is None else min(total_steps, start.step + config.stop_after_steps)
    unfinished = not RunFolder(config.output_dir).export.exists()  # the run died between its last save and the end of the export
    if start.step > last_step or start.step == last_step and not unfinished:
        raise UserError(f"resume: {plan.resume_from} stands at step {start.step} of {total_steps}, there is nothing left; raise max_steps")
    horizon = Horizon(num_samples, total_steps, last_step)
    if "eval_file" in datasets:
        eval_rows = count_rows(datasets["eval_file"], build_row_plan(config, "eval_file"))
        horizon = dataclasses.replace(horizon, eval_samples=eval_rows, eval_targets=load_summary(datasets["eval_file"]).num_targets)
    return horizon, start


def build_loaders(
    config: RunConfig, layout: Layout, datasets: dict[str, Path], horizon: Horizon, module: StageModule,
    tokenizer: PreTrainedTokenizerBase, ranks: Ranks,
) -> tuple[Any, Any]:  # fmt: skip
    """The training and evaluation loaders of this rank's stage; placeholders on a stage that reads nothing."""
    options = loaders.LoaderOptions(
        reads_inputs=module.has_first_layer,
        reads_labels=module.has_loss,
        dp_rank=layout.dp_rank(ranks.rank),
        dp_size=layout.dp_size,
        micro_batch_size=layout.micro_batch_size,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        pad_to=loaders.PadTo(config.data.pad_to.value),
        row_plan=build_row_plan(config, "train_file"),
        num_workers=config.num_workers,
        pin_memory=get_accelerator().device_name() == "cuda",
    )
    order = GlobalOrder(horizon.num_samples, layout.global_batch_size, config.seed)
    train_loader = loaders.build_train_loader(datasets["train_file"], options, order, layout.gradient_accumulation_steps)
    if "eval_file" not in datasets:
        return train_loader, None
    options = dataclasses.replace(options, row_plan=build_row_plan(config, "eval_file"))
    return train_loader, loaders.build_eval_loader(datasets["eval_file"], options, horizon.eval_samples)


def _sizes(bounds: list[int]) -> list[int]:
    return [stop - start for start, stop in zip(bounds, bounds[1:])]
