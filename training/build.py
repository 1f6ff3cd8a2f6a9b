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

from data.encoders.kinds import find_kind
from data.loading.loader import LoaderOptions, read_singly
from data.storage.rows import RowPlan
from data.storage.scores import Scores, find_scores
from errors import UserError
from extension import load_part
from models.layers.flash_kernels import use_flash_attention_3
from models.layers.fused_kernels import describe_fused, find_obstacle, find_triton_obstacle
from models.parallel.shard import NO_TP, TensorParallel
from models.weights.source import WeightSource
from training.config.precision import DTYPES
from training.config.schema import FlashKernels, FusedKernels, Offload, Precision, RouterDtype, RunConfig
from training.distributed.p2p import count_spared
from training.distributed.process import current_device, has_accelerator, has_triton
from training.distributed.ranks import Ranks, raise_together
from training.engine.engine import Engine
from training.engine.start import start_engine
from training.inputs import loaders
from training.inputs.datasets import build_row_plan
from training.inputs.loaders import RankData
from training.inputs.step_budget import EvalSize, StepBudget
from training.objectives.objective import LastStage, Scorer
from training.optim.optimizer import compiles_update
from training.pipeline.activation_checkpoint import KEEP_ALL
from training.pipeline.compilation import keep_compiled, report_compilation
from training.pipeline.module import StageModule
from training.pipeline.preparation import Kernels, StageOptions
from training.pipeline.schedules import build_schedule
from training.pipeline.stage_ranks import join_stage_ranks
from training.pipeline.weight_sharding import WeightSharding
from training.resolution.user_loss import build_run_loss
from training.scoring.first_pass import Resident, build_first_pass
from training.scoring.scored import compute_model_id, describe_maker, find_missing, score, share
from training.scoring.scorers import hold_reference
from training.setup import Run, RunSetup


def build_stage(run: Run, trains: bool = True, resident: Resident | None = None) -> StageModule:
    """Return this rank's stage, its weights loaded. All ranks call it, in a process group.

    trains: False for a stage that is only evaluated. resident: a frozen model in memory next to it. Raises UserError
    when a tensor is missing or has a wrong shape.
    """
    config, setup, ranks = run.config, run.setup, run.ranks
    schedule = build_schedule(setup.layout)
    stage_ranks = join_stage_ranks(
        setup.layout.topology, schedule, ranks.rank, setup.parts, splits_sequence=config.sequence_parallel
    )
    kernels = choose_kernels(config, setup.architecture)
    if kernels.flash_attention_3:
        spared = count_spared(setup.layout, setup.parts.is_ring)
        use_flash_attention_3(spared)
        ranks.say(f"flash_kernels=fa3: FlashAttention-3; {spared} multiprocessors are left to transfers")
    if kernels.compiles or (trains and compiles_update(config, has_triton())):
        keep_compiled(Path(config.data.cache_dir) / "compiled")
        report_compilation()
    if trains and has_accelerator() and compiles_update(config, True) and not has_triton():
        ranks.say(f"the optimizer's update takes several passes over memory, not one: {find_triton_obstacle()}")
    options = StageOptions(
        kernels=kernels,
        checkpointing=setup.checkpointing if trains else KEEP_ALL,
        adapter=setup.adapter,
        freeze=config.freeze if trains else (),
        routers=setup.routers,
        neftune_noise_alpha=config.neftune_noise_alpha,
        weight_sharding=_choose_weight_sharding(config) if trains else None,
        sums_in_fp32=trains and config.sums_in_fp32,
    )
    head = None if resident is None else resident.head
    last = LastStage(setup.architecture, stage_ranks.parallel, stage_ranks.sequence_part, head)
    loss = build_run_loss(config, last)
    with ranks.phase("building the stages and loading their weights"):
        module = StageModule(setup.layers, setup.bounds, setup.source, loss, stage_ranks, options)
    if trains and module.deferred_share is not None:
        ranks.say(
            f"schedule={config.schedule}: {module.deferred_share:.0%} of the trained matrices' gradients can wait"
        )
    if config.fused_kernels is FusedKernels.auto:
        ranks.say(f"fused_kernels=auto: {describe_fused(module.fused, find_obstacle(current_device()))}")
    return module


