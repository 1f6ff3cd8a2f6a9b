"""The checks of a run before a process group exists, and the facts that they find.

`check_run` is for a run; `build_setup` for a caller that has a source of weights already, such as a benchmark.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.loading.row_lengths import RowLengths, measure_rows
from errors import UserError
from models.adapters.folder import read_fingerprint
from models.adapters.options import AdapterName, starts_from_base
from models.layers.flash_kernels import find_obstacle
from models.layers.fused_kernels import find_triton_obstacle
from models.parallel.shard import find_length_multiple
from models.storage.hub import describe_place
from models.weights.config_file import parse_config
from models.weights.edits import edit_weights
from models.weights.fingerprint import check_base, fingerprint_as_1_1, fingerprint_weights, is_of_1_1
from models.weights.further import choose_further
from models.weights.new_head import choose_head
from models.weights.random_weights import RandomWeights
from models.weights.resized_vocab import ResizedVocabulary
from models.weights.source import WeightSource
from models.weights.sources import open_beside_adapter, open_weights
from models.weights.trained_adapter import check_same_adapter, read_trained_adapter
from models.weights.vocabulary import fingerprint_tokenizer, resize_config
from training.checkpoint.master_weights import MasterWeights
from training.checkpoint.resume import Resumable, check_evaluated, choose_resume, choose_whole, find_resume
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import Identity, read_state
from training.checkpoint.timeline import find_abandoned
from training.config.incompatible import CheckedConfig
from training.config.schema import FlashKernels, FusedKernels, Init, Offload, Precision, RunConfig
from training.config.sources import list_file_keys, parse_key, read_files
from training.config.validate import check_deepspeed_version
from training.costs.hardware import GIB, Machine
from training.distributed.process import (
    broadcast_from_main,
    describe_device,
    has_accelerator,
    measure_device_memory,
)
from training.distributed.ranks import Ranks
from training.engine.deepspeed_internals import check_internals
from training.inputs.datasets import build_order, build_row_plan, complete_labels, count_added_rows
from training.layer_times import LayerTimes
from training.objectives.auxiliary import AuxiliaryModel
from training.objectives.registry import find_auxiliary
from training.optim.optimizer import compiles_update
from training.planner.prediction import Prediction, find_machine, predict, time_layers
from training.resolution.packages import check_packages, has_package
from training.resolution.readers import check_read
from training.resolution.resolve import ResolvedRun, check_keys, resolve
from training.resolution.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSetup(ResolvedRun):
    """A resolved run, and what it reads: everything that is known before a process group exists.

    source: of the weights. resumable: what `resume_from` is chosen from. reference: of an objective that needs one:
    what the run has started from, or will. auxiliary: a frozen model that it reads besides; None without one. unread:
    the keys that were given and that this run does not read, in words.
    """

    source: WeightSource
    resume_from: Path | None = None
    resumable: Resumable | None = None
    reference: WeightSource | None = None
    auxiliary: AuxiliarySetup | None = None
    unread: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class AuxiliarySetup:
    """A frozen model that a run reads besides the one that it trains. setup: of its passes over the same data."""

    model: AuxiliaryModel
    setup: RunSetup


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as one of its ranks has it."""

    ranks: Ranks
    folder: RunFolder  # `output_dir`
    setup: RunSetup

    @classmethod
    def of(cls, setup: RunSetup, ranks: Ranks) -> Run:
        return cls(ranks, RunFolder(setup.config.output_dir), setup)

    @property
    def config(self) -> RunConfig:
        """The config, completed by what the checks have found."""
        return self.setup.config


