"""Two steps of a row of `support.combinations` through real workers, and through the plain Hugging Face model.

The oracle takes the documents of a global batch one by one, so it knows nothing of micro-batches, packing or padding.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import load_with_head, make_adapter, to_peft_weights
from support.cases import BOUND, Case, merge, train_case, worst_difference
from support.combinations import RANKS, Row, list_keys
from support.families import save_family
from support.head_runs import load_oracle, read_text, save_documents, save_queries, save_steps, save_words
from support.objective_runs import list_groups
from support.pair_runs import compute_pair
from support.routers import add_router_losses, watch
from support.tiny import find_tokenized, save_pairs, save_records, save_tokenizer
from support.workers import WorkerGroup
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig

from data.encoders.kinds import ADDED_KINDS, KINDS
from data.order import GlobalOrder
from data.storage.rows import Rows
from data.storage.tokenized import TokenizedDataset
from models.adapters.targets import ALL_LINEAR
from training.config.incompatible import write_value
from training.config.schema import RunConfig, StateDtype
from training.inputs.datasets import build_row_plan
from training.objectives.registry import OBJECTIVES

STEPS = 2
SAVE = {
    "sft": save_records, "dpo": save_pairs, "orpo": save_pairs, "classification": save_documents,
    "token_classification": save_words, "process_reward": save_steps, "embedding": save_queries, "rerank": save_queries,
}  # fmt: skip
BATCH = ("global_batch_size=8", "max_seq_length=160")
ROOM = ("max_seq_length=256", "data.on_bad_record=skip")  # for samples that share a row
# A pair's gradient is in DPO that of sums over tokens
LEARNING_RATES = {
    "sft": 0.05, "pretrain": 0.05, "dpo": 0.02, "orpo": 0.02, "classification": 0.02,
    "token_classification": 0.02, "process_reward": 0.02, "embedding": 0.005, "rerank": 0.02,
}  # fmt: skip
HEADS = {kind.name: head for kind in ADDED_KINDS if (head := OBJECTIVES[kind.task].head) is not None}
NUM_LABELS = {"classification": 3, "token_classification": 3, "process_reward": 2}  # of the records that are saved here
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
EXPERTS = {  # with adapters
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_oss": _ATTENTION,
    "llama4_text": _ATTENTION,
}
# Of a mixture in bf16, where rounding sends tokens to other experts. Of the plain model of Hugging Face it moves the
# log-probability of 50 tokens by 1.0 nats (standard deviation, deepseek_v3) with the scale of the other rows, and with
# this one by 0.12, as that of a llama.
SMALLER = {"initializer_range": 0.05}
# Optimizers that make of a rounding of 1e-7 a step of another size: Lion of a gradient that is all rounding, as that of
# a key's bias is, and averages that are rounded themselves where they fall between two numbers. The blocks of 8 bits
# follow the layout. Of a llama all gradients are large enough for the first two.
SHARP = ("lion", "adamw in bf16", "8 bits")
# Of a loss: bf16 has 8 bits. It may be twice as far off as the plain model in bf16, which rounds as often: in a mixture
# it also changes which experts a token goes to.
BF16_BOUND = 0.03


class OwnLoss:
    """Next-token cross entropy, written as a user would."""

    def __call__(
        self, outputs: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        (hidden_states, head), (labels, denominator) = outputs, targets
        logits = F.linear(hidden_states[:, :-1], head).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / denominator
        return loss.float()  # the denominator is fp64, and the other ranks receive an fp32 loss


@dataclass(frozen=True)
class Material:
    """Models, adapters and data of all rows of a module, each made on first use."""

    root: Path

    def model(self, family: str, row: Row) -> Path:
        fields = SMALLER if family in EXPERTS and row["precision"] == "bf16" else {}
        folder = self.root / "-".join((family, row["tied"], *fields))
        return folder if folder.exists() else save_family(folder, family, tied=row["tied"] == "true", **fields)

    def adapter(self, family: str, row: Row) -> tuple[Path, nn.Module]:
        """A peft folder, and the Hugging Face model that has it."""
        model = self.model(family, row)
        head = HEADS.get(row["objective"])
        folder = self.name_adapter(model, row)
        options = {"dora": {"use_dora": True}, "dropout": {"lora_dropout": 0.1}}.get(row["adapter"], {})
        targets = EXPERTS.get(family, ALL_LINEAR) if options else ALL_LINEAR  # which take neither
        num_labels = NUM_LABELS.get(row["objective"], 1)
        return folder, make_adapter(folder, model, targets, head, num_labels, **options)

    def name_adapter(self, model: Path, row: Row) -> Path:
        return model.with_name("-".join((model.name, row["adapter"], *({row["objective"]} & HEADS.keys()))))

    def records(self, objective: str) -> Path:
        file = self.root / f"{objective}.jsonl"
        if file.exists():
            return file
        if objective == "pretrain":
            texts = [inspect.getdoc(item) for item in (textwrap.wrap, textwrap.dedent, textwrap.fill)]
            texts += inspect.getsource(textwrap.TextWrapper).split("\n\n")
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            return file
        return SAVE[objective](file, 30 if objective in HEADS else 60)

    def tokenizer(self) -> Path:
        folder = self.root / "tokenizer"  # not in a model's folder: transformers adds tokens of its own to a qwen2's
        if not folder.exists():
            save_tokenizer(folder)
        return folder

    def case(self, family: str, row: Row, workdir: Path) -> Case:
        objective = row["objective"]
        num_stages = 2 if "pp2" in row["layout"] else 1
        keys = [key for key in list_keys(row) if family in EXPERTS or not key.startswith("moe.")]
        given = (f"learning_rate={LEARNING_RATES[objective]}", *keys, *BATCH)
        given += (f"tokenizer_name_or_path={self.tokenizer()}",)
        if row["packing"] == "true" and any(KINDS[name].together for name in KINDS if f"data={name}" in keys):
            given += ROOM
        model = self.model(family, row)
        if row["adapter"] != "none":
            given += (f"adapter.name_or_path={self.name_adapter(model, row)}",)
        return Case(model, self.records(objective), workdir, num_stages, RANKS[row["layout"]], STEPS, given)


def check_row(workers: Callable[[int], WorkerGroup], material: Material, family: str, row: Row, workdir: Path) -> None:
    """Two steps give what the plain model gives; in bf16 a loss near it, and with dropout finite numbers. Where an
    optimizer makes large steps of rounding, the first loss and gradient; in bf16 the first loss."""
    case = material.case(family, row, workdir)
    policy = None if row["adapter"] == "none" else material.adapter(family, row)[1]
    result = merge(workers(case.world_size).run(train_case, case))
    assert all(tensor.isfinite().all() for tensor in result["weights"].values())
    assert all(0 < number < 1e4 for number in result["losses"] + result["norms"]), result
    model, config = load_plain(case, row["objective"])
    start = {name: parameter.detach().clone() for name, parameter in (policy or model).named_parameters()}
    if row["adapter"] == "dropout" or (row["loss"] == "own" and family == "gemma2"):  # whose logits it does not cap
        return
    is_sharp = row["optimizer"] in SHARP if family != "llama" else row["optimizer"] == "8 bits"
    rounded = copy.deepcopy((policy or model, model)) if row["precision"] == "bf16" else None
    doubled = copy.deepcopy((policy or model, model)) if row["optimizer"] == "lion" else None
    oracle = train_oracle(case.config(), case.workdir, policy or model, copy.deepcopy(model))
    if rounded is not None:
        steps = zip(result["losses"], oracle["losses"], *round_twice(case, *rounded), strict=True)
        for found, expected, *plain in islice(steps, 1 if is_sharp else STEPS):
            bound = max(BF16_BOUND, 2 * max(abs(each - expected) for each in plain) / expected)
            assert found == pytest.approx(expected, rel=bound)
        return
    if is_sharp:
        assert result["losses"][0] == pytest.approx(oracle["losses"][0], rel=BOUND)
        assert result["norms"][0] == pytest.approx(oracle["norms"][0], rel=BOUND)
        return
    assert any(not torch.equal(tensor, start[name]) for name, tensor in oracle["weights"].items() if name in start)
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    found, expected = name_weights(result, oracle, policy is not None, config)
    worst, name = worst_difference(found, expected)
    if worst >= BOUND and doubled is not None:
        # Lion takes the sign of a sum, which may be 0 in one order of summation, and is not in fp64
        exact = train_oracle(case.config(), case.workdir, *(each.double() for each in doubled))
        exact = name_weights(result, exact, policy is not None, config)[1]
        nearer = {key: choose_nearer(found[key], expected[key], exact[key]) for key in found}
        flipped = 2 * case.config().learning_rate  # by a step whose sign is another one
        worst, name = worst_difference(found, {key: forgive_one(found[key], nearer[key], flipped) for key in found})
    assert worst < BOUND, name


def name_weights(
    result: dict[str, Any], oracle: dict[str, Any], is_adapter: bool, config: PretrainedConfig
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a run and of its oracle, by the same names."""
    return to_peft_weights(result, oracle, config) if is_adapter else (result["weights"], oracle["weights"])