def build_front(module: StageModule, run: Run) -> StageModule:
    """Return the stage with what it does with the columns of the data before its first layer (`DataKind.front`). All
    ranks call it. Raises UserError."""
    mistake = None
    if front := find_kind(run.config.data.name).front:
        try:
            load_part(front)(module, run.setup.source, current_device(), DTYPES[run.config.precision])
        except UserError as error:
            mistake = error
        raise_together(mistake)
    return module


def choose_kernels(config: RunConfig, architecture: PretrainedConfig) -> Kernels:
    """Return how the stages of a run compute on this rank's device."""
    return Kernels(
        dtype=DTYPES[config.precision],
        attention=architecture._attn_implementation,
        flash_attention_3=config.flash_kernels is FlashKernels.fa3,
        compiles=config.compile,
        fuses=config.fused_kernels is FusedKernels.auto and find_obstacle(current_device()) is None,
        fp32_routers=config.moe.router_dtype is RouterDtype.fp32,
    )


def _choose_weight_sharding(config: RunConfig) -> WeightSharding | None:
    if not config.shards_weights:
        return None
    return WeightSharding(config.offload_parameters is Offload.cpu, pins=has_accelerator())


def build_engine(run: Run, trains: bool = True, resident: Resident | None = None) -> Engine:
    """Start the engine of this rank's stage; see `build_stage`."""
    stage = build_front(build_stage(run, trains, resident), run)
    with run.ranks.phase("starting the engine"):
        return start_engine(stage, run.config, run.setup.layout, trains)


def build_loaders(
    run: Run, engine: Engine, data: RankData, budget: StepBudget, resident: Resident | None = None
) -> loaders.Loaders:
    """Build the training and evaluation loaders of this rank's stage, and the pass that comes before each step. All
    ranks call it: the engine computes what a loader needs of the reference model, unless it is cached.
    """
    data = _prepare_reference(run.setup, engine, data)
    with data.ranks.phase("opening the data"):
        built = loaders.build_loaders(
            run.config, engine.module, data, budget, _read_as_auxiliary(run.setup, data, resident)
        )
    return dataclasses.replace(built, first_pass=build_first_pass(engine, run.config, resident))


def build_eval_loaders(
    run: Run, engine: Engine, data: RankData, sizes: Mapping[str, EvalSize], resident: Resident | None = None
) -> dict[str, Any]:
    """Build the loaders of an evaluation only; see `build_loaders`. sizes: by the names of the evaluation files."""
    data = _prepare_reference(run.setup, engine, data)
    as_auxiliary = _read_as_auxiliary(run.setup, data, resident)
    return loaders.build_eval_loaders(run.config, engine.module, data, sizes, as_auxiliary)


def _read_as_auxiliary(
    setup: RunSetup, data: RankData, resident: Resident | None
) -> Callable[[str], LoaderOptions] | None:
    """Return how the stage on this rank of a frozen model in memory reads the files of a key; None without one."""
    if resident is None or setup.auxiliary is None:
        return None
    own, module = setup.auxiliary.setup, resident.engine.module
    return lambda key: loaders.build_options(own.config, module, dataclasses.replace(data, layout=own.layout), key)


def build_resident(run: Run) -> Resident | None:
    """Return the frozen model that stays in memory next to the one that is trained; None without one. All ranks call
    it, before the latter is built. Raises UserError."""
    config, other = run.config, run.setup.auxiliary
    if other is None or not other.model.is_resident(config):
        return None
    model, own = other.model, other.setup
    run.ranks.say(f"{model.name}: {own.architecture.model_type} from {own.source.path}, next to the student")
    engine = build_engine(dataclasses.replace(run, setup=own), trains=False)
    stage = LastStage(own.architecture, engine.module.ranks.parallel)
    return Resident(engine, model.build_head(config, stage, _count_shared_tokens(run.setup, own)))


