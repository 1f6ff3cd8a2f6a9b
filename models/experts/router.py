"""The routers of a mixture of experts: the losses that balance them, the counts of their tokens, and the bias that
balances them without a loss.

A layer's router scores its tokens as it runs, so its losses are computed there: its outputs carry their gradient
(`attach`), and are otherwise unchanged. They are sums over the tokens of a micro-batch times factors that the run sets
once a step, so they add up to the means over the global batch that docs/models.md defines, as the loss itself does.

Padding is not counted. N tokens of a micro-batch, its rows end to end, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import library, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

from errors import UserError
from models.experts.sizes import count_experts
from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer
from models.layers.documents import TokenDocuments
from models.layers.layer import Layer
from models.parallel.shard import NO_CP, ContextParallel, sum_parts


class ScoreFunction(Enum):
    """The function that a router applies to its logits before it chooses."""

    softmax = "softmax"
    sigmoid = "sigmoid"


# tests/models/experts/test_router.py compares these with the modules of transformers
SCORES = {
    **dict.fromkeys(
        (
            "deepseek_v2", "ernie4_5_moe", "flex_olmo", "gpt_oss", "mixtral", "olmoe", "phimoe", "qwen2_moe",
            "qwen3_moe",
        ),
        ScoreFunction.softmax,
    ),
    **dict.fromkeys(
        (
            "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3",
            "llama4_text", "minimax_m2", "solar_open",
        ),
        ScoreFunction.sigmoid,
    ),
}  # fmt: skip
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class RouterOptions:
    """The keys of the group `moe`: 0 turns off. scores: of the family's routers; None where it is not known."""

    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    update_router_bias: float = 0.0
    scores: ScoreFunction | None = None

    @property
    def has_losses(self) -> bool:
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0


@dataclass(frozen=True)
class RoutedBlock:
    """A mixture of experts in a layer.

    router: its module; transformers' return (logits [N, E], weights [N, K], indices [N, K]) (5.23), Gemma 4's has
    probabilities in the place of logits. keeper: the module that has the bias; None where there is none.
    """

    router: nn.Module
    num_experts: int
    keeper: nn.Module | None

    @property
    def has_logits(self) -> bool:
        return type(self.router).__name__ != "Gemma4TextRouter"

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias added to the scores for the choice of experts only: one number per expert, in any shape."""
        return None if self.keeper is None else getattr(self.keeper, _BIAS)

    def widen_bias(self) -> None:
        """Convert it to fp32: in bf16, small steps would be lost in it."""
        if self.keeper is not None:
            setattr(self.keeper, _BIAS, getattr(self.keeper, _BIAS).float())


# Those that return something other than RoutedBlock describes
_OTHER_ROUTERS = ("Linear", "Llama4Router", "DbrxRouter")


def find_block(layer: nn.Module, shape: Callable[[torch.Tensor], torch.Size] = torch.Tensor.size) -> RoutedBlock | None:
    """Return the layer's mixture of experts; None for a dense layer, and where the router does not return its choices.
    shape: returns the shape of a parameter, which may be sharded over replicas."""
    found = find_router(layer, _OTHER_ROUTERS)
    if found is None:
        return None
    parent, router = found
    keeper = next((module for module in parent.modules() if hasattr(module, _BIAS)), None)
    num_experts, _ = next(shape(each) for each in router.parameters() if len(shape(each)) == 2)
    return RoutedBlock(router, num_experts, keeper)


def find_router(layer: nn.Module, others: Sequence[str] = ()) -> tuple[nn.Module, nn.Module] | None:
    """Return the part of the layer that has its experts, and their router; None for a dense layer. others: names of
    classes of routers that are not looked for."""
    for name, _ in layer.named_modules():
        if name.rpartition(".")[2] == "experts":
            parent = layer.get_submodule(name.rpartition(".")[0])
            router = getattr(parent, "gate", None) or getattr(parent, "router", None)
            if router is not None and type(router).__name__ not in others:
                return parent, router
    return None


def fit_options(options: RouterOptions, config: PretrainedConfig, layers: Sequence[Layer]) -> RouterOptions | None:
    """Return the options with the scores of the model's routers; None for a dense model, and where what they choose is
    not read. Raises UserError for an option that does not apply to the model."""
    block = _find_first_block(config, layers)
    if block is None:
        for key, value in asdict(options).items():
            if value and count_experts(config) == (1, 1):
                raise UserError(f"moe.{key}={value:g}: this '{config.model_type}' model has no experts; leave it at 0")
            if value:
                raise UserError(
                    f"moe.{key}={value:g}: how the routers of '{config.model_type}' return what they choose is not "
                    "known; leave it at 0"
                )
        return None
    if options.update_router_bias and block.keeper is None:
        raise UserError(
            f"moe.update_router_bias={options.update_router_bias:g}: the routers of '{config.model_type}' have no "
            f"{_BIAS}; leave it at 0, and balance them with moe.aux_loss_coef"
        )
    if options.z_loss_coef and not block.has_logits:
        raise UserError(
            f"moe.z_loss_coef={options.z_loss_coef:g}: the routers of '{config.model_type}' return no logits; leave it "
            "at 0"
        )
    scores = SCORES.get(config.model_type)
    if options.aux_loss_coef and scores is None:
        raise UserError(
            f"moe.aux_loss_coef={options.aux_loss_coef:g}: how the routers of '{config.model_type}' score their tokens "
            "is not known; leave it at 0, or add the family to SCORES in models/experts/router.py"
        )
    return replace(options, scores=scores)


def _find_first_block(config: PretrainedConfig, layers: Sequence[Layer]) -> RoutedBlock | None:
    if count_experts(config) == (1, 1):
        return None
    decoder = (layer for layer in reversed(layers) if issubclass(layer.module_class, PipelineDecoderLayer))
    return next(filter(None, (find_block(layer.build_on_meta()) for layer in decoder)), None)  # the first may be dense


class RouterMonitor:
    """The hook after one layer's router: counts the tokens of each expert, and attaches the losses.

    In training passes only, and once, however often the layer is recomputed. counts: int64 [E], tokens of each expert.
    sums: float64 [2], the balance and the z-loss. factors: fp32 [2], the gradient of each sum.
    """

    def __init__(
        self,
        context: MicroBatchContext,
        options: RouterOptions,
        *,
        counts: torch.Tensor,
        sums: torch.Tensor,
        factors: torch.Tensor,
    ) -> None:
        self._context, self._options = context, options
        self._counts, self._sums, self._factors = counts, sums, factors
        context.locates_tokens = True

    def __call__(
        self, router: nn.Module, args: Any, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, indices = outputs
        if not torch.is_grad_enabled():
            return outputs
        tokens = self._context.tokens
        assert tokens is not None
        losses = self._compute_losses(logits, indices, tokens)
        tally(indices, tokens.is_real, losses.detach(), self._counts, self._sums)
        if self._options.has_losses:
            weights = attach(weights, (losses * self._factors).sum())
        return logits, weights, indices

    def _compute_losses(self, logits: torch.Tensor, indices: torch.Tensor, tokens: TokenDocuments) -> torch.Tensor:
        """Return [2], the sums of a micro-batch; 0 for a loss that is off."""
        options = self._options
        if not options.has_losses:
            return logits.new_zeros(2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        balance = z = logits.new_zeros(())
        if options.aux_loss_coef:
            assert options.scores is not None
            probabilities = compute_probabilities(logits, options.scores)
            balance = compute_balance_loss(probabilities, indices, tokens, self._context.sequence_part)
        if options.z_loss_coef:
            z = (logits.logsumexp(dim=-1).square() * tokens.is_real).sum()
        return torch.stack([balance, z])


def compute_probabilities(logits: torch.Tensor, scores: ScoreFunction) -> torch.Tensor:
    """Return [N, E]: a router's scores of all experts, as a distribution."""
    if scores is ScoreFunction.softmax:
        return logits.softmax(dim=-1)
    affinities = logits.sigmoid()
    return affinities / affinities.sum(dim=-1, keepdim=True)


