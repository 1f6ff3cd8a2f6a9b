"""Packed rows without a mask: each document as it is alone, under each kernel that takes cumulative lengths, and
without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.chain import BOUND, Chain, difference, positions, tokens
from support.families import FAMILIES, build_family, build_family_config
from support.packed_kernels import play_flash, play_varlen
from support.published import build_published_config
from transformers import AutoConfig

from errors import UserError
from models.architecture.lookup import choose_attention
from models.generic.family import passes_documents
from models.generic.shrink import shrink
from models.layers import packed_attention
from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer
from models.layers.documents import DocumentBounds
from models.layers.layer import list_layer_configs
from models.layers.packed_attention import find_head_sizes

# Three rows of 24 tokens; the second holds one document, the third ends with padding, which continues its positions
ROWS = ((11, 1, 7, 5), (24,), (9, 15))
PADDING = 4
KNOWN = DocumentBounds(most=9, longest=24)  # more than the 7 that exist
# Rows longer than an indexer's selection need one: test_indexed_attention.py
WITHOUT_MASK = sorted(FAMILIES.keys() - {"deepseek_v32", "gemma2", "glm_moe_dsa", "gpt_oss", "mpt"})
Play = Callable[[pytest.MonkeyPatch], list[str]]
KERNELS: dict[str, tuple[str, Play]] = {
    "each": ("varlen", lambda monkeypatch: []),
    "varlen": ("varlen", play_varlen),
    "flash": ("flash_attention_2", play_flash),
}


def pack() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])


def expect(chain: Chain, bounds: DocumentBounds | None) -> None:
    for module in chain.stages:
        if isinstance(module, PipelineDecoderLayer):
            module.context.bounds = bounds


def total(logits: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over all tokens but the padding, each with a weight of its own."""
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    weights[2, -PADDING:] = 0
    return (logits * weights).sum()