def check_run(config: RunConfig, ranks: Ranks, given: Collection[str] = ()) -> RunSetup:
    """Return the setup of a run, the same on all ranks. given: see `check_read`.

    Raises UserError for all that can be known to be wrong before a process group exists.
    """
    check_deepspeed_version()
    check_internals([*_list_optional(config)])
    check_keys(config, has_accelerator())
    check_packages(config)
    if config.compile:
        check_compiler(config, has_accelerator())
    folder = RunFolder(config.output_dir)
    resume = choose_resume(config.resume, folder)
    if config.evaluate_only and config.resume is not None:
        resume = resume or "latest"  # which is refused where there is none: the model alone was not asked for
    if resume not in (config.resume, "latest", None):
        ranks.say(f"resume=auto: the run in {folder.path} was to start from {resume}, and has saved nothing since")
        config = dataclasses.replace(config, resume=resume)
    folder.check_usable(config.resume is not None or config.evaluate_only, config.overwrite_output_dir)
    unread = check_read(CheckedConfig(config), given, continues=resume is not None)
    resumable = find_resume(resume, folder.checkpoints, config.trust_checkpoint) if resume else None
    resume_from = resumable.candidates[0] if resumable else None
    source = open_source(config, resume_from)
    setup = build_setup(config, source, ranks)
    check_flash_kernels(setup)
    if setup.adapter is not None or not config.evaluate_only:  # without one, that of a checkpoint is merged in
        check_same_adapter(setup.adapter, resume_from, _find_saved_init(resume_from))
    if setup.adapter is not None and config.evaluate_only and resume_from is not None:
        check_evaluated(read_state(resume_from), setup.adapter.in_4bit, config.resume_allow_changes)
    if setup.adapter is not None and not config.evaluate_only and resume_from is None:
        check_own_base(config, source)
    reference = open_reference(setup, resume_from)
    setup = dataclasses.replace(setup, resume_from=resume_from, resumable=resumable, reference=reference, unread=unread)
    if not config.evaluate_only and not config.overwrite_output_dir:
        find_abandoned(folder, resume_from).check_inputs(_list_inputs(setup))
    if config.overwrite_output_dir or not config.evaluate_only:
        folder.check_keeps(_list_inputs(setup), config.overwrite_output_dir)
    return setup


def check_own_base(config: RunConfig, source: WeightSource) -> None:
    """Raise UserError where `adapter.name_or_path` is the export of a run with another base model than `source`."""
    if not config.adapter.name_or_path or config.trust_checkpoint:
        return
    path = Path(config.adapter.name_or_path).expanduser()
    if (expected := read_fingerprint(path)) is not None:
        check_base(source, expected, path)


def _list_optional(config: RunConfig) -> Iterator[str]:
    """Yield the optional packages that a run imports."""
    if config.adapter.name is AdapterName.lora:
        yield "peft"
    if config.fused_kernels is FusedKernels.auto and has_accelerator() and has_package("liger_kernel"):
        yield "liger-kernel"


def _list_inputs(setup: RunSetup) -> Iterator[tuple[str, Path]]:
    """Yield the paths that a run reads, each with its key, except the checkpoint from which it continues in its own
    folder. The base model of an adapter may be in another folder."""
    config, sources = setup.config, [("model_name_or_path", setup.reference)]
    if setup.resume_from is None or setup.adapter is not None:
        sources.append(("model_name_or_path", setup.source))
    if setup.auxiliary is not None:
        sources.append((setup.auxiliary.model.key, setup.auxiliary.setup.source))
    for key, source in sources:
        if source is not None:
            yield key, source.path
            yield from ((f"a file of {key}", file) for file in source.files())
    for key, path in {
        "tokenizer_name_or_path": config.tokenizer_name_or_path,
        "adapter.name_or_path": config.adapter.name_or_path if config.adapter.name is AdapterName.lora else None,
        "data.chat_template": config.data.chat_template,
    }.items():
        if path:
            yield key, Path(path).expanduser()
    for key in {"train_file": None} | dict.fromkeys(list_file_keys(config)):
        for entry in parse_key(config, key).entries if read_files(config, key) else ():
            yield from ((key, Path(file)) for file in glob.glob(os.path.expanduser(entry), recursive=True))


