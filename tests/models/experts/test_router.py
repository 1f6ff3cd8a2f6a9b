"""The table of the routers in `transformers`, and the losses on a router."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.families import build_family, build_family_config
from support.published import build_published_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from errors import UserError
from models.architecture.lookup import build_layers
from models.experts.router import (
    SCORES,
    RouterMonitor,
    RouterOptions,
    ScoreFunction,
    attach,
    find_block,
    fit_options,
)
from models.generic.shrink import shrink
from models.layers.documents import DocumentBounds, locate_tokens
from models.parallel.shard import NO_CP

BIASED = {
    "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "hy_v3", "minimax_m2", "solar_open",
}  # fmt: skip
FAST = ("deepseek_v3", "mixtral")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in FAST else pytest.mark.full)
        for family in sorted(SCORES)
        if family != "llama4_text"
    ],  # its tokens choose one expert
)
def test_a_router_scores_as_the_table_says(family: str) -> None:
    """The weights of two chosen experts have the ratio of their scores, however they are normalized."""
    model = build_family(family).eval()
    block = find_block(model.model.layers[-1])
    assert block is not None and block.num_experts == 8
    assert (block.bias is not None) == (family in BIASED)
    arguments = (block.bias,) if family in ("hy_v3", "minimax_m2") else ()
    logits, weights, indices = block.router(torch.randn(6, model.config.hidden_size), *arguments)
    assert logits.shape == (6, 8) and weights.shape == indices.shape
    chosen = logits.gather(1, indices)
    scores = chosen.exp() if SCORES[family] is ScoreFunction.softmax else chosen.sigmoid()
    if family != "phimoe":  # which draws from a softmax over those that are close
        torch.testing.assert_close(weights[:, 0] / weights[:, 1], scores[:, 0] / scores[:, 1])


def test_dense_layers_have_no_routers() -> None:
    assert find_block(build_family("deepseek_v3").model.layers[0]) is None
    assert find_block(build_family("llama").model.layers[0]) is None


@pytest.mark.parametrize("knows_bounds", [True, False])
def test_losses_of_packed_and_padded_rows(knows_bounds: bool) -> None:
    """The gradients of a Mixtral router are those of each document by itself."""
    torch.manual_seed(0)
    block = find_block(build_family("mixtral").model.layers[0])
    router, hidden_states = block.router, torch.randn(3 * 6, 48, requires_grad=True)
    segments = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]], dtype=torch.int32)
    tokens = locate_tokens(segments, DocumentBounds(5, 6) if knows_bounds else None)
    context = SimpleNamespace(tokens=tokens, sequence_part=NO_CP)
    counts, sums = torch.zeros(8, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    monitor = RouterMonitor(
        context, RouterOptions(1.0, 1.0, scores=ScoreFunction.softmax), counts=counts, sums=sums,
        factors=torch.tensor([0.3, 0.7]),
    )  # fmt: skip
    leaves = [hidden_states, router.weight]
    handle = router.register_forward_hook(monitor)
    _, weights, _ = router(hidden_states)
    found = torch.autograd.grad((weights[:, 0] ** 2).sum(), leaves)
    with torch.no_grad():
        router(hidden_states)  # an evaluation
    handle.remove()
    logits, weights, indices = router(hidden_states)
    documents = [torch.tensor(ids) for ids in ([0, 1], [2, 3, 4], [6, 7, 8, 9, 10, 11], [12])]
    aux = z = torch.zeros(())
    expected_counts = torch.zeros(8, dtype=torch.int64)
    for ids in documents:
        loads = torch.bincount(indices[ids].flatten(), minlength=8)
        aux = aux + (8 / 2 * loads / len(ids) * logits[ids].softmax(1).mean(0)).sum()
        z = z + logits[ids].exp().sum(1).log().square().sum()
        expected_counts += loads
    expected = torch.autograd.grad((weights[:, 0] ** 2).sum() + 0.3 * aux + 0.7 * z, leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(sums, torch.stack([aux, z]).detach().double())
    assert torch.equal(counts, expected_counts)


def test_a_layer_that_checkpoints_itself_keeps_its_micro_batch() -> None:
    """Two micro-batches are in flight, as in a pipeline stage."""
    config = build_family_config("qwen3_moe")
    config._attn_implementation = "sdpa"
    layer = build_layers(config)[-3]
    module, parts = layer.module_class(*layer.args), torch.randn(2, 2, 12, config.hidden_size)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    monitor = RouterMonitor(
        module.context, RouterOptions(1.0, scores=ScoreFunction.softmax), counts=torch.zeros(8, dtype=torch.int64),
        sums=torch.zeros(2, dtype=torch.float64), factors=torch.ones(2),
    )  # fmt: skip
    find_block(module).router.register_forward_hook(monitor)

    def differentiate(recompute: object) -> list[torch.Tensor]:
        module.recompute = recompute
        outputs = []
        for hidden_states, first in zip(parts, (5, 9), strict=True):
            position_ids = torch.cat([torch.arange(first), torch.arange(12 - first)]).repeat(2, 1)
            segment_ids = (1 + (torch.arange(12) >= first)).to(torch.int32).repeat(2, 1)
            outputs.append(module((hidden_states, position_ids, segment_ids))[0])
        return torch.autograd.grad(sum(out.sum() for out in outputs), list(module.parameters()))

    torch.testing.assert_close(differentiate(partial(checkpoint, use_reentrant=False)), differentiate(None))


def test_attach_passes_all_gradients_on() -> None:
    tensor, loss = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    attached = attach(tensor, loss)
    assert torch.equal(attached, tensor)
    (attached * torch.arange(3.0)).sum().backward()
    assert tensor.grad.tolist() == [0, 1, 2] and loss.grad == 1


def fit(family: str, **options: float) -> RouterOptions | None:
    config = build_family_config(family)
    return fit_options(RouterOptions(**options), config, build_layers(config))


def test_options_that_do_not_apply_to_a_model() -> None:
    assert fit("llama") is None and fit("deepseek_v3").scores is ScoreFunction.sigmoid
    assert fit("mixtral", aux_loss_coef=0.1) == RouterOptions(0.1, scores=ScoreFunction.softmax)
    with pytest.raises(UserError, match="moe.z_loss_coef=0.1: this 'llama' model has no experts; leave it at 0"):
        fit("llama", z_loss_coef=0.1)
    config = shrink(build_published_config("dbrx"))
    with pytest.raises(
        UserError, match="moe.z_loss_coef=0.1: how the routers of 'dbrx' return what they choose is not"
    ):
        fit_options(RouterOptions(z_loss_coef=0.1), config, build_layers(config))
    with pytest.raises(UserError, match="moe.update_router_bias=0.001: the routers of 'mixtral' have no e_score_corr"):
        fit("mixtral", update_router_bias=0.001)


def test_a_family_with_unknown_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SCORES, "mixtral")
    assert fit("mixtral", z_loss_coef=0.1).scores is None
    with pytest.raises(UserError, match="moe.aux_loss_coef=0.1: how the routers of 'mixtral' score their tokens"):
        fit("mixtral", aux_loss_coef=0.1)


@pytest.mark.parametrize(("family", "has_logits"), [("aria_text", True), ("gemma4_text", False)])
def test_routers_are_found_whatever_the_config_calls_them(family: str, has_logits: bool) -> None:
    """These configs have no num_experts_per_tok, and Gemma 4's routers return probabilities."""
    config = shrink(build_published_config(family))
    layers = build_layers(config)
    assert fit_options(RouterOptions(), config, layers) == RouterOptions()
    refusal = pytest.raises(UserError, match="moe.z_loss_coef=0.1: the routers of 'gemma4_text' return no logits")
    with nullcontext() if has_logits else refusal:
        assert fit_options(RouterOptions(z_loss_coef=0.1), config, layers) == RouterOptions(z_loss_coef=0.1)


def test_an_untrained_bias_is_a_buffer() -> None:
    """Ernie keeps its bias in a parameter without a gradient, which a cast to the training dtype would round."""
    config = build_family_config("ernie4_5_moe")
    layer = build_layers(config)[-3]
    names = {name for name in layer.shapes() if name.endswith("e_score_correction_bias")}
    assert names and names <= layer.buffer_names()
    assert isinstance(layer.build_on_meta(), nn.Module)


def test_an_updated_bias_is_in_fp32() -> None:
    block = find_block(build_family("deepseek_v3").bfloat16().model.layers[-1])
    before = block.bias.clone()
    assert before.dtype is torch.bfloat16
    block.widen_bias()
    assert block.bias.dtype is torch.float32 and torch.equal(block.bias, before.float())
    assert "e_score_correction_bias" in dict(block.router.named_buffers())
