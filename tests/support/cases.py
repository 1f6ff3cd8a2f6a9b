"""A rank's part in a distributed test: the trainer's own parts around a model and a data set. And the oracle next to
it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from support.configs import compose_config
from support.tiny import find_tokenized
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.order import GlobalOrder
from data.storage.rows import count_rows
from data.storage.tokenized import TokenizedDataset
from training.config.schema import RunConfig
from training.distributed.ranks import Ranks
from training.distributed.topology import Layout
from training.inputs.datasets import build_row_plan
from training.inputs.step_budget import StepBudget

if TYPE_CHECKING:
    from training.engine.engine import Engine  # DeepSpeed is slow to import
    from training.inputs.loaders import Loaders

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A run to compare: config overrides over a base of SGD in fp32 with a large constant learning rate."""

    model: Path
    train_file: Path
    workdir: Path
    num_stages: int = 1
    world_size: int = 1
    steps: int = 5
    overrides: tuple[str, ...] = ()

    def config(self) -> RunConfig:
        """A copy, so that it can be written to."""
        return deepcopy(self.__dict__.get("_composed") or _compose(self.list_overrides()))

    def __getstate__(self) -> dict[str, Any]:
        """Returns a copy with the composed config, to send to ranks that would otherwise compose it again."""
        return {**self.__dict__, "_composed": self.config()}

    def list_overrides(self) -> tuple[str, ...]:
        return (
            f"model_name_or_path={self.model}", f"train_file={self.train_file}", f"output_dir={self.workdir}/out",
            f"data.cache_dir={self.workdir}/cache", f"num_stages={self.num_stages}", "micro_batch_size=2",
            "global_batch_size=8", "max_seq_length=256", "precision=fp32", "optimizer=sgd", "learning_rate=0.5",
            "lr_scheduler_type=constant", "warmup_ratio=0", "max_grad_norm=0",
            "activation_checkpoint_interval=0", f"max_steps={self.steps}",
            *self.overrides,
        )  # fmt: skip


@lru_cache
def _compose(overrides: tuple[str, ...]) -> RunConfig:
    """A case is asked for it several times."""
    return OmegaConf.to_object(compose_config("base", *overrides))


def build_engine(case: Case) -> tuple[Engine, Any, RunConfig, Layout, list[int]]:
    """The engine and training loader of this rank, built as a run builds them."""
    engine, loaders, config, layout, bounds = build_all(case)
    return engine, loaders.train, config, layout, bounds


def build_all(case: Case) -> tuple[Engine, Loaders, RunConfig, Layout, list[int]]:
    """As `build_engine`, with all loaders, and the pass before each step."""
    from training.build import build_engine as build
    from training.build import build_loaders, build_resident, prepare_auxiliary
    from training.inputs.datasets import load_tokenizer, tokenize
    from training.inputs.loaders import RankData
    from training.setup import Run, build_setup, open_source

    config, ranks = case.config(), this_rank()
    setup = build_setup(config, open_source(config, None), ranks)
    run, config = Run.of(setup, ranks), setup.config
    tokenizer = load_tokenizer(config, setup.source)
    datasets = tokenize(config, tokenizer)
    data = prepare_auxiliary(run, RankData(datasets, tokenizer, setup.layout, ranks))
    resident = build_resident(run)
    engine = build(run, resident=resident)
    num_rows = count_rows(datasets["train_file"], build_row_plan(config, "train_file"))
    budget = StepBudget(num_rows, case.steps, case.steps)
    loaders = build_loaders(run, engine, data, budget, resident)
    return engine, loaders, config, setup.layout, setup.bounds


def this_rank() -> Ranks:
    """Returns this rank of a process group whose ranks are all on this host."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Ranks(rank, world_size, rank, world_size)


def hf_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Hugging Face name -> weight, whole, of the layers this stage owns."""
    from training.pipeline.weight_sharding import whole_weights

    module = engine.module
    weights = {}
    for layer in module.local_layers:
        if layer.is_own:
            shards = module.ranks.read_shards(layer.module)
            with whole_weights(layer.module):
                for name, tensor in layer.module.state_dict().items():
                    whole = shards.gather(name, tensor.detach())
                    if name in shards.expert_specs:  # on one rank after the other
                        owners = range(module.ranks.expert_parallel.size)
                        found = [shards.gather_experts(name, whole, owner) for owner in owners]
                        whole = found[module.ranks.expert_parallel.rank]
                    weights[layer.spec.hf_prefix + name] = whole.detach().float().cpu().clone()
    return weights


def train_case(case: Case) -> dict[str, Any]:
    """Losses, gradient norms and final weights of a run on this rank, and what the routers report of all steps."""
    from training.inputs.step_totals import SharedTotals

    engine, loaders, _, layout, bounds = build_all(case)
    loader, first_pass = loaders.train, loaders.first_pass
    micro_batches, totals = loader.iterate(0, case.steps), SharedTotals(loader, case.steps)
    first = None if first_pass is None else loader.first.iterate(0, case.steps)
    losses, norms = [], []
    for step in range(case.steps):
        known = totals.get(step)
        if first_pass is not None:
            first_pass.prepare(first, layout.gradient_accumulation_steps, known.num_samples)
        losses.append(engine.train_step(micro_batches, step, case.steps, totals=known)[0].item())
        norms.append(float(engine.gradient_norm()))
    routers = engine.module.routers
    routed = routers.finish_interval() if routers is not None else {}
    return {"losses": losses, "norms": norms, "weights": hf_weights(engine), "bounds": bounds, "routed": routed}