def build_setup(config: RunConfig, source: WeightSource, ranks: Ranks) -> RunSetup:
    """Return the setup of a run that starts from `source`; its config names the labels. Raises UserError."""
    setup = _build_own_setup(config, source, find_target(config, ranks))
    return dataclasses.replace(setup, auxiliary=open_auxiliary(setup, ranks))


def _build_own_setup(config: RunConfig, source: WeightSource, target: Target) -> RunSetup:
    config = complete_labels(config, source.config)
    resolved = resolve(config, source, target)
    edits = choose_further(source, trains=config.mtp.loss_coef > 0)
    if (head := resolved.objective.head) is not None:
        edits += choose_head(source, head, resolved.objective.name_labels(config.data), config.seed)
    source = edit_weights(source, edits)
    source.check_complete(resolved.layers)
    return RunSetup(
        config=resolved.config,
        objective=resolved.objective,
        architecture=resolved.architecture,
        wrapper=resolved.wrapper,
        layers=resolved.layers,
        parts=resolved.parts,
        adapter=resolved.adapter,
        routers=resolved.routers,
        callbacks=resolved.callbacks,
        counts=resolved.counts,
        layout=resolved.layout,
        bounds=resolved.bounds,
        recomputation=resolved.recomputation,
        source=source,
        reference=source if resolved.objective.scored else None,
    )


def open_auxiliary(setup: RunSetup, ranks: Ranks) -> AuxiliarySetup | None:
    """Return the frozen model that a run reads besides its own, with the setup of its passes; None without one.

    Raises UserError where it cannot be opened, or cannot run on the run's ranks.
    """
    config, layout, model = setup.config, setup.layout, find_auxiliary(setup.config)
    if model is None:
        return None
    own = model.derive(config, layout.micro_batch_size, layout.gradient_accumulation_steps)
    with model.naming(config):
        source = open_weights(own.model_name_or_path, own.trust_remote_code, own.trust_checkpoint)
        opened = _build_own_setup(own, source, Target(ranks.world_size, has_accelerator()))
    model.check_sizes(config, setup.architecture.vocab_size, opened.architecture.vocab_size)
    return AuxiliarySetup(model, opened)


def find_target(config: RunConfig, ranks: Ranks) -> Target:
    """Return where this run takes place. Without a GPU nothing limits a stage, as a host's memory is shared, nor does
    what training would keep limit an evaluation."""
    machine = find_run_machine(config, ranks) if has_accelerator() else None
    return Target(ranks.world_size, has_accelerator(), machine, fills=not config.evaluate_only)


def open_source(config: RunConfig, resume_from: Path | None) -> WeightSource:
    """Return the source of this run's weights, with a row for each token that it adds. Raises UserError where the path
    is not a source."""
    if config.init is Init.random and resume_from is None:
        rows = count_added_rows(config, parse_config(config.model, Path("conf/model")), "")
        fields = config.model | ({"vocab_size": rows} if rows else {})
        return RandomWeights(parse_config(fields, Path("conf/model")), config.seed)
    trust = config.trust_remote_code, config.trust_checkpoint
    if (folder := _find_evaluated(config, resume_from)) is not None:
        return _resize(config, open_beside_adapter(weights_path(config), folder, resume_from, *trust))
    return _open_resized(config, _source_path(config, resume_from))


def _find_evaluated(config: RunConfig, resume_from: Path | None) -> Path | None:
    """Return the folder of the adapter that an evaluation puts on the layers; None where it merges one or has none, and
    for a run that trains."""
    if not config.evaluate_only or config.adapter.name is AdapterName.none:
        return None
    if resume_from is not None:
        return resume_from.parent
    path = config.adapter.name_or_path
    return Path(path).expanduser() if path else None


def _open_resized(config: RunConfig, path: str) -> WeightSource:
    return _resize(config, open_weights(path, config.trust_remote_code, config.trust_checkpoint))


