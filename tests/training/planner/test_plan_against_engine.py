"""The plan's memory against every byte that PyTorch allocates while the real engine trains, rank by rank.

All storages are counted from the moment they are made until they are freed. A bucket of DeepSpeed counts whole, as on a
GPU, though a CPU touches only what is written; and what is offloaded counts too, since here the host is the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.cases import Case, build_all, build_engine
from support.families import build_family, save_family
from support.further import save_with_further
from support.head_runs import save_documents, save_queries, save_steps, save_words
from support.quantized import save_fp8, save_int4, save_mxfp4
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoConfig

from benchmarks.allocation import AllocationPeak
from data.encoders.kinds import KINDS
from models.experts import frozen
from models.weights.sources import open_weights
from training.config.schema import Device
from training.cost_terms.table import HOST_BYTES_A_RANK
from training.costs.hardware import Machine
from training.objectives.registry import find_auxiliary
from training.optim import chunks
from training.planner.plan import plan_resolved
from training.resolution.resolve import resolve
from training.resolution.target import Target

SEQ_LENGTH = 128
BUCKET = 370_000  # elements: smaller than the model, and nearly filled by whole matrices, as on real ones
INDEXED_LENGTH = 2560  # 512 queries that see more than the 2,048 keys that are selected
SMALL_BUCKET = 60_000  # smaller than most matrices
CHUNK_NUMEL = 4 * 2 * 128 * 192  # of four of the sixteen experts of `save_mixture`
OFFLOADED = ("precision=bf16", "activation_checkpoint_interval=1", "offload_optimizer=cpu")
RECOMPUTED = ("activation_checkpoint_interval=1",)
IN_RING = ("context_parallel_size=2", "context_parallel_mode=ring")
HOST_ACTIVATIONS = "activation_offload=true"
EAGER = ("attn_implementation=eager", "max_seq_length=512")  # a row's scores are most of what its layers make
PACKED = ("data.packing=true", "max_seq_length=512", "activation_checkpoint_interval=0")
LORA = "adapter=lora"
PISSA = (LORA, "adapter.r=32", "adapter.init_lora_weights=pissa")
SHARDED_OTHERS = [  # (num_stages, overrides): what is trained otherwise than by AdamW and whole, at ZeRO's stages
    (num_stages, ("precision=bf16", f"zero_stage={stage}", f"activation_checkpoint_interval={interval}", other))
    for stage, num_stages in ((2, 1), (2, 2), (3, 1))
    for interval in (0, 1)
    for other in ("optimizer=sgd", "optimizer=lion", LORA)
]
SHORT = (1, ("precision=bf16", "zero_stage=2", "activation_checkpoint_interval=1", LORA))
SMALL_STATES = (("optimizer=adamw", "optimizer.state_dtype=bf16"), ("optimizer=lion",), ("optimizer=adamw_8bit",))
GPU = Machine(
    name="any", device=Device.cuda, cards_per_node=8, memory=1, usable_memory=1, peak_flops={"bf16": 1, "fp32": 1},
    efficiency=1, memory_bandwidth=1, intra_node_bandwidth=1, inter_node_bandwidth=1, host_memory=1,
    host_memory_bandwidth=1, host_link_bandwidth=1, device_name="any",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plan")
    save_llama(root / "hf", hidden_size=192, intermediate_size=512, num_hidden_layers=4)
    save_tokenizer(root / "hf")
    save_records(root / "train.jsonl", 40)
    return root


@contextmanager
def small_buckets(num_elements: int = BUCKET) -> Iterator[None]:
    from training.engine import pipeline_engine as engines
    from training.engine import zero3

    written = engines.build_deepspeed_config

    def build(*arguments: Any, **named: Any) -> dict[str, Any]:
        built = written(*arguments, **named)
        built["zero_optimization"]["reduce_bucket_size"] = num_elements
        return built

    with (
        patch.object(chunks, "CHUNK_SIZE", SMALL_BUCKET),
        patch.object(engines, "build_deepspeed_config", build),
        patch.object(zero3, "build_deepspeed_config", build),
    ):
        yield


def train_counted(case: Case, bucket: int) -> int:
    """The peak of this rank's bytes in its second step, when the optimizer has its state."""

    frozen_mm = patch.object(frozen, "frozen_mm", frozen.multiply_in_chunks)  # whose operators are seen
    few_experts = patch.object(frozen, "CHUNK_NUMEL", CHUNK_NUMEL)
    with small_buckets(bucket), frozen_mm, few_experts, AllocationPeak() as counter:
        engine, loaders, _, layout, _ = build_all(case)
        micro_batches, first_pass = loaders.train.iterate(0, 2), loaders.first_pass
        first = loaders.train.first.iterate(0, 2) if first_pass is not None else None
        for step in range(2):
            counter.peak = counter.alive
            if first_pass is not None:
                first_pass.prepare(first, layout.gradient_accumulation_steps, layout.global_batch_size)
            engine.train_step(micro_batches, step, 2)
    return counter.peak