def prepare_auxiliary(run: Run, data: RankData) -> RankData:
    """Return `data` with what a frozen model has scored of it (`AuxiliaryModel.scored`); where that is missing, the
    model is built, scores the data, and is gone before the one that is trained is built. All ranks call it. Raises
    UserError."""
    config, other, ranks = run.config, run.setup.auxiliary, data.ranks
    if other is None or not (columns := other.model.scored(config)):
        return data
    model, own, num_tokens = other.model, other.setup, _count_shared_tokens(run.setup, other.setup)
    model_id = f"{_identify(own.source, own, ranks)}-{num_tokens}"

    def find(key: str, path: Path) -> Scores:
        settings = model.settings(config) | describe_maker(model)
        return find_scores(model.name, path, build_row_plan(config, key), columns, model_id, **settings)

    def build_scorer(parallel: TensorParallel = NO_TP) -> Scorer:
        return model.build_scorer(config, LastStage(own.architecture, parallel), num_tokens)

    found, missing = find_missing(data.datasets, find, ranks)
    folders = [scores.folder for scores in missing.values()]
    for key, scores in found.items():
        if scores.folder not in folders and ranks.is_main:
            ranks.say(f"{model.name} of {key}: found next to the tokens, {build_scorer().describe(scores)}")
    if missing:
        ranks.say(f"{model.name}: {own.architecture.model_type} from {own.source.path}")
        engine = build_engine(dataclasses.replace(run, setup=own), trains=False)
        read = dataclasses.replace(data, layout=own.layout)
        options = loaders.build_options(own.config, engine.module, read, next(iter(missing)))
        scorer = build_scorer(engine.module.ranks.parallel)
        for key, scores in missing.items():
            score(engine, data.datasets[key], scores, options, scorer, key, ranks)
        _release(engine.module)
    shared = (share(scores, data.datasets[key], key, ranks, model.key) for key, scores in found.items())
    return data.add_scores(dict(zip(found, shared)))


def _count_shared_tokens(setup: RunSetup, other: RunSetup) -> int:
    return min(setup.architecture.vocab_size, other.architecture.vocab_size)


def _release(module: StageModule) -> None:
    """Free the memory of a stage, which DeepSpeed's hooks refer to in circles."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.new_empty(0)
    if has_accelerator():
        torch.cuda.empty_cache()


def _identify(source: WeightSource, setup: RunSetup, ranks: Ranks) -> str:
    """Return the hash by which what `source` computes is found again. setup: of the model that computes it."""
    config = setup.config
    special = [] if setup.adapter is None else list(setup.adapter.list_quantized(setup.layers))
    kernels = choose_kernels(config, setup.architecture)
    if config.precision is not Precision.fp32 and not config.shards_weights:
        kept = ((layer, name) for layer in setup.layers for name in sorted(layer.list_fp32(kernels.dtype)))
        special += [f"{layer.hf_prefix}{name} in fp32" for layer, name in kept]
    return compute_model_id(source, config, kernels, special, ranks)


def _prepare_reference(setup: RunSetup, engine: Engine, data: RankData) -> RankData:
    """Return `data` with what the reference of an objective has scored."""
    config, module, ranks = setup.config, engine.module, data.ranks
    if setup.reference is None:
        return data
    datasets, columns = loaders.list_scored(config, data.datasets), setup.objective.scored
    model_id, plan = _identify(setup.reference, setup, ranks), RowPlan(config.max_seq_length)
    made_by = describe_maker(setup.objective)
    stage = LastStage(setup.architecture, module.ranks.parallel, module.ranks.sequence_part)
    scorer = setup.objective.build_scorer(config, stage)
    found, missing = find_missing(
        datasets, lambda _, path: find_scores("reference", path, plan, columns, model_id, **made_by), ranks
    )
    if not missing:
        ranks.say(f"{scorer.what}: found next to the tokens ({model_id})")
    else:
        # Samples are scored one by one, each in a row, so what is particular to a file does not count.
        options = loaders.build_options(config, module, data, next(iter(data.datasets)))
        with hold_reference(module, setup.reference, setup.source):
            for key, scores in missing.items():
                singly = read_singly(options, datasets[key])
                score(engine, datasets[key], scores, singly, scorer, key, ranks)
    return data.add_scores({key: share(scores, datasets[key], key, ranks) for key, scores in found.items()})
