"""The one assembly: from the facts of a setup to this rank's stage, its engine and its loaders.

Runs, evaluations, tests and benchmarks all come here, with all options, so what is proven is what runs. Nothing else
constructs a `StageModule` or starts an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from data.loading.loader import LoaderOptions
from data.loading.teacher import teacher_path
from models.layers.flash_kernels import use_flash_attention_3
from models.layers.fused_kernels import describe_fused, find_obstacle
from models.losses.distill_loss import TeacherHead, TeacherLoss
from models.weights.source import WeightSource
from training.config.precision import DTYPES
from training.config.schema import FlashKernels, FusedKernels, Offload, RunConfig
from training.distributed.p2p import count_spared
from training.distributed.process import broadcast_from_main, current_device, has_accelerator
from training.distributed.ranks import Ranks
from training.engine.engine import Engine
from training.engine.start import start_engine
from training.inputs import loaders
from training.inputs.datasets import build_row_plan
from training.inputs.loaders import RankData
from training.inputs.step_budget import EvalSize, StepBudget
from training.objectives.objective import LastStage
from training.pipeline.activation_checkpoint import KEEP_ALL
from training.pipeline.module import (
    Kernels,
    StageModule,
    StageOptions,
    StageRanks,
    join_context_parallel,
    join_expert_parallel,
    join_tensor_parallel,
)
from training.pipeline.schedules import build_schedule
from training.pipeline.weight_sharding import WeightSharding
from training.resolution.user_loss import build_run_loss
from training.scoring.first_pass import OnlineTeacher, build_first_pass
from training.scoring.reference_logprobs import compute_model_id, prepare_reference
from training.scoring.teacher import TeacherTask, check_visible, find_missing, score
from training.setup import Run, RunSetup


def build_stage(run: Run, trains: bool = True) -> StageModule:
    """Return this rank's stage, its weights loaded. All ranks call it, in a process group.

    trains: False for a stage that is only evaluated. Raises UserError when a tensor is missing or has a wrong shape.
    """
    config, setup, ranks = run.config, run.setup, run.ranks
    ranks_of_stage = StageRanks(
        topology=setup.layout.topology,
        schedule=build_schedule(setup.layout),
        parallel=join_tensor_parallel(setup.layout.topology, ranks.rank, config.sequence_parallel),
        sequence_part=join_context_parallel(setup.layout.topology, ranks.rank, setup.parts),
        expert_parallel=join_expert_parallel(setup.layout.topology, ranks.rank),
    )
    kernels = choose_kernels(config, setup.architecture)
    if kernels.flash_attention_3:
        spared = count_spared(setup.layout, setup.parts.is_ring)
        use_flash_attention_3(spared)
        ranks.say(f"flash_kernels=fa3: FlashAttention-3; {spared} multiprocessors are left to transfers")
    parallel, sequence_part = ranks_of_stage.parallel, ranks_of_stage.sequence_part
    options = StageOptions(
        kernels=kernels,
        checkpointing=setup.checkpointing if trains else KEEP_ALL,
        adapter=setup.adapter,
        freeze=config.freeze if trains else (),
        routers=setup.routers,
        neftune_noise_alpha=config.neftune_noise_alpha,
        weight_sharding=_choose_weight_sharding(config) if trains else None,
    )
    loss = build_run_loss(config, LastStage(setup.architecture, parallel, sequence_part))
    with ranks.phase("building the stages and loading their weights"):
        module = StageModule(setup.layers, setup.bounds, setup.source, loss, ranks_of_stage, options)
    if trains and module.deferred_share is not None:
        ranks.say(
            f"schedule={config.schedule}: {module.deferred_share:.0%} of the trained matrices' gradients can wait"
        )
    if config.fused_kernels is FusedKernels.auto:
        ranks.say(f"fused_kernels=auto: {describe_fused(module.fused, find_obstacle(current_device()))}")
    return module


def choose_kernels(config: RunConfig, architecture: PretrainedConfig) -> Kernels:
    """Return how the stages of a run compute on this rank's device."""
    return Kernels(
        dtype=DTYPES[config.precision],
        attention=architecture._attn_implementation,
        flash_attention_3=config.flash_kernels is FlashKernels.fa3,
        compiles=config.compile,
        fuses=config.fused_kernels is FusedKernels.auto and find_obstacle(current_device()) is None,
    )


def _choose_weight_sharding(config: RunConfig) -> WeightSharding | None:
    if not config.shards_weights:
        return None
    return WeightSharding(config.offload_parameters is Offload.cpu, pins=has_accelerator())


def build_engine(run: Run, trains: bool = True) -> Engine:
    """Start the engine of this rank's stage; see `build_stage`."""
    stage = build_stage(run, trains)
    with run.ranks.phase("starting the engine"):
        return start_engine(stage, run.config, run.setup.layout, trains)