def _resize(config: RunConfig, source: WeightSource) -> WeightSource:
    """Return the weights with a row for each token that the run adds."""
    rows = count_added_rows(config, source.config, str(source.path))
    return edit_weights(source, [ResizedVocabulary(resize_config(source, rows))] if rows else [])


def open_reference(setup: RunSetup, resume_from: Path | None) -> WeightSource | None:
    """Return the model at `model_name_or_path`, for an objective that needs it in addition to what a run trains; None
    for another.

    Raises UserError when it is gone.
    """
    config = setup.config
    if not setup.objective.scored:
        return None
    if _source_path(config, resume_from) == weights_path(config):
        return setup.source
    reference = _open_resized(config, weights_path(config))
    reference.check_complete(setup.layers)
    return reference


def load_resumed(setup: RunSetup, say: Callable[[str], None]) -> RunSetup:
    """Return the setup with the weights of the best whole checkpoint to resume from: the model's, or the adapter's with
    the model it started from; unchanged for a new run. All ranks call it, in a process group.

    say: reports what is wrong with better checkpoints. Raises UserError when none is whole.
    """
    config = setup.config
    if setup.resumable is None:
        return setup
    step_dir = choose_whole(setup.resumable, say)
    continues_in_fp32 = config.precision is Precision.fp32 and not config.evaluate_only
    starts = starts_from_base(_find_saved_init(step_dir))
    masters = MasterWeights(step_dir, starts) if continues_in_fp32 else None
    if setup.adapter is not None:
        restore = None if masters is None else masters.restore
        tensors = read_trained_adapter(step_dir, setup.layers, config.trust_checkpoint, restore)
        adapter = dataclasses.replace(setup.adapter, tensors=tensors)
        return dataclasses.replace(setup, resume_from=step_dir, adapter=adapter)
    source = edit_weights(_open_resized(config, str(step_dir)), [masters] if masters else [])
    return dataclasses.replace(setup, resume_from=step_dir, source=source)


def describe_identity(setup: RunSetup, tokenizer: PreTrainedTokenizerBase) -> dict[str, Identity]:
    """Return what this run reads, by name, known by content: the tokenizer, the reference model, and the base model
    unless the run continues from weights of its own."""
    sources = {"reference model": setup.reference}
    if setup.auxiliary is not None:
        sources[setup.auxiliary.model.name] = setup.auxiliary.setup.source
    if setup.resume_from is None or setup.adapter is not None:
        sources["base model"] = setup.source
    saved = {} if setup.resume_from is None else read_state(setup.resume_from).identity
    known: dict[int, str] = {}  # by the source's id: the reference is often the base
    found = {"tokenizer": Identity(fingerprint_tokenizer(tokenizer), str(tokenizer.name_or_path))}
    for name, source in sources.items():
        if source is None or not source.files():  # random ones
            continue
        if id(source) not in known:
            known[id(source)] = fingerprint_weights(source)
        is_older = name in saved and is_of_1_1(saved[name].fingerprint)
        as_1_1 = fingerprint_as_1_1(source) if is_older else ""
        found[name] = Identity(known[id(source)], describe_place(source.path), as_1_1)
    return found


def find_run_machine(config: RunConfig, ranks: Ranks) -> Machine | None:
    """Return the description of this machine, measured where it has to be; None when no file describes it. GPUs of one
    name differ in memory (laptops, parts of a GPU): what there is counts."""
    machine = find_machine(config.hardware, describe_device(), config, ranks.local_size)
    memory = measure_device_memory()
    if machine is None or memory is None:
        return machine
    return dataclasses.replace(machine, memory=min(machine.memory, memory / GIB))