def compute_balance_loss(
    probabilities: torch.Tensor, indices: torch.Tensor, tokens: TokenDocuments, sequence_part: ContextParallel = NO_CP
) -> torch.Tensor:
    """Return the sum over the documents of sum_i f_i P_i (2412.19437, equations 17 to 20): 1 for a document whose
    tokens spread evenly. f_i: E / K times the share of the document's tokens that go to expert i, P_i: their mean
    probability of it.

    probabilities: [N, E], differentiable. indices: [N, K], the experts of each token. sequence_part: the part of each
    row that these tokens are; f_i is of whole documents, and the sum has these tokens' terms of P_i.
    """
    num_experts, num_chosen = probabilities.shape[1], indices.shape[1]
    # tokens of each document at each expert, [C, E]
    counts = probabilities.new_zeros(len(tokens.lengths), num_experts)
    real = tokens.is_real.to(probabilities.dtype)
    pairs = (tokens.documents.unsqueeze(1) * num_experts + indices).flatten()
    counts.view(-1).index_add_(0, pairs, real.unsqueeze(1).expand_as(indices).flatten())
    counts = sum_parts(counts, sequence_part)
    f = counts * (num_experts / num_chosen) / tokens.lengths.unsqueeze(1)
    share = real / tokens.lengths[tokens.documents]  # of a token in its document's mean
    return ((probabilities * f[tokens.documents]).sum(dim=1) * share).sum()


@library.custom_op("experts::tally", mutates_args=("counts", "sums"))
def tally(
    indices: torch.Tensor, is_real: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor, sums: torch.Tensor
) -> None:
    """Add a micro-batch's tokens to `counts`, and its losses to `sums`; does nothing while a layer is recomputed.

    It runs again for a backward pass and within it, compiled or not: so this check is made at execution, in one
    operator that the compiler does not open.
    """
    if torch._C._current_graph_task_id() == -1:  # no backward pass is running in this thread
        real = is_real.to(counts.dtype).unsqueeze(1).expand_as(indices)
        counts.index_add_(0, indices.flatten(), real.flatten())
        sums.add_(losses)


def attach(tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return the tensor, with a backward pass that also runs the loss's, with a gradient of 1."""
    return _Attach.apply(tensor, loss)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = context.saved_tensors
        return gradient, torch.ones_like(loss)
