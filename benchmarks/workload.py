"""Common parts of the training benchmarks: a Llama of random weights, micro-batches full of targets, ranks,
and a run's config."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoConfig, LlamaConfig  # noqa: E402

from batch import Batch, Inputs, Targets  # noqa: E402
from data.collator import shift_labels  # noqa: E402
from models.layers.layer import Layer  # noqa: E402
from training.distributed.ranks import find_free_port  # noqa: E402


def draw_parts(form: str, shape: Sequence[int], device: str) -> tuple[torch.Tensor, ...]:
    """Random numbers in a form, small enough for products of them: parts of `FrozenStack`. shape: [E, R, C]."""
    experts, rows, columns = shape

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randint(256, (experts, *sizes), dtype=torch.uint8, device=device)

    def fill(value: float, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        return torch.full((experts, *sizes), value, dtype=dtype, device=device)

    if form == "fp8":
        block = (min(128, rows), min(128, columns))
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        codes = draw(blocks[0] * block[0], blocks[1] * block[1]).bitwise_and_(0xF7)  # no NaN
        return codes.view(torch.float8_e4m3fn), fill(2e-4, torch.float32, *blocks)
    if form == "mxfp4":
        return draw(columns, rows // 32, 16), fill(121, torch.uint8, columns, rows // 32)
    assert form == "int4", form
    return draw(rows, columns // 2).view(torch.int32), fill(4e-3, torch.bfloat16, rows, columns // 32)


class RandomWeights:
    """A `WeightSource` of a model that is nowhere. dtype: as the weights would lie in the file. form: of what stays so
    with `adapter.keep_quantized=true`."""

    path = config_dir = Path("nowhere")
    wrapper = None

    unconverted: tuple[str, ...] = ()

    def __init__(
        self, config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str = "cpu", form: str = ""
    ) -> None:
        self.config, self._dtype, self._device, self.form = config, dtype, device, form

    def read_kept(self, layer: Layer, name: str) -> tuple[torch.Tensor, ...]:
        shape = layer.build_on_meta().get_parameter(name).shape
        experts = len(layer.experts.get(name, range(shape[0]))) if len(shape) == 3 else 1
        return draw_parts(self.form, (experts, *shape[-2:]), self._device)

    def count_held(self, index: int, layer: Layer) -> int:
        return 0

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        generator = torch.Generator(self._device).manual_seed(index)
        return {
            name: torch.empty(shape, dtype=self._dtype, device=self._device).normal_(std=0.02, generator=generator)
            if len(shape) > 1
            else torch.ones(shape, dtype=self._dtype, device=self._device)
            for name, shape in layer.shapes().items()
        }

    def check_complete(self, layers: list[Layer]) -> None:
        """All of them can be made."""

    def files(self) -> list[Path]:
        return []


def build_llama(model_type: str = "llama", **fields: Any) -> Any:
    """Untied unless asked, with the tokens that a tokenizer made here has. model_type: another one has other fields."""
    config = AutoConfig.for_model(
        model_type, **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False} | fields
    )
    config._attn_implementation = "sdpa"
    return config


def compose_run(*overrides: str) -> Any:
    """The `RunConfig` of `conf/base.yaml` with overrides."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from training.config.schema import register_schema

    GlobalHydra.instance().clear()
    register_schema()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_object(
            compose("base", ["model_name_or_path=none", "train_file=none", "output_dir=none", *overrides])
        )


def build_engine(architecture: LlamaConfig, config: Any, source: Any = None) -> Any:
    """The engine of this rank, built as a run builds it; of random weights unless `source` has others."""
    from training import build
    from training.config.precision import DTYPES
    from training.distributed.ranks import read_ranks
    from training.setup import Run, build_setup

    ranks = read_ranks()
    setup = build_setup(config, source or RandomWeights(architecture, DTYPES[config.precision]), ranks)
    return build.build_engine(Run.of(setup, ranks))


def repeat_batch(micro_batch_size: int, seq_length: int, vocab_size: int, device: str = "cpu") -> Iterator[Batch]:
    """The same micro-batch forever, in which every token is a target."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, vocab_size, (micro_batch_size, seq_length), generator=generator).to(device)  # [B, T]
    position_ids = torch.arange(seq_length, device=device).repeat(micro_batch_size, 1)  # [B, T]
    denominator = torch.tensor(float(micro_batch_size * (seq_length - 1)), device=device)
    segment_ids = torch.ones_like(input_ids, dtype=torch.int32)  # [B, T]
    inputs = Inputs(input_ids, position_ids, segment_ids)
    return itertools.repeat(Batch(inputs, Targets.find(shift_labels(input_ids), denominator)))


def take_turns(
    runners: Mapping[str, Callable[[], object]], rounds: int, steps: int, tokens: int
) -> dict[str, list[float]]:
    """Tokens/s of each runner on this rank, round by round; a round goes once through all, every second one backwards.

    steps: that a runner takes in a round. tokens: of these, on this rank. One round more is run first, to warm up.
    """
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name in list(runners) if number % 2 else list(runners)[::-1]:
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                runners[name]()
            rates[name].append(tokens / (time.perf_counter() - start))
    return {name: values[1:] for name, values in rates.items()}


class RankFailed(Exception):
    """A rank failed; the message is one line, and the rank itself has printed the trace."""


def run_ranks(work: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Returns the results of `work(*arguments)` on each rank of a process group, each with its share of the cores or
    its GPU.

    Raises RankFailed as soon as one does, and ends the others.
    """
    port = find_free_port()
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(world_size)
    ]
    return _run_processes(environments, work, arguments)


def run_alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of `work(*arguments)` in its own process, without ranks. Raises RankFailed."""
    return _run_processes([{}], work, arguments)[0]


def _run_processes(
    environments: list[dict[str, str]], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for environment in environments:
        end, other_end = context.Pipe(duplex=False)
        process = context.Process(target=_run_process, args=(environment, other_end, work, arguments))
        process.start()
        other_end.close()  # so that a process that is killed ends the wait for its answer
        processes.append(process)
        ends.append(end)
    answers: dict[Connection, Any] = {}
    try:
        while len(answers) < len(ends):
            for end in wait([end for end in ends if end not in answers]):
                answers[end] = _receive(end)
                if isinstance(answers[end], RankFailed):
                    raise answers[end]
        for process in processes:
            process.join(10)
        return [answers[end] for end in ends]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _receive(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return RankFailed("killed, perhaps for memory")


def _run_process(
    environment: dict[str, str], answer: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    sys.stdout = open(os.devnull, "w")  # DeepSpeed reports what it finds
    try:
        if environment:
            _join()
        answer.send(work(*arguments))
        if environment:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except torch.OutOfMemoryError:
        answer.send(RankFailed("out of memory"))
    except Exception as error:
        traceback.print_exc()
        answer.send(RankFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"))


def _join() -> None:
    from training.distributed.process import join_process_group, take_device
    from training.distributed.ranks import read_ranks

    take_device(read_ranks())
    join_process_group()
