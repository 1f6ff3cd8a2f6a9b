"""A model as its list of layers, in one process and without DeepSpeed, against the Hugging Face model it is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.chain import BOUND, B, Chain, T, difference, positions, tokens
from support.tiny import VOCAB_SIZE, save_llama
from torch.nn import functional as F
from transformers import LlamaForCausalLM


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[LlamaForCausalLM, Chain]]:
    def build(attn_implementation: str = "sdpa", **fields: object) -> tuple[LlamaForCausalLM, Chain]:
        model = save_llama(tmp_path, **fields)
        model.set_attn_implementation(attn_implementation)
        return model, Chain(model)

    return build


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_logits_and_gradients_are_hugging_faces(pair, attn_implementation: str, tied: bool) -> None:
    model, chain = pair(attn_implementation, tied=tied)
    assert chain.layers[1].args[0]._attn_implementation == attn_implementation
    input_ids = tokens()
    input_ids[:, -3:] = model.config.pad_token_id  # the embedding gives its row no gradient from the input side
    expected, logits = model(input_ids).logits, chain(input_ids, positions())
    assert difference(logits, expected) < BOUND
    for output in (expected, logits):
        F.cross_entropy(output[:, :-1].reshape(-1, VOCAB_SIZE), input_ids[:, 1:].reshape(-1)).backward()
    gradients, named = chain.gradients(), dict(model.named_parameters())
    assert gradients.keys() == named.keys()
    for name, gradient in gradients.items():
        assert difference(gradient, named[name].grad) < BOUND, name


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_every_rope_scaling(pair, rope_parameters: dict[str, object]) -> None:
    model, chain = pair(rope_parameters=rope_parameters)
    with torch.no_grad():
        assert difference(chain(tokens(100), positions(100)), model(tokens(100)).logits) < BOUND


def test_rotary_frequencies_stay_in_fp32_when_the_stage_is_cast(pair) -> None:
    _, chain = pair(max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    context = chain.layers[1].args[2]
    before = context.rotary.inv_freq.clone()
    chain.to(torch.bfloat16)
    assert next(chain.parameters()).dtype == torch.bfloat16
    assert context.rotary.inv_freq.dtype == torch.float32 and torch.equal(context.rotary.inv_freq, before)
    assert not any("inv_freq" in name for name, _ in chain.named_buffers())

    far = torch.arange(8000, 8000 + T).repeat(B, 1)
    inputs = (torch.zeros(B, T, 48, dtype=torch.bfloat16), far, torch.ones(B, T, dtype=torch.int32))
    cos, sin = context(inputs, "full_attention", 0)["position_embeddings"]
    angles = far[0, :, None].double() * before.double()  # [T, head_dim / 2]
    assert cos.dtype == torch.bfloat16
    for got, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert (got[0, :, : exact.shape[1]].double() - exact).abs().max() < 2**-8  # bf16's own rounding, no more
    noise = (far[0, :, None].double() * before.bfloat16().double()).cos()
    assert (noise - angles.cos()).abs().max() > 0.5  # what it would be otherwise


def test_no_argument_is_passed_under_a_name_that_transformers_has_given_up(pair) -> None:
    _, chain = pair("eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        chain(tokens(), positions())


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_documents_packed_into_a_row_do_not_see_each_other(pair, attn_implementation: str) -> None:
    model, chain = pair(attn_implementation)
    lengths = (7, 1, 10, 6)
    packed = torch.cat([torch.arange(length) for length in lengths]).repeat(B, 1)
    input_ids = tokens()
    with torch.no_grad():
        logits = chain(input_ids, packed)
        alone = [model(document).logits for document in input_ids.split(lengths, dim=1)]
        leaking = chain(input_ids, positions())
    assert difference(logits, torch.cat(alone, dim=1)) < BOUND
    assert difference(leaking[:, 7:], logits[:, 7:]) > 1e-3  # the test can tell


def test_the_mask_and_angles_of_a_micro_batch_are_made_once_and_not_kept_for_the_next(pair) -> None:
    _, chain = pair()
    made: list[int] = []
    context = chain.layers[1].args[2]
    context.rotary.register_forward_hook(lambda *_: made.append(1))
    first, second = positions(), positions(10)
    with torch.no_grad():
        logits = chain(tokens(), first)
        chain(tokens(10), second)
        assert len(made) == 2  # 5 layers each
        assert torch.equal(chain(tokens(), first), logits)