@pytest.mark.parametrize("bounds", [KNOWN, None], ids=["known", "asked"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model_type", WITHOUT_MASK)
def test_logits_and_gradients_are_those_of_each_document_alone(
    model_type: str, kernel: str, bounds: DocumentBounds | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (model_type, kernel) == ("gpt2", "flash"):
        pytest.skip("transformers looks for an nn.Linear to cast fp32 by, and GPT-2 has none; no run is in fp32 there")
    implementation, play = KERNELS[kernel]
    called = play(monkeypatch)
    model = build_family(model_type)
    chain, input_ids = Chain(model), tokens()
    model.config._attn_implementation = "eager"
    alone = [
        torch.cat([model(document[None], use_cache=False).logits[0] for document in row.split(lengths)])
        for row, lengths in zip(input_ids, ROWS, strict=True)
    ]
    expected = torch.stack(alone)
    model.config._attn_implementation = implementation
    expect(chain, bounds)
    logits = chain(input_ids, pack())
    assert kernel == "each" or len(called) == model.config.num_hidden_layers
    real = torch.ones_like(input_ids, dtype=torch.bool)
    real[2, -PADDING:] = False
    assert difference(logits[real], expected[real]) < BOUND
    total(expected).backward()
    total(logits).backward()
    gradients, named = chain.gradients(), dict(model.named_parameters())
    for name, gradient in gradients.items():
        assert difference(gradient, named[name].grad) < BOUND, name


@pytest.mark.parametrize("implementation", ["varlen", "flash_attention_2"])
def test_whole_rows_go_where_they_are_fastest(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """varlen leaves them to SDPA unless a window bites; flash-attention's kernels for whole rows take them, but for one
    row, of which transformers would ask in each layer whether it is packed."""
    flash, varlen = play_flash(monkeypatch), play_varlen(monkeypatch)
    model = build_family("mistral")
    chain = Chain(model)
    model.config._attn_implementation = implementation
    layers = model.config.num_hidden_layers
    expect(chain, DocumentBounds(most=3, longest=24))
    model.config.sliding_window = 24
    chain(tokens(), positions())
    assert flash == ([] if implementation == "varlen" else ["flash_attn_func"] * layers) and varlen == []
    flash.clear()
    model.config.sliding_window = 8
    one = tokens()[:1]
    expect(chain, DocumentBounds(most=1, longest=24))
    logits = chain(one, positions()[:1])
    assert (flash, varlen) == (
        ([], ["varlen_attn"] * layers) if implementation == "varlen" else (["flash_attn_varlen_func"] * layers, [])
    )
    model.config._attn_implementation = "eager"
    assert difference(logits, model(one, use_cache=False).logits) < BOUND


@pytest.mark.parametrize("attention_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "varlen", "flash_attention_2"])
@pytest.mark.parametrize("most", [3, 9], ids=["whole", "packed"])
def test_the_host_reads_nothing_from_the_device_that_it_knows(
    implementation: str, attention_type: str, most: int
) -> None:
    """On the meta device there is nothing to read, and reading raises."""
    config = build_family_config("mistral", attn_implementation=implementation)
    context = MicroBatchContext(config)
    position_ids = torch.zeros(3, 24, dtype=torch.long, device="meta")
    inputs = (torch.zeros(3, 24, 48, device="meta"), position_ids, position_ids.int())
    context.bounds = DocumentBounds(most, 10)
    given = context(inputs, attention_type, 0)
    expected = {"sdpa": (most == 9 or attention_type == "sliding_attention"), "eager": True}
    assert (given["attention_mask"] is not None) == expected.get(implementation, False)
    if implementation == "varlen" and most == 9:
        documents = given["documents"]
        assert documents.offsets.shape == (10,) and documents.offsets.is_meta and documents.longest == 10
        assert documents.window == (8 if attention_type == "sliding_attention" else None)
    if implementation == "flash_attention_2" and most == 9:
        assert given["cu_seq_lens_q"].shape == (10,) and given["max_length_k"] == 10
    context.bounds = None
    with pytest.raises((RuntimeError, NotImplementedError)):  # the test can tell
        context((inputs[0], position_ids.clone(), inputs[2]), attention_type, 0)


def test_offsets_and_the_mask_of_packed_rows() -> None:
    config = build_family_config("llama", attn_implementation="varlen")
    context = MicroBatchContext(config)
    inputs = (torch.zeros(3, 24, 48), pack(), torch.ones(3, 24, dtype=torch.int32))
    context.bounds = KNOWN
    offsets = [0, 11, 12, 19, 24, 48, 57, 72, 72, 72]
    assert context(inputs, "full_attention", 0)["documents"].offsets.tolist() == offsets
    config._attn_implementation, context.bounds = "sdpa", None
    inputs = (inputs[0], pack(), inputs[2])
    mask = context(inputs, "full_attention", 0)["attention_mask"]
    assert mask.shape == (3, 1, 24, 24)
    documents = torch.block_diag(*[torch.ones(length, length).tril() for row in ROWS for length in row]).bool()
    assert all(torch.equal(mask[row, 0], documents[24 * row :, 24 * row :][:24, :24]) for row in range(3))


def test_a_layer_that_does_not_pass_the_documents_on_fails() -> None:
    module = torch.nn.Identity()
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match="documents"):
        packed_attention.attend(module, query, query, query, None)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="has no softcap"):
        packed_attention.attend(module, query, query, query, None, documents=None, softcap=2.0)


def test_without_grouped_queries_keys_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's kernel may not take them."""
    play_varlen(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(12, heads, 8, generator=generator) for heads in (4, 2, 2))
    documents = packed_attention.Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7, None)
    expected = packed_attention._attend_at_once(query, key, value, documents, None)
    seen: list[dict[str, object]] = []
    kernel = packed_attention.varlen_attn

    def old(*args: object, **kwargs: object) -> object:
        seen.append(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(packed_attention, "_PARAMETERS", frozenset({"window_size"}))
    monkeypatch.setattr(packed_attention, "varlen_attn", old)
    assert torch.equal(packed_attention._attend_at_once(query, key, value, documents, None), expected)
    assert seen == [{"scale": None, "window_size": (-1, 0)}]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_auto_takes_the_kernel_for_packed_rows_where_it_can(on_a_gpu: None) -> None:
    head_size_16 = {"head_dim": 16}
    for model_type, fields, dtype, expected in (
        ("llama", head_size_16, torch.bfloat16, "varlen"),
        ("llama", head_size_16, torch.float16, "varlen"),
        ("llama", head_size_16, torch.float32, "sdpa"),
        ("llama", head_size_16, None, "sdpa"),
        ("llama", {}, torch.bfloat16, "sdpa"),  # heads of 12
        ("llama", {"attention_dropout": 0.1, **head_size_16}, torch.bfloat16, "sdpa"),
        ("gpt2", {"n_embd": 64, "attn_pdrop": 0.1}, torch.bfloat16, "sdpa"),
        ("gpt2", {"n_embd": 64}, torch.bfloat16, "varlen"),
        ("deepseek_v3", {"qk_nope_head_dim": 16}, torch.bfloat16, "varlen"),
        ("gemma2", {}, torch.bfloat16, "eager"),
        ("mpt", {}, torch.bfloat16, "eager"),
    ):
        assert choose_attention(build_family_config(model_type, **fields), "auto", dtype) == expected, model_type


@pytest.mark.parametrize(
    ("fields", "dtype", "reason"),
    [
        ({"head_dim": 16}, torch.float32, "its kernel takes bf16 and fp16"),
        ({"head_dim": 12}, torch.bfloat16, "its kernel does not take heads of size 12"),
        ({"head_dim": 264}, torch.bfloat16, "its kernel does not take heads of size 264"),
        ({"head_dim": 16, "attention_dropout": 0.1}, torch.bfloat16, "its kernel has no dropout"),
    ],
)
def test_why_it_cannot_be_used(on_a_gpu: None, fields: dict[str, float], dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(UserError, match=f"attn_implementation=varlen cannot be used here: {reason}; use sdpa"):
        choose_attention(build_family_config("llama", **fields), "varlen", dtype)


def test_old_devices_and_old_torch_have_no_kernel_for_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_family_config("llama", head_dim=16)
    assert "compute capability 8.0" in (packed_attention.find_obstacle(config, torch.bfloat16) or "")
    monkeypatch.setattr(packed_attention, "_PARAMETERS", frozenset({"is_causal"}))
    assert "has no varlen_attn with windows" in (packed_attention.find_obstacle(config, torch.bfloat16) or "")


@pytest.mark.parametrize("planned", [False, True])
def test_the_gpu_of_a_plan_has_the_kernel_or_not(on_a_gpu: None, planned: bool) -> None:
    config = build_family_config("llama", head_dim=16)
    assert choose_attention(config, "auto", torch.bfloat16, planned) == ("varlen" if planned else "sdpa")


def test_every_layer_must_have_heads_that_the_kernel_takes() -> None:
    config = shrink(build_published_config("gemma4_text"))
    assert sorted({find_head_sizes(own) for own in list_layer_configs(config)}) == [(16, 16), (32, 32)]
    assert packed_attention.find_obstacle(config, torch.bfloat16, True) is None
    published = build_published_config("gemma4_text")
    assert (
        packed_attention.find_obstacle(published, torch.bfloat16, True) == "its kernel does not take heads of size 512"
    )


def test_a_family_that_knows_its_kernels_by_name_keeps_them(on_a_gpu: None) -> None:
    assert choose_attention(build_published_config("falcon"), "auto", torch.bfloat16) == "sdpa"


def test_a_published_family_must_pass_the_documents_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = shrink(AutoConfig.for_model("smollm3"))
    assert passes_documents(config) and choose_attention(config, "varlen") == "varlen"

    def drop(context: MicroBatchContext, *args: Any) -> dict[str, object]:
        given = own(context, *args)
        given.pop("documents", None)
        return given

    own = MicroBatchContext.__call__
    monkeypatch.setattr(MicroBatchContext, "__call__", drop)
    assert not passes_documents(config)
    for name in ("varlen", "flash_attention_2"):
        with pytest.raises(UserError, match=f"{name} cannot be used here: the layers of 'smollm3' do not pass"):
            choose_attention(config, name)