def train_by_bucket(case: Case, *sizes: int) -> list[bool]:
    """Returns of each of this rank's parameters whether it is the same to the bit after two steps with each size of
    bucket."""

    trained = []
    for size in sizes:
        with small_buckets(size):
            engine, loader, *_ = build_engine(case)
            micro_batches = loader.iterate(0, 2)
            for step in range(2):
                engine.train_step(micro_batches, step, 2)
            trained.append(list(engine.module.parameters()))
    return [all(torch.equal(found[0], other) for other in found[1:]) for found in zip(*trained, strict=True)]


@pytest.mark.parametrize(
    ("num_stages", "overrides"),
    [
        pytest.param(2, ("precision=bf16", "activation_checkpoint_interval=0"), marks=pytest.mark.full),
        (2, ("precision=bf16", "activation_checkpoint_interval=1")),
        (1, ("precision=bf16", "activation_checkpoint_interval=2", "offload_optimizer=cpu")),
        pytest.param(2, OFFLOADED, marks=pytest.mark.full),
        pytest.param(2, ("precision=bf16", *RECOMPUTED, HOST_ACTIVATIONS), marks=pytest.mark.full),
        pytest.param(1, ("precision=fp32", *RECOMPUTED, HOST_ACTIVATIONS), marks=pytest.mark.full),
        pytest.param(
            2, ("precision=bf16", *RECOMPUTED, HOST_ACTIVATIONS, "schedule=interleaved"), marks=pytest.mark.full
        ),
        pytest.param(
            1,
            ("precision=bf16", "activation_checkpoint_interval=1", "gradient_reduce_dtype=bf16"),
            marks=pytest.mark.full,
        ),
        pytest.param(1, ("precision=bf16", "activation_checkpoint_interval=1"), marks=pytest.mark.full),
        pytest.param(1, (*OFFLOADED, "gradient_reduce_dtype=bf16"), marks=pytest.mark.full),
        pytest.param(1, (*OFFLOADED, "zero_stage=2"), marks=pytest.mark.full),
        pytest.param(2, (*OFFLOADED, "zero_stage=2"), marks=pytest.mark.full),
        pytest.param(
            1, ("precision=bf16", *RECOMPUTED, "zero_stage=2", "optimizer=adamw_8bit"), marks=pytest.mark.full
        ),
        pytest.param(
            1,
            ("precision=fp32", "activation_checkpoint_interval=1", "gradient_reduce_dtype=bf16"),
            marks=pytest.mark.full,
        ),
        pytest.param(2, ("precision=fp32", "activation_checkpoint_interval=1"), marks=pytest.mark.full),
        (1, ("precision=fp32", "activation_checkpoint_interval=0")),
        (2, ("precision=bf16", "activation_checkpoint_interval=1", "activation_checkpoint_mode=selective")),
        pytest.param(
            1,
            ("precision=fp32", "activation_checkpoint_interval=3", "activation_checkpoint_mode=selective"),
            marks=pytest.mark.full,
        ),
        (2, ("precision=bf16", "activation_checkpoint_interval=2", "activation_checkpoint_mode=every")),
        (2, ("precision=bf16", "activation_checkpoint_interval=0", "schedule=interleaved")),
        pytest.param(
            2, ("precision=bf16", "activation_checkpoint_interval=0", "schedule=zero_bubble"), marks=pytest.mark.full
        ),
        pytest.param(
            2, ("precision=bf16", "activation_checkpoint_interval=1", "schedule=zero_bubble"), marks=pytest.mark.full
        ),
        pytest.param(
            2, ("precision=bf16", "activation_checkpoint_interval=1", "schedule=interleaved"), marks=pytest.mark.full
        ),
        pytest.param(
            2, ("precision=fp32", "activation_checkpoint_interval=0", "schedule=interleaved"), marks=pytest.mark.full
        ),
        (2, ("precision=bf16", "activation_checkpoint_interval=1", "tensor_parallel_size=2")),
        pytest.param(
            2, ("precision=bf16", "activation_checkpoint_interval=0", "tensor_parallel_size=2"), marks=pytest.mark.full
        ),
        pytest.param(
            2, ("precision=fp32", "activation_checkpoint_interval=1", "tensor_parallel_size=2"), marks=pytest.mark.full
        ),
        pytest.param(
            1, ("precision=bf16", "activation_checkpoint_interval=1", "tensor_parallel_size=2"), marks=pytest.mark.full
        ),
        *(
            pytest.param(stages, (f"precision={precision}", *RECOMPUTED, *optimizer), marks=pytest.mark.full)
            for stages in (1, 2)
            for precision in ("bf16", "fp32")
            for optimizer in SMALL_STATES
        ),
        *(
            pytest.param(
                stages,
                (
                    f"precision={dtype}",
                    f"activation_checkpoint_interval={interval}",
                    "tensor_parallel_size=2",
                    "sequence_parallel=true",
                ),
                marks=pytest.mark.full,
            )
            for stages, dtype, interval in ((1, "bf16", 0), (1, "fp32", 1), (2, "bf16", 1), (2, "fp32", 0))
        ),
        (1, ("precision=bf16", "activation_checkpoint_interval=0", "context_parallel_size=2")),
        pytest.param(
            1, ("precision=fp32", "activation_checkpoint_interval=1", "context_parallel_size=2"), marks=pytest.mark.full
        ),
        pytest.param(
            1,
            (
                "precision=bf16",
                "activation_checkpoint_interval=1",
                "activation_checkpoint_mode=selective",
                "context_parallel_size=2",
            ),
            marks=pytest.mark.full,
        ),
        *(
            pytest.param(1, (f"precision={precision}", *recomputation, *IN_RING), marks=pytest.mark.full)
            for precision, recomputation in (
                ("bf16", ("activation_checkpoint_interval=0",)),
                ("fp32", RECOMPUTED),
                ("bf16", (*RECOMPUTED, "activation_checkpoint_mode=selective")),
            )
        ),
        *(
            pytest.param(
                num_stages,
                (f"precision={dtype}", f"zero_stage={stage}", f"activation_checkpoint_interval={interval}"),
                marks=pytest.mark.full,
            )
            for stage, num_stages, interval in ((2, 1, 0), (2, 1, 1), (2, 2, 0), (2, 2, 1), (3, 1, 0), (3, 1, 1))
            for dtype in ("bf16", "fp32")
        ),
        *(pytest.param(*case, marks=() if case == SHORT else pytest.mark.full) for case in SHARDED_OTHERS),
        pytest.param(1, ("precision=bf16", "activation_checkpoint_interval=0", LORA), marks=pytest.mark.full),
        pytest.param(2, ("precision=bf16", *RECOMPUTED, LORA), marks=pytest.mark.full),
        *(
            pytest.param(stages, (precision, *recomputation, *PISSA), marks=pytest.mark.full)
            for stages, precision, recomputation in (
                (1, "precision=bf16", ("activation_checkpoint_interval=0",)),
                (2, "precision=fp32", RECOMPUTED),
            )
        ),
        pytest.param(1, ("precision=fp32", *RECOMPUTED, LORA), marks=pytest.mark.full),
        *(
            pytest.param(stages, (precision, *recomputation, LORA, "adapter.load_in_4bit=true"), marks=pytest.mark.full)
            for stages, precision, recomputation in (
                (1, "precision=bf16", ("activation_checkpoint_interval=0",)),
                (2, "precision=bf16", RECOMPUTED),
                (1, "precision=fp32", RECOMPUTED),
            )
        ),
        pytest.param(2, ("precision=bf16", *PACKED, LORA, "schedule=zero_bubble"), marks=pytest.mark.full),
        pytest.param(2, ("precision=bf16", *PACKED, "schedule=zero_bubble"), marks=pytest.mark.full),
        (2, ("precision=bf16", *RECOMPUTED, *EAGER)),
        pytest.param(1, ("precision=bf16", "activation_checkpoint_interval=0", *EAGER), marks=pytest.mark.full),
        pytest.param(1, ("precision=fp32", *RECOMPUTED, *EAGER), marks=pytest.mark.full),
        pytest.param(1, ("precision=fp32", "activation_checkpoint_interval=0", *EAGER), marks=pytest.mark.full),
    ],
    ids=lambda value: "-".join(v.rpartition("=")[2] for v in value) if isinstance(value, tuple) else f"pp{value}",
)
def test_predicted_and_real_peak(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, num_stages: int, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    compare_peaks(workers, root, tmp_path, num_stages, overrides, monkeypatch, BUCKET)


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=fp32", *RECOMPUTED),
        ("precision=bf16", "activation_checkpoint_interval=0"),
        ("precision=bf16", *RECOMPUTED, "activation_checkpoint_mode=selective"),
        ("precision=bf16", *RECOMPUTED, "zero_stage=2"),
    ],
    ids=lambda overrides: "-".join(key.rpartition("=")[2] for key in overrides),
)
def test_divided_experts(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keys = ("expert_parallel_size=2", *overrides)
    compare_peaks(workers, root, tmp_path, 1, keys, monkeypatch, BUCKET, model=save_mixture(root))


@pytest.mark.full
@pytest.mark.parametrize(("precision", "interval"), [("bf16", 0), ("bf16", 1), ("fp32", 1)])
def test_deferred_experts(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, precision: str, interval: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Between the halves of a backward pass experts keep the rows of all tokens, and their gradients."""
    keys = (f"precision={precision}", f"activation_checkpoint_interval={interval}", "schedule=zero_bubble")
    compare_peaks(workers, root, tmp_path, 2, keys, monkeypatch, BUCKET, model=save_mixture(root))


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_stages", "overrides"),
    [
        (1, ("precision=bf16", "activation_checkpoint_interval=0")),
        (2, ("precision=bf16", *RECOMPUTED)),
        (1, ("precision=fp32", *RECOMPUTED)),
        (1, ("precision=fp32", *RECOMPUTED, "adapter.target_parameters=[]")),
        (1, ("precision=bf16", *RECOMPUTED, "adapter.target_parameters=[]")),
    ],
)
def test_experts_in_4_bits(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, num_stages: int, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Four experts are dequantized at once."""
    monkeypatch.setattr(frozen, "CHUNK_NUMEL", CHUNK_NUMEL)
    keys = (*overrides, LORA, "adapter.load_in_4bit=true")
    compare_peaks(workers, root, tmp_path, num_stages, keys, monkeypatch, BUCKET, model=save_mixture(root))


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "num_stages", "overrides"),
    [
        ("fp8", 2, ("precision=bf16", *RECOMPUTED)),
        ("int4", 2, ("precision=bf16", *RECOMPUTED)),
        ("mxfp4", 1, ("precision=fp32", "activation_checkpoint_interval=0")),
    ],
)
def test_experts_as_they_are_published(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, form: str, num_stages: int,
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(frozen, "CHUNK_NUMEL", CHUNK_NUMEL)
    folder = root / form
    if not folder.exists():
        sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 16}
        if form == "fp8":
            save_fp8(folder, block=(128, 128), **sizes)
        elif form == "int4":
            save_int4(folder, **sizes)
        else:
            save_mxfp4(folder, hidden_size=192, intermediate_size=128, num_local_experts=16)
        save_tokenizer(folder)
    keys = (*overrides, LORA, "adapter.keep_quantized=true")
    compare_peaks(workers, root, tmp_path, num_stages, keys, monkeypatch, BUCKET, model=form)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v32", ("precision=bf16", *RECOMPUTED)),
        ("deepseek_v32", ("precision=bf16", "activation_checkpoint_interval=0")),
        ("glm_moe_dsa", ("precision=bf16", *RECOMPUTED)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1].rpartition("=")[2],
)
def test_indexed_attention_with_published_heads(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One layer with the heads of attention and of the indexer, 2,048 selected keys of rows of 2,560. Heads of values
    are as large as those of queries, as the fused kernel of a CPU needs; a GPU's do not."""
    if not (root / f"{family} published").exists():
        published = AutoConfig.for_model(family)
        heads = (
            "num_attention_heads", "num_key_value_heads", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
            "kv_lora_rank", "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk",
        )  # fmt: skip
        sizes = {name: getattr(published, name) for name in heads} | {"v_head_dim": published.qk_head_dim}
        layer = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "hidden_size": 256, "indexer_types": ["full"]}
        longest = {
            "max_position_embeddings": INDEXED_LENGTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }
        save_tokenizer(save_family(root / f"{family} published", family, **sizes, **layer, **longest))
    if not (root / "long.jsonl").exists():
        save_long(root / "long.jsonl", 8)
    keys = ("micro_batch_size=1", "global_batch_size=2", f"max_seq_length={INDEXED_LENGTH}", LORA, *overrides)
    compare_peaks(workers, root, tmp_path, 1, keys, monkeypatch, BUCKET, model=f"{family} published", file="long")


