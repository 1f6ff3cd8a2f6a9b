"""Families without a file in models/, through real pipeline stages, against the plain Hugging Face model.

One step so long that the new weights are the gradients. One family of each kind of router, and those of OTHERS that
differ most, run at every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cases import (
    BOUND,
    CHECKPOINTED,
    Case,
    mean_loss,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.families import MIXTURES, OTHERS, has_sharding_plan, save_family
from support.parity_table import LARGE, count_packed_rows
from support.runs import eval_dataset, read_metrics
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM

LAYOUTS = {  # num_stages, world size, tensor_parallel_size
    "pp1": (1, 1, 1),
    "pp2": (2, 2, 1),
    "pp4": (4, 4, 1),
    "dp2": (1, 2, 1),
    "tp2": (1, 2, 2),
    "tp2xpp2": (2, 4, 2),
}
KINDS = (
    "mixtral",
    "glm4_moe",
    "gpt_oss",
)  # softmax; sigmoid, groups and a bias; softmax of the chosen, attention sinks
CUT = ["mixtral", "glm4_moe", "qwen3_moe", "hy_v3", "solar_open", "exaone_moe", "ernie4_5_moe", "dots1"]
CUT += ["flex_olmo", "olmoe", "minimax_m2"]  # norms over all heads
CUT += ["qwen3_5_text"]  # attention next to layers that stay whole
NAMED = ("gemma3_text", "gpt_neox", "falcon", "bloom")
OWN_HEAD_ONLY = ("phi", "gptj")  # a tied head has no bias
SHORT = [("mixtral", "pp2"), ("glm4_moe", "tp2"), ("gemma3_text", "tp2"), ("falcon-alibi", "pp2")]
REST = [(family, "pp2") for family in sorted(MIXTURES)]
REST += [(family, layout) for family in KINDS for layout in ("pp1", "pp4", "dp2")]
REST += [(family, layout) for family in CUT for layout in ("tp2", "tp2xpp2")]
REST += [(family, "pp2") for family in OTHERS]
REST += [(family, layout) for family in NAMED for layout in ("pp1", "pp4", "dp2")]
REST += [(family, layout) for family in filter(has_sharding_plan, OTHERS) for layout in ("tp2", "tp2xpp2")]
NUM_SAMPLES = 22
GRADIENTS = (f"learning_rate={LARGE}", "max_grad_norm=0")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(family, layout, *overrides): its model is made on first use, the records once."""
    root = tmp_path_factory.mktemp("generic")
    records = save_records(root / "train.jsonl", NUM_SAMPLES)
    save_records(root / "eval.jsonl", 11, seed=1)
    save_tokenizer(root / "tokenizer")

    def case(family: str, layout: str, *overrides: str, tied: bool = False) -> Case:
        folder = root / f"{family}-{tied}"
        if not folder.exists():
            save_family(folder, family, tied=tied)
        num_stages, world_size, size = LAYOUTS[layout]
        given = (f"tokenizer_name_or_path={root}/tokenizer", f"tensor_parallel_size={size}", *overrides)
        return Case(folder, records, root, num_stages, world_size, 1, given)

    return case


def compare(result: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor]) -> None:
    trained = {name: tensor for name, tensor in oracle["weights"].items() if name in result["weights"]}
    assert trained.keys() == result["weights"].keys()
    worst, name = worst_difference(result["weights"], trained)
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)


@pytest.mark.parametrize(
    ("family", "layout"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.full) for case in REST if case not in SHORT)]
)
def test_gradients_equal_hugging_face(
    workers: Callable[[int], WorkerGroup], material, family: str, layout: str
) -> None:
    case = material(family, layout, *GRADIENTS, CHECKPOINTED)
    compare(merge(workers(case.world_size).run(train_case, case)), train_oracle(case))


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in OTHERS if family not in OWN_HEAD_ONLY])
def test_gradients_of_a_tied_head_equal_hugging_face(workers, material, family: str) -> None:
    layout = "tp2" if has_sharding_plan(family) else "pp2"
    case = material(family, layout, *GRADIENTS, CHECKPOINTED, tied=True)
    compare(merge(workers(case.world_size).run(train_case, case)), train_oracle(case))


@pytest.mark.full
@pytest.mark.parametrize("family", KINDS)
def test_packed_rows_give_the_gradients_of_each_document_alone(workers, material, family: str) -> None:
    rows = workers(2).run(count_packed_rows, material(family, "pp2", "data.packing=true"))[0]
    packed = ("data.packing=true", "micro_batch_size=1", f"global_batch_size={rows}")
    result = merge(workers(2).run(train_case, material(family, "pp2", *GRADIENTS, *packed)))
    alone = ("micro_batch_size=1", f"global_batch_size={NUM_SAMPLES}")
    compare(result, train_oracle(material(family, "pp2", *GRADIENTS, *alone)))


@pytest.mark.full
@pytest.mark.parametrize("family", KINDS)
def test_a_trained_export_gives_the_trainers_loss(workers, material, tmp_path: Path, family: str) -> None:
    case = material(family, "pp2", "learning_rate=0.05")
    own = (f"eval_file={case.workdir}/eval.jsonl", f"output_dir={tmp_path}/out", f"data.cache_dir={tmp_path}/cache")
    workers(2).run(train_run, material(family, "pp2", "learning_rate=0.05", "max_steps=2", *own))
    reported = read_metrics(tmp_path / "out")[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    loss, num_targets = mean_loss(model, eval_dataset(tmp_path))
    assert reported["eval_tokens"] == num_targets and abs(loss - reported["eval_loss"]) < 1e-4
