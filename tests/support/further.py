"""Small models with layers that predict further tokens, as they are published, and the same models in plain modules of
`transformers`: the oracle of runs that train them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.cases import Case
from support.families import build_family
from support.routers import list_documents
from support.tiny import find_tokenized
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

NUM_LAYERS = 4
HIDDEN = 48
NUMBERED, PREFIXED = ("deepseek_v3", "glm4_moe"), ("qwen3_next",)
_LAYER_TYPES = ["linear_attention"] * 3 + ["full_attention"]
_COUNTS = dict.fromkeys(NUMBERED, "num_nextn_predict_layers") | dict.fromkeys(PREFIXED, "mtp_num_hidden_layers")
# The other parts of a layer, by what they are
_NUMBERED_PARTS = {"embedding": "enorm", "hidden": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
_PREFIXED_PARTS = {
    "embedding": "pre_fc_norm_embedding",
    "hidden": "pre_fc_norm_hidden",
    "project": "fc",
    "norm": "norm",
}


def name_parts(family: str, depth: int) -> tuple[str, str, dict[str, str]]:
    """The prefix of a depth's parts, that of its decoder layer, and the names of the others."""
    if family in PREFIXED:
        return "mtp.", "mtp.layers.0.", _PREFIXED_PARTS
    prefix = f"model.layers.{NUM_LAYERS + depth - 1}."
    return prefix, prefix, _NUMBERED_PARTS