def save_long(file: Path, number: int) -> None:
    """Records of more tokens than a row has."""
    words = " ".join(str(index % 97) for index in range(2 * INDEXED_LENGTH))
    lines = [json.dumps({"prompt": f"{index}", "completion": words}) for index in range(number)]
    file.write_text("\n".join(lines) + "\n")


def save_mixture(root: Path) -> str:
    """Save a mixture whose experts are most of it, once; return its folder's name."""
    folder = root / "experts"
    if not folder.exists():
        sizes = {"hidden_size": 192, "moe_intermediate_size": 128, "num_experts": 16, "mlp_only_layers": []}
        save_tokenizer(save_family(folder, "qwen3_moe", **sizes))
    return folder.name


@pytest.mark.full
@pytest.mark.parametrize(
    "recomputation", [(), (*RECOMPUTED, "activation_checkpoint_mode=selective")], ids=["kept", "selective"]
)
def test_the_rank_that_gets_all_rows(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, recomputation: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every token chooses experts of the first rank, twice an even share: `moe.imbalance=2` is that rank's memory."""
    folder = root / "one-sided"
    if not folder.exists():
        save_one_sided(folder)
    keys = ("precision=fp32", *recomputation, "expert_parallel_size=2", "moe.imbalance=2", "learning_rate=1e-6")
    compare_peaks(workers, root, tmp_path, 1, keys, monkeypatch, BUCKET, model="one-sided", ranks=(0,))


@torch.no_grad()
def save_one_sided(folder: Path) -> None:
    """Routers with pairs of opposite rows for the first half of the experts, of which one is above 0, and the others
    at 0: so the two experts of a token are among the first half."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 384, "num_experts": 16, "mlp_only_layers": []}
    model = build_family("qwen3_moe", **sizes)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight[4:8] = -weight[:4]
            weight[8:] = 0
    model.save_pretrained(folder)
    save_tokenizer(folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "save"),
    [
        (data, save)
        for data, save in (
            ("classification", save_documents),
            ("token_classification", save_words),
            ("process_reward", save_steps),
            ("embedding", save_queries),
            ("rerank", save_queries),
        )
        if data in KINDS
    ],
)
def test_heads(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, data: str, save: Callable[[Path, int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    save(root / f"{data}.jsonl", 40)
    keys = (f"data={data}", "precision=bf16", *RECOMPUTED)
    compare_peaks(workers, root, tmp_path, 2, keys, monkeypatch, BUCKET, file=data)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_stages", "overrides"),
    [
        (2, ("precision=bf16", *RECOMPUTED)),
        (1, ("precision=fp32", "activation_checkpoint_interval=0")),
    ],
    ids=lambda value: "-".join(key.rpartition("=")[2] for key in value) if isinstance(value, tuple) else f"pp{value}",
)
def test_layers_that_predict_further_tokens(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, num_stages: int, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = root / "further"
    if not folder.exists():
        sizes = {"hidden_size": 192, "intermediate_size": 512, "first_k_dense_replace": 9, "num_attention_heads": 4}
        save_tokenizer(save_with_further(folder, "deepseek_v3", **sizes))
    keys = ("mtp.loss_coef=0.1", *overrides)
    compare_peaks(workers, root, tmp_path, num_stages, keys, monkeypatch, BUCKET, model="further")


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_stages", "overrides"),
    [
        (2, ("precision=bf16", *RECOMPUTED, "distill.top_k=null")),
        (1, ("precision=fp32", "activation_checkpoint_interval=0", "distill.temperature=2")),
        (2, ("precision=bf16", *RECOMPUTED, "optimizer=sgd", "distill.top_k=null", "schedule=zero_bubble")),
    ],
    ids=lambda value: "-".join(key.rpartition("=")[2] for key in value) if isinstance(value, tuple) else f"pp{value}",
)
def test_a_teacher_in_memory(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, num_stages: int, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The teacher has twice the student's size, so that it counts."""
    if not (root / "teacher").exists():
        save_llama(root / "teacher", hidden_size=320, intermediate_size=800, num_hidden_layers=6)
        save_tokenizer(root / "teacher")
    keys = (f"distill.teacher={root}/teacher", "distill.online=true", *overrides)
    compare_peaks(workers, root, tmp_path, num_stages, keys, monkeypatch, BUCKET)


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_matrices_larger_than_a_bucket(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_peaks(workers, root, tmp_path, num_stages, OFFLOADED, monkeypatch, SMALL_BUCKET)


@pytest.mark.parametrize(
    ("tied", "overrides"),
    [
        (False, RECOMPUTED),
        pytest.param(True, RECOMPUTED, marks=pytest.mark.full),
        pytest.param(True, (*RECOMPUTED, "zero_stage=2"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_large_vocabulary(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, tied: bool, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The first stage: the embedding adds the gradients of its rows to their sum; what stages share is summed whole."""
    folder = root / ("tied" if tied else "untied")
    if not folder.exists():
        save_llama(folder, tied, vocab_size=16384, hidden_size=192, intermediate_size=512, num_hidden_layers=2)
        save_tokenizer(folder)
    keys = ("precision=bf16", *overrides)
    replicas = (0, 1) if "zero_stage=2" in overrides else (0,)
    compare_peaks(workers, root, tmp_path, 2, keys, monkeypatch, BUCKET, model=folder.name, ranks=replicas)


def compare_peaks(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, num_stages: int, overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch, bucket: int, model: str = "hf", file: str = "train",
    ranks: tuple[int, ...] | None = None,
) -> None:  # fmt: skip
    """ranks: those that are compared; all by default."""
    monkeypatch.setattr("training.cost_terms.model_states.REDUCE_BUCKET", bucket)
    monkeypatch.setattr(chunks, "CHUNK_SIZE", SMALL_BUCKET)
    # the CPU pins nothing, so nothing is rounded up
    monkeypatch.setattr("training.cost_terms.cost_term.pinned_bytes", lambda nbytes: nbytes)
    width = 2 if "tensor_parallel_size=2" in overrides else 1
    replicas = 2 if "zero_stage=2" in overrides else 2 // num_stages  # which have a part each of the gradients
    world_size = width * num_stages * replicas
    case = Case(
        root / model, root / f"{file}.jsonl", tmp_path, num_stages, world_size,
        overrides=("optimizer=adamw", f"max_seq_length={SEQ_LENGTH}", "data.pad_to=max_seq_length", *overrides),
    )  # fmt: skip
    config, target, other = case.config(), Target(world_size, has_accelerator=False), None
    run = resolve(config, open_weights(str(root / model)), target)
    if (auxiliary := find_auxiliary(config)) is not None:
        own = auxiliary.derive(config, run.layout.micro_batch_size, run.layout.gradient_accumulation_steps)
        other = resolve(own, open_weights(own.model_name_or_path), target)
    plan = plan_resolved(run, GPU, auxiliary=other)
    peaks = workers(world_size).run(train_counted, case, bucket)
    for rank in range(world_size) if ranks is None else ranks:
        memory, real = plan.stages[run.layout.stage_id(rank)].memory, peaks[rank]
        assert memory.peak + memory.host - HOST_BYTES_A_RANK == pytest.approx(real, rel=0.05), (rank, memory)


@pytest.mark.parametrize(
    "num_stages, overrides",
    [
        pytest.param(1, OFFLOADED, id="pp1-offloaded", marks=pytest.mark.full),
        pytest.param(2, OFFLOADED, id="pp2-offloaded"),
        pytest.param(1, ("precision=fp32",), id="fp32", marks=pytest.mark.full),
    ],
)
def test_the_size_of_a_bucket_changes_no_bit(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, num_stages: int, overrides: tuple[str, ...]
) -> None:
    """One bucket, several, or some matrices by themselves; two replicas or one."""
    case = Case(
        root / "hf", root / "train.jsonl", tmp_path, num_stages, 2,
        overrides=("optimizer=adamw", f"max_seq_length={SEQ_LENGTH}", "learning_rate=1e-3", *overrides),
    )  # fmt: skip
    for same in workers(2).run(train_by_bucket, case, 10**7, BUCKET, SMALL_BUCKET):
        assert len(same) > 10 and all(same)