def predict_run(
    run: Run, machine: Machine | None, *, train_path: Path | None, num_samples: int, steps: range
) -> Prediction | None:
    """Return the prediction of the run on the main rank, None on the others. All ranks call it, since a CPU's layers
    are timed.

    machine: on the main rank; None when it is unknown, which is reported. train_path: the tokenized folder of
    `train_file`; None where it is streamed, and rows are taken to be full. steps: those of the run.
    """
    config, setup, ranks, layout = run.config, run.setup, run.ranks, run.setup.layout
    if train_path is None:
        lengths = RowLengths(config.max_seq_length, config.max_seq_length, config.max_seq_length)
    else:
        order = build_order(config, train_path, num_samples, layout.global_batch_size)
        plan = build_row_plan(config, "train_file")
        multiple = find_length_multiple(setup.parts, config.sequence_parallel_size)
        lengths = broadcast_from_main(
            lambda: measure_rows(train_path, plan, order, steps, config.data.pad_to, multiple), ranks
        )
    times: list[LayerTimes] = []
    is_whole = layout.tensor_parallel_size == layout.context_parallel_size == 1
    is_drawn = setup.adapter is None or setup.adapter.kept is None  # layers that can be drawn at random
    if not has_accelerator() and is_whole and is_drawn:
        times = time_layers(setup, lengths, ranks)
    if not ranks.is_main:
        return None
    if machine is None:
        ranks.say(f"no file of conf/hardware describes {describe_device()!r}; MFU is left out")
    other = setup.auxiliary
    in_memory = other.setup if other is not None and other.model.is_resident(config) else None
    return predict(setup, machine, lengths, times, in_memory)


def _find_saved_init(resume_from: Path | None) -> str:
    """Return `adapter.init_lora_weights` of the run that saved a checkpoint, where that starts from the base weights,
    else `true`; of one whose state is damaged too, in place of which another is chosen later."""
    try:
        return "true" if resume_from is None else read_state(resume_from).data.get("adapter.init_lora_weights", "true")
    except UserError:
        return "true"


def _source_path(config: RunConfig, resume_from: Path | None) -> str:
    """Return the place of this run's weights. The checkpoint of a LoRA run holds the adapter alone: with adapter=lora
    it is put on the model that the run started from. An evaluation with adapter=none has it merged in."""
    adds_adapter = config.adapter.name is AdapterName.lora
    return weights_path(config) if resume_from is None or adds_adapter else str(resume_from)


def weights_path(config: RunConfig) -> str:
    """Return `model_name_or_path`. Raises UserError for the demo's model before `make demo`."""
    path = config.model_name_or_path
    if path.startswith("outputs/demo/") and not Path(path).exists():
        raise UserError(
            f"model_name_or_path={path} is not there yet: run `make demo` once, it makes the demo's model and data"
        )
    return path


def check_flash_kernels(run: ResolvedRun) -> None:
    """Raises UserError where `flash_kernels` cannot run on the GPU of this process."""
    obstacle = find_obstacle(run.architecture) if run.config.flash_kernels is FlashKernels.fa3 else None
    if obstacle is not None:
        raise UserError(f"flash_kernels=fa3 cannot be used here: {obstacle}; give flash_kernels=torch")


def check_compiler(config: RunConfig, has_accelerator: bool) -> None:
    """Raise UserError where `torch.compile` cannot make code: for a GPU, or for a CPU, which may have the optimizer's
    update."""
    updates_on_host = config.offload_optimizer is Offload.cpu and compiles_update(config, has_accelerator)
    compiler = os.environ.get("CXX", "g++")  # as torch._inductor looks for it
    if has_accelerator and (obstacle := find_triton_obstacle()) is not None:
        raise UserError(f"compile=true cannot be used here: {obstacle}; install that, or set compile=false")
    if (not has_accelerator or updates_on_host) and shutil.which(compiler) is None:
        raise UserError(
            f"compile=true needs a C++ compiler, and {compiler} is not there; install it, name another in CXX, or set "
            "compile=false"
        )