def choose_nearer(found: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return, element by element, that of `first` or `second` which is nearer to `found`."""
    second = second.to(first.dtype)
    return torch.where((found - first).abs() <= (found - second).abs(), first, second)


def forgive_one(found: torch.Tensor, expected: torch.Tensor, difference: float) -> torch.Tensor:
    """Return `expected`, with the element of `found` that is furthest from it where they differ by `difference`: in a
    third order of summation the sum may be 0 elsewhere. None of the others is taken."""
    furthest = (found - expected).abs().argmax()
    if (found - expected).abs().flatten()[furthest].item() == pytest.approx(difference, rel=1e-3):
        expected = expected.flatten().index_copy(0, furthest[None], found.flatten()[furthest][None]).view_as(expected)
    return expected


def load_plain(case: Case, objective: str) -> tuple[nn.Module, PretrainedConfig]:
    """The model of Hugging Face that a run starts from, and the config by which the project knows it."""
    if objective not in HEADS:
        model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
        return model, model.config
    if HEADS[objective].has_weights:
        model = load_oracle(case)
        return model, model.config
    return load_with_head(case.model, HEADS[objective])


def round_twice(case: Case, policy: nn.Module, reference: nn.Module) -> list[list[float]]:
    """The losses of the plain model in bf16 (weights of the optimizer in fp32), with its own kernels of attention and
    experts and with the eager ones: two orders of the same sums, which choose other experts where two are close, and of
    whose gradients Adam's first step, as large for a rounding as for a slope, makes other weights."""
    losses = []
    for is_eager in (False, True):
        models = [copy.deepcopy(each).bfloat16() for each in (policy, reference)]
        for module in (part for each in models for part in each.modules() if is_eager and hasattr(part, "config")):
            module.config._attn_implementation = module.config._experts_implementation = "eager"
        losses.append(train_oracle(case.config(), case.workdir, *models, copy.deepcopy(policy))["losses"])
    return losses


def train_oracle(
    config: RunConfig, workdir: Path, policy: nn.Module, reference: nn.Module, master: nn.Module | None = None
) -> dict[str, Any]:
    """The same steps on the plain model. reference: of preferences, the model without the adapter. master: of a policy
    in bf16, a copy in fp32 whose weights the optimizer moves."""
    for name, parameter in policy.named_parameters():
        if any(re.search(pattern, name) for pattern in config.freeze):
            parameter.requires_grad_(False)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(master or policy, config)
    if master is not None:
        follow(optimizer, master, policy)
    folder = find_tokenized(workdir)[0]
    compute = COMPUTE.get(config.data.name, compute_documents)
    losses, norms = [], []
    watched = watch(policy, policy.config.model_type) if config.moe.aux_loss_coef else []
    for step in range(STEPS):
        policy.zero_grad()
        losses.append(sum(compute(config, folder, step, policy.train(), reference)))
        if watched:
            add_router_losses(config, folder, step, policy, watched)
        norms.append(float(nn.utils.clip_grad_norm_(trained, config.max_grad_norm or float("inf"))))
        optimizer.step()
    tensors = dict(policy.named_parameters())
    tensors |= {name: buffer for name, buffer in policy.named_buffers() if name in policy.state_dict()}
    return {"losses": losses, "norms": norms, "weights": {name: t.detach().clone() for name, t in tensors.items()}}


def follow(optimizer: torch.optim.Optimizer, master: nn.Module, policy: nn.Module) -> None:
    """Each step of the master's optimizer takes the policy's gradients, and leaves it the new weights, rounded."""
    pairs = list(zip(master.parameters(), policy.parameters(), strict=True))

    def take(*_: object) -> None:
        for kept, rounded in pairs:
            kept.grad = None if rounded.grad is None else rounded.grad.float()

    @torch.no_grad()
    def give(*_: object) -> None:
        for kept, rounded in pairs:
            rounded.copy_(kept)

    optimizer.register_step_pre_hook(take)
    optimizer.register_step_post_hook(give)


def build_optimizer(policy: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """torch's, and of Lion that of bitsandbytes; each parameter is a group."""
    groups = []
    for name, parameter in policy.named_parameters():
        entry = next((each for each in config.parameter_groups if re.search(each.pattern, name)), None)
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        rates = (config.learning_rate, decay) if entry is None else (entry.learning_rate, entry.weight_decay)
        if parameter.requires_grad:
            groups.append({"params": [parameter], "lr": rates[0], "weight_decay": rates[1]})
    kind, betas = write_value(config.optimizer.name), (config.optimizer.betas[0], config.optimizer.betas[1])
    if kind == "sgd":
        return torch.optim.SGD(groups)
    if kind == "custom":
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    if kind == "lion":
        return pytest.importorskip("bitsandbytes.optim").Lion32bit(groups, betas=betas)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config.optimizer.eps)
    if config.optimizer.state_dtype is StateDtype.bf16:
        optimizer.register_step_post_hook(round_averages)
    return optimizer


def round_averages(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """To bf16, as they are kept."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())


def compute_documents(
    config: RunConfig, folder: Path, step: int, policy: nn.Module, reference: nn.Module
) -> Iterable[float]:
    """The part of each document in the loss of a step, with its gradient left in the parameters."""
    rows, dataset = Rows(folder, build_row_plan(config, "train_file"), True, True), TokenizedDataset(folder, True, True)
    ids = GlobalOrder(len(rows), config.global_batch_size, config.seed).sample_ids(step)
    documents = [
        [torch.from_numpy(column(sample)[start:stop].astype("int64")) for column in (dataset.input_ids, dataset.labels)]
        for row in ids
        for sample, start, stop in rows.pieces(int(row))
    ]
    num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
    for input_ids, labels in documents:
        logits = policy(input_ids[None]).logits[0, :-1]
        loss = F.cross_entropy(logits, labels[1:], reduction="sum") / num_targets
        loss.backward()
        yield loss.item()


def compute_pairs(
    config: RunConfig, folder: Path, step: int, policy: nn.Module, reference: nn.Module
) -> Iterable[float]:
    """The part of each pair in the loss of a step, its gradient left in the parameters."""
    dataset, ids = TokenizedDataset(folder, True, True), list_groups(config, folder, step)
    for pair in ids:
        loss = compute_pair(config, policy, reference.eval(), dataset, pair)[0] / len(ids)
        loss.backward()
        yield loss.item()


def compute_labelled(
    config: RunConfig, folder: Path, step: int, policy: nn.Module, reference: nn.Module
) -> Iterable[float]:
    """The part of each document in the loss over a step's labels, of documents or of their tokens, its gradient left in
    the parameters. Without the dropout that `transformers` puts before the scores of tokens."""
    dataset, ids = TokenizedDataset(folder, True, True), list_groups(config, folder, step)
    given = [dataset.labels(i)[1:] if dataset.sample_labels is None else dataset.sample_labels[i] for i in ids]
    labels = [torch.from_numpy(each.astype("int64")) for each in given]
    num_labels = sum(int((each != -100).sum()) for each in labels)
    for sample, own in zip(ids, labels, strict=True):
        scores = policy.eval()(read_text(dataset, sample), use_cache=False).logits.flatten(0, -2).float()
        loss = F.cross_entropy(scores[: len(own)], own, reduction="sum") / num_labels
        loss.backward()
        yield loss.item()


COMPUTE = {
    "preference": compute_pairs, "classification": compute_labelled, "token_classification": compute_labelled,
    "process_reward": compute_labelled,
}  # fmt: skip
if "rerank" in KINDS:
    from support.retrieval_runs import compute_queries

    COMPUTE |= {"embedding": compute_queries, "rerank": compute_queries}