def train_run(case: Case, rounds: int = 1) -> None:
    """The whole run on this rank: what `trainer_base_ds_mp.py` does once the launcher has started it.

    rounds: the number of times that its layers are timed for its plan, besides warming up. With a run's own number each
    rank would compute more micro-batches for that than in a few steps of its stage.
    """
    from training import layer_times
    from training.distributed import process
    from training.run import evaluate_only, train
    from training.setup import Run, check_run

    config = case.config()
    ranks = this_rank()
    work = evaluate_only if config.evaluate_only else train
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    run = Run.of(check_run(config, ranks), ranks)
    try:
        # The group is that of the worker, which leaves it itself
        with patch.object(layer_times, "ROUNDS", rounds), patch.object(process, "leave_process_group", lambda: None):
            work(run)
    finally:
        run.folder.release_lock()  # after an error too: the process lives on
    for signum, handler in handlers.items():  # a run that a signal has ended keeps its own, until its process ends
        signal.signal(signum, handler)
    signal.set_wakeup_fd(-1)


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the results of all ranks, which must agree on losses, norms, and weights that several of them hold."""
    merged = dict(results[0], weights={})
    for result in results:
        assert result["losses"] == merged["losses"] and result["norms"] == merged["norms"]
        for name, tensor in result["weights"].items():
            assert torch.equal(tensor, merged["weights"].setdefault(name, tensor)), name
    return merged


BuildOptimizer = Callable[[torch.nn.Module], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]]


def train_oracle(
    case: Case, model: torch.nn.Module | None = None, build_optimizer: BuildOptimizer | None = None
) -> dict[str, Any]:
    """The plain Hugging Face model in one process: each global batch is one batch, padded on the right with an
    attention mask.

    model: another one than the case's, such as it is with an adapter. build_optimizer: of another optimizer than SGD
    with one group, and of its schedule. Without them it is trained once for all layouts.
    """
    if model is None and build_optimizer is None:
        trained = _train_plain_model(replace(case, num_stages=1, world_size=1))
        return {**trained, "weights": {**trained["weights"]}}
    return _train_model(case, _load_plain_model(case) if model is None else model, build_optimizer)


@lru_cache(maxsize=32)
def _train_plain_model(case: Case) -> dict[str, Any]:
    return _train_model(case, _load_plain_model(case))


def _load_plain_model(case: Case) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(case.config().model_name_or_path, dtype=torch.float32)


def _train_model(case: Case, model: torch.nn.Module, build_optimizer: BuildOptimizer | None = None) -> dict[str, Any]:
    config = replace(case).config()
    model.train()
    pad = AutoTokenizer.from_pretrained(config.tokenizer_name_or_path or config.model_name_or_path).pad_token_id
    trained = [p for p in model.parameters() if p.requires_grad]
    scheduler = None
    if build_optimizer is None:
        optimizer = torch.optim.SGD(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
    else:
        optimizer, scheduler = build_optimizer(model)
    dataset = TokenizedDataset(find_tokenized(case.workdir)[0], True, True)
    order = GlobalOrder(len(dataset), config.global_batch_size, config.seed)
    losses, norms = [], []
    for step in range(case.steps):
        if any(first <= step + 1 <= last for first, last in config.skip_data_intervals):
            continue
        batch = _collate(dataset, order.sample_ids(step), pad)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))))
        losses.append(loss.item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    tensors = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in model.state_dict()}}
    weights = {name: tensor.detach().float().clone() for name, tensor in tensors.items()}
    return {"losses": losses, "norms": norms, "weights": weights}


@torch.no_grad()
def mean_loss(model: torch.nn.Module, dataset: TokenizedDataset) -> tuple[float, int]:
    """Loss a target token over a data set, sample by sample, and the number of targets."""
    loss_sum, num_targets = 0.0, 0
    for i in range(len(dataset)):
        labels = torch.from_numpy(dataset.labels(i).astype("int64"))[None]
        targets = int((labels[:, 1:] != -100).sum())
        loss_sum += (
            model.eval()(torch.from_numpy(dataset.input_ids(i).astype("int64"))[None], labels=labels).loss.item()
            * targets
        )
        num_targets += targets
    return loss_sum / num_targets, num_targets


def _collate(dataset: TokenizedDataset, ids: Any, pad: int) -> dict[str, torch.Tensor]:
    rows = [torch.from_numpy(dataset.input_ids(i).astype("int64")) for i in ids]
    labels = [torch.from_numpy(dataset.labels(i).astype("int64")) for i in ids]
    stack = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": stack(rows, batch_first=True, padding_value=pad),
        "labels": stack(labels, batch_first=True, padding_value=-100),
        "attention_mask": stack([torch.ones_like(row) for row in rows], batch_first=True),
    }


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def worst_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return max((relative_difference(a[name], b[name]), name) for name in b)


BOUND = 1e-5


# Two replicas that shard accumulated gradients, and weights too; the digit is `zero_stage`
ZERO_LAYOUTS = {"zero2": (1, 2), "zero3": (1, 2)}


LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "pp4": (4, 4), "pp2xdp2": (2, 4)}  # num_stages, world size


DATA_PARALLEL = {"dp2": (1, 2)}  # two replicas, no stages


CONTEXT_PARALLEL = {"cp2": (1, 2), "cp2xpp2": (2, 4)}  # with context_parallel_size=2


RING = "context_parallel_mode=ring"


CHECKPOINTED = "activation_checkpoint_interval=1"


SELECTIVE = (CHECKPOINTED, "activation_checkpoint_mode=selective")


EVERY_SECOND = ("activation_checkpoint_interval=2", "activation_checkpoint_mode=every")


CLIPPED = "max_grad_norm=0.05"  # a tenth of the norms of these runs: it bites in each step