def build_loaders(
    run: Run, engine: Engine, data: RankData, budget: StepBudget, teacher: OnlineTeacher | None = None
) -> loaders.Loaders:
    """Build the training and evaluation loaders of this rank's stage, and the pass that comes before each step. All
    ranks call it: the engine computes what a loader needs of the reference model, unless it is cached.
    """
    reference = _prepare_reference(run.setup, engine, data)
    with data.ranks.phase("opening the data"):
        built = loaders.build_loaders(
            run.config, engine.module, data, budget, reference, _read_as_teacher(run.setup, data, teacher)
        )
    return dataclasses.replace(built, first_pass=build_first_pass(engine, run.config, teacher))


def build_eval_loaders(
    run: Run, engine: Engine, data: RankData, sizes: Mapping[str, EvalSize], teacher: OnlineTeacher | None = None
) -> dict[str, Any]:
    """Build the loaders of an evaluation only; see `build_loaders`. sizes: by the names of the evaluation files."""
    reference = _prepare_reference(run.setup, engine, data)
    as_teacher = _read_as_teacher(run.setup, data, teacher)
    return loaders.build_eval_loaders(run.config, engine.module, data, sizes, reference, as_teacher)


def _read_as_teacher(
    setup: RunSetup, data: RankData, teacher: OnlineTeacher | None
) -> Callable[[str], LoaderOptions] | None:
    """Return how the teacher's stage on this rank reads the files of a key; None without one in memory."""
    if teacher is None or setup.teacher is None:
        return None
    config, layout, module = setup.teacher.config, setup.teacher.layout, teacher.engine.module
    return lambda key: loaders.build_options(config, module, dataclasses.replace(data, layout=layout), key)


def build_online_teacher(run: Run) -> OnlineTeacher | None:
    """Return the teacher of a distillation that stays in memory (`distill.online`); None without one. All ranks call
    it, before the student is built. Raises UserError."""
    teacher, keys = run.teacher, run.config.distill
    if teacher is None or not keys.online:
        return None
    architecture = teacher.setup.architecture
    run.ranks.say(f"teacher: {architecture.model_type} from {teacher.setup.source.path}, next to the student")
    engine = build_engine(teacher, trains=False)
    num_tokens = min(run.setup.architecture.vocab_size, architecture.vocab_size)
    parallel = engine.module.parallel
    return OnlineTeacher(engine, TeacherHead(architecture, keys.temperature, keys.top_k, num_tokens, parallel))


def prepare_teacher(run: Run, data: RankData) -> RankData:
    """Return `data` with what the teacher of a distillation has written; where that is missing, the teacher is built,
    scores the data, and is gone before the student is built. All ranks call it. Raises UserError."""
    config, setup, teacher = run.config, run.setup, run.setup.teacher
    if teacher is None or config.distill.online:
        return data
    top_k, temperature = config.distill.top_k, config.distill.temperature
    assert top_k is not None
    num_tokens = min(setup.architecture.vocab_size, teacher.architecture.vocab_size)
    model_id = _identify(teacher.source, teacher, data.ranks)

    def list_tasks() -> list[TeacherTask]:
        tasks = []
        for key, path in data.datasets.items():
            plan = build_row_plan(config, key)
            rows = "" if plan.is_trivial else plan.folder(path).name
            folder = teacher_path(path, rows, f"{model_id}-{num_tokens}", top_k, temperature)
            tasks.append(TeacherTask(key, path, plan, folder))
        return tasks

    tasks = broadcast_from_main(list_tasks, data.ranks)
    missing = find_missing(tasks, top_k, data.ranks)
    if missing:
        data.ranks.say(f"teacher: {teacher.architecture.model_type} from {teacher.source.path}")
        engine = build_engine(dataclasses.replace(run, setup=teacher), trains=False)
        options = loaders.build_options(
            teacher.config, engine.module, dataclasses.replace(data, layout=teacher.layout), missing[0].key
        )
        loss = TeacherLoss(teacher.architecture, temperature, top_k, num_tokens, engine.module.parallel)
        for task in missing:
            score(engine, task, options, loss, top_k, data.ranks)
        _release(engine.module)
    check_visible(tasks)
    return dataclasses.replace(data, teacher={task.key: task.folder for task in tasks})


def _release(module: StageModule) -> None:
    """Free the memory of a stage, which DeepSpeed's hooks refer to in circles."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.new_empty(0)
    if has_accelerator():
        torch.cuda.empty_cache()


def _identify(source: WeightSource, setup: RunSetup, ranks: Ranks) -> str:
    """Return the hash by which what `source` computes is found again. setup: of the model that computes it."""
    quantized = [] if setup.adapter is None else setup.adapter.list_quantized(setup.layers)
    return compute_model_id(source, setup.config, choose_kernels(setup.config, setup.architecture), quantized, ranks)


def _prepare_reference(setup: RunSetup, engine: Engine, data: RankData) -> dict[str, Path]:
    if setup.reference is None:
        return {}
    config = setup.config
    key = next(iter(data.datasets))  # rows are scored one by one, so what is particular to a file does not count
    options = loaders.build_options(config, engine.module, data, key)
    datasets = loaders.list_scored(config, data.datasets)
    return prepare_reference(
        engine,
        _identify(setup.reference, setup, data.ranks),
        datasets,
        options=options,
        reference=setup.reference,
        own=setup.source,
        architecture=setup.architecture,
        ranks=data.ranks,
    )
