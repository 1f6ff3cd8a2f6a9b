"""`fused_kernels=auto` on real stages: the same training, with the kernels played in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cases import BOUND, CHECKPOINTED, SELECTIVE, Case, merge, train_case, train_oracle, worst_difference
from support.fused_kernels import train_fused
from support.tiny import save_llama, save_records, save_tokenizer

LAYERS = 5
FUSED = "fused_kernels=auto"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("fused")
    save_llama(root / "model", num_hidden_layers=LAYERS)
    save_tokenizer(root / "model")
    return Case(root / "model", save_records(root / "train.jsonl", 24), root, 2, 2, steps=3)


@pytest.mark.parametrize(
    "overrides",
    [
        SELECTIVE,
        pytest.param((CHECKPOINTED,), marks=pytest.mark.full),
        pytest.param(("num_stages=1", "tensor_parallel_size=2"), marks=pytest.mark.full),
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_training_is_that_of_the_plain_model(workers, case: Case, overrides: tuple[str, ...]) -> None:
    fused = replace(case, overrides=(FUSED, *overrides))
    results = workers(2).run(train_fused, fused)
    assert all(calls.keys() == {"RMSNorm", "SwiGLU", "rotary"} for _, calls in results)
    result, expected = merge([trained for trained, _ in results]), train_oracle(fused)
    assert worst_difference(result["weights"], expected["weights"])[0] < BOUND
    assert result["losses"] == pytest.approx(expected["losses"], rel=BOUND)


@pytest.mark.full
def test_an_adapter_trains_with_fused_parts(workers, case: Case) -> None:
    adapted = replace(case, overrides=("adapter=lora", "learning_rate=0.1"))
    expected = merge(workers(2).run(train_case, adapted))
    results = workers(2).run(train_fused, replace(adapted, overrides=(FUSED, *adapted.overrides)))
    assert all(calls.keys() == {"RMSNorm", "SwiGLU", "rotary"} for _, calls in results)
    result = merge([trained for trained, _ in results])
    assert worst_difference(result["weights"], expected["weights"])[0] < BOUND


def test_a_machine_that_cannot_says_so_and_trains(workers, case: Case) -> None:
    plain = replace(case, num_stages=1, world_size=1, steps=1)
    (result,) = workers(1).run(train_and_listen, replace(plain, overrides=(FUSED,)))
    (expected,) = workers(1).run(train_case, plain)
    trained, printed = result
    assert printed == ["fused_kernels=auto: nothing is fused: liger-kernel's kernels need a GPU"]
    assert trained["losses"] == expected["losses"]


def train_and_listen(case: Case) -> tuple[dict[str, object], list[str]]:
    """The result of `train_case`, and the lines that it prints about fused kernels."""
    import console

    printed: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(console, "say", printed.append)
        return train_case(case), [line for line in printed if line.startswith("fused_kernels")]