def save_with_further(folder: Path, family: str, depths: int = 1, tied: bool = False, **fields: Any) -> Path:
    """Saves the model as it is published, in fp32: a plain model of more layers, the last of which are renamed, with
    what they have in addition. That model is next to it, in `whole/`."""
    torch.manual_seed(3)
    types = {"layer_types": _LAYER_TYPES + ["full_attention"] * depths} if family in PREFIXED else {}
    hidden = fields.get("hidden_size", HIDDEN)
    whole = build_family(family, num_hidden_layers=NUM_LAYERS + depths, tie_word_embeddings=tied, **types, **fields)
    whole.save_pretrained(folder / "whole")
    tensors = load_file(folder / "whole/model.safetensors")
    for depth in range(1, 1 + depths):
        prefix, decoder, parts = name_parts(family, depth)
        ordinary = f"model.layers.{NUM_LAYERS + depth - 1}."
        for name in [name for name in tensors if name.startswith(ordinary)]:
            tensors[decoder + name.removeprefix(ordinary)] = tensors.pop(name)
        for part in ("embedding", "hidden", "norm"):
            tensors[f"{prefix}{parts[part]}.weight"] = 1 + 0.2 * torch.randn(hidden)
        tensors[f"{prefix}{parts['project']}.weight"] = 0.15 * torch.randn(hidden, 2 * hidden)
        if family in NUMBERED:
            embedding = tensors["model.embed_tokens.weight"]
            tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
            tensors[f"{prefix}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "whole/config.json").read_text())
    written |= {"num_hidden_layers": NUM_LAYERS, _COUNTS[family]: depths}
    if family in PREFIXED:
        written["layer_types"] = _LAYER_TYPES
    (folder / "config.json").write_text(json.dumps(written))
    return folder


class Depth(nn.Module):
    """h_k = norm(layer(project([norm(e); norm(h)]))), of one document."""

    def __init__(self, model: Any, decoder: nn.Module, tensors: dict[str, torch.Tensor], prefix: str, parts: Any):
        super().__init__()
        self._rotary = [model.rotary_emb]  # in a list, so that it is not a part of this one
        self.decoder = decoder
        for part, name in parts.items():
            module = nn.Linear(2 * HIDDEN, HIDDEN, bias=False) if part == "project" else deepcopy(model.norm)
            module.load_state_dict({"weight": tensors[f"{prefix}{name}.weight"]})
            self.add_module(part, module)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.project(torch.cat([self.embedding(embeddings), self.hidden(hidden)], dim=-1))
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        angles = self._rotary[0](x, positions)
        outputs = self.decoder(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return self.norm(outputs if isinstance(outputs, torch.Tensor) else outputs[0])


class PlainFurther(nn.Module):
    """The model of a folder of `save_with_further`."""

    def __init__(self, folder: Path, family: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float32)
        inner, tensors = self.model.model, load_file(folder / "model.safetensors")
        further = inner.layers[NUM_LAYERS:]
        inner.layers = inner.layers[:NUM_LAYERS]
        self.model.config._experts_implementation = "eager"  # which any dtype has
        self.model.config.num_hidden_layers = inner.config.num_hidden_layers = NUM_LAYERS
        self._names = [name_parts(family, depth) for depth in range(1, 1 + len(further))]
        self.depths = nn.ModuleList(
            Depth(inner, decoder, tensors, prefix, parts)
            for decoder, (prefix, _, parts) in zip(further, self._names, strict=True)
        )

    def compute_losses(self, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """The sums of the token losses of one document: of the next token, and of each depth."""
        hidden = self.model.model(input_ids=ids[None], use_cache=False).last_hidden_state
        losses = [self._sum(hidden, labels[1:])]
        for number, depth in enumerate(self.depths, 1):
            embeddings = self.model.model.embed_tokens(ids[None, number:])
            if embeddings.shape[1] < 2:  # too short for a target of this depth
                losses += [hidden.sum() * 0] * (len(self.depths) - number + 1)
                break
            hidden = depth(embeddings, hidden[:, : embeddings.shape[1]])
            losses.append(self._sum(hidden, labels[number + 1 :]))
        return losses

    def _sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden: one position more than there are targets."""
        return F.cross_entropy(self.model.lm_head(hidden[0, : len(targets)]), targets, reduction="sum")

    def list_gradients(self) -> dict[str, torch.Tensor]:
        """Published names in memory -> gradients; zeros where there is none."""
        named = self._name()
        grads = {name: each.grad for name, each in named.items() if isinstance(each, nn.Parameter)}
        return {name: torch.zeros_like(named[name]) if grad is None else grad for name, grad in grads.items()}

    def list_weights(self) -> dict[str, torch.Tensor]:
        """Published names in memory -> weights."""
        return {name: tensor.detach().float().clone() for name, tensor in self._name().items()}

    def _name(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        named |= {name: buffer for name, buffer in self.model.named_buffers() if name in self.model.state_dict()}
        for depth, (prefix, decoder, parts) in zip(self.depths, self._names, strict=True):
            named |= {decoder + name: tensor for name, tensor in depth.decoder.state_dict(keep_vars=True).items()}
            named |= {f"{prefix}{name}.weight": depth.get_submodule(part).weight for part, name in parts.items()}
        return named


def count_targets(labels: torch.Tensor, depth: int) -> int:
    return int((labels[depth + 1 :] != -100).sum())


def train_further_oracle(case: Case, family: str, coef: float) -> dict[str, Any]:
    """The same steps of SGD, each document alone."""
    config, model = case.config(), PlainFurther(case.model, family).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    folder = find_tokenized(case.workdir)[0]
    losses, norms, sums, counts = [], [], 0, 0
    for step in range(case.steps):
        documents = list(list_documents(config, folder, step))
        num_depths = len(model.depths)
        totals = [sum(map(torch.Tensor.double, each)) for each in zip(*(model.compute_losses(*d) for d in documents))]
        numbers = [sum(count_targets(labels, depth) for _, labels in documents) for depth in range(1 + num_depths)]
        loss, *further = (total / number for total, number in zip(totals, numbers, strict=True))
        optimizer.zero_grad()
        (loss + coef / num_depths * sum(further)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, float("inf"))))
        losses.append(loss.item())
        sums, counts = sums + torch.stack(totals[1:]).detach(), counts + torch.tensor(numbers[1:])
        optimizer.step()
    reported = {f"mtp_loss_{depth}": value for depth, value in enumerate((sums / counts).tolist(), 1)}
    return {"losses": losses, "norms": norms, "weights": model.list_weights(), "reported": reported, "counts": counts}


def train_further(case: Case) -> dict[str, Any]:
    """As `train_case`, with what is reported of further tokens."""
    from support.cases import build_engine, hf_weights

    from training.inputs.step_totals import SharedTotals
    from training.objectives.registry import get_objective

    engine, loader, config, _, bounds = build_engine(case)
    metrics = get_objective(config).metrics(engine.module.loss_fn, engine.device)
    micro_batches, totals = loader.iterate(0, case.steps), SharedTotals(loader, case.steps)
    losses, norms = [], []
    for step in range(case.steps):
        known = totals.get(step)
        losses.append(engine.train_step(micro_batches, step, case.steps, totals=known)[0].item())
        norms.append(float(engine.gradient_norm()))
        metrics.add_step(True)
    reported = metrics.finish_interval()
    return {"losses": losses, "norms": norms, "weights": hf_weights(engine), "bounds": bounds, "reported": reported}
