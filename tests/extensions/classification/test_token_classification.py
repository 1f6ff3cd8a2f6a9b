"""Token classifiers through real pipeline stages against transformers' own class and loss in one process, without its
dropout; entities counted one by one; checkpoints at other layouts, adapters, and what is exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import objective_runs
from support.cases import CHECKPOINTED, CLIPPED, LAYOUTS, ZERO_LAYOUTS, Case, merge
from support.head_runs import (
    check_adapter_steps,
    load_oracle,
    load_with_adapter,
    read_token_batch,
    save_words,
    train_token_oracle,
)
from support.objective_runs import (
    PACKED_LAYOUTS,
    TENSOR_PARALLEL,
    check_record,
    check_resumed,
    check_steps,
    find_dataset,
    replace_model,
    start_runs,
    train_answers,
)
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForTokenClassification

from data.storage.tokenized import TokenizedDataset
from errors import UserError
from extensions.classification.token_encoders import TokenClassificationEncoder, find_words
from extensions.classification.tokens import list_entities

NUM_TEXTS = 42  # no multiple of a batch
NAMES = ("B-KEY", "I-KEY", "O")
SMALL_STEPS = "learning_rate=0.01"  # where those of the other cases amplify rounding
PACKED = ("data.packing=true", "micro_batch_size=1", "global_batch_size=4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_words(root / "train.jsonl", NUM_TEXTS)
    return root


def build_case(
    root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False, steps: int = 5, file: str = "train"
) -> Case:
    given = ("data=token_classification", "learning_rate=0.1", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, steps=steps, file=file)


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", True, (CLIPPED, CHECKPOINTED)),
        *(
            pytest.param(layout, False, (CLIPPED, CHECKPOINTED), marks=pytest.mark.full)
            for layout in (*LAYOUTS, *TENSOR_PARALLEL, *ZERO_LAYOUTS)
        ),
        pytest.param("pp2", False, ("schedule=zero_bubble",), marks=pytest.mark.full),
        pytest.param("pp2xdp2", False, ("data.label_all_pieces=true",), marks=pytest.mark.full),
        *(
            pytest.param(layout, False, (*PACKED, SMALL_STEPS, *overrides), marks=pytest.mark.full)
            for layout, overrides in (("pp2xdp2", ()), ("pp1", ()), ("pp2", (CHECKPOINTED,)), *PACKED_LAYOUTS)
        ),
    ],
)
def test_five_sgd_steps_equal_transformers(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    case = build_case(root, tmp_path, layout, *overrides, tied=tied)
    model = load_oracle(case)
    result = merge(workers(case.world_size).run(train_answers, case))
    check_steps(result, train_token_oracle(case, model))
    assert "score.bias" in result["weights"]


@pytest.mark.full
def test_no_state_passes_from_a_text_to_the_next(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    case = build_case(root, tmp_path, "pp2", *PACKED, SMALL_STEPS)
    case = replace_model(case, tmp_path / "model", "qwen3_next")  # linear attention, experts
    model = load_oracle(case)
    check_steps(merge(workers(case.world_size).run(train_answers, case)), train_token_oracle(case, model))


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


def evaluate(model: torch.nn.Module, dataset: TokenizedDataset) -> dict[str, float]:
    """Evaluate text by text. An entity is a B-KEY and the I-KEY after it, or one that begins with I-KEY."""
    counts, right, total, loss = [0, 0, 0], 0, 0, 0.0
    for i in range(len(dataset)):
        batch = read_token_batch(dataset, [i])
        with torch.no_grad():
            found = model.eval()(**batch)
        has_label = batch["labels"] != -100
        said, there = found.logits.argmax(dim=2)[has_label].tolist(), batch["labels"][has_label].tolist()
        entities = [set(_walk([NAMES[index] for index in tags])) for tags in (said, there)]
        counts = [a + b for a, b in zip(counts, (len(entities[0] & entities[1]), *map(len, entities)))]
        right, total = right + sum(map(int.__eq__, said, there)), total + len(there)
        loss += found.loss.item() * len(there)
    both, said, there = counts
    return {
        "eval_loss": loss / total,
        "eval_accuracy": right / total,
        "eval_precision": both / said if said else 0.0,
        "eval_recall": both / there,
        "eval_f1": 2 * both / (said + there),
    }


def _walk(tags: list[str]) -> list[tuple[int, int]]:
    found = []
    for place, tag in enumerate(tags):
        if tag == "B-KEY" or (tag == "I-KEY" and (place == 0 or tags[place - 1] == "O")):
            end = place + 1
            while end < len(tags) and tags[end] == "I-KEY":
                end += 1
            found.append((place, end))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "resumed", "overrides"),
    [("pp2", "pp1", ()), ("pp2xdp2", "tp2", ()), ("zero3", "pp2", PACKED), ("pp2", "pp2", PACKED)],
)
def test_a_run_continues_at_another_layout_and_is_exported(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, overrides: tuple[str, ...]
) -> None:
    overrides = ("learning_rate=3e-3", *overrides)
    whole, ended = check_resumed(run, tmp_path, (saved, resumed), *overrides)
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"]
    folder = tmp_path / "ended" / "hf"
    model, report = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.config.id2label == dict(enumerate(NAMES))
    expected = evaluate(model, find_dataset(tmp_path))
    check_record(ended[-1], expected)
    run("again", "pp2", "evaluate_only=true", f"model_name_or_path={folder}", *overrides)
    check_record(json.loads((tmp_path / "again" / "evaluation.json").read_text()), expected)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_a_head_is_trained_and_saved_with_adapters(run, root: Path, tmp_path: Path, layout: str) -> None:
    _, ended = check_resumed(run, tmp_path, (layout, "pp1"), "adapter=lora", "adapter.r=4", "learning_rate=3e-3")
    model = load_with_adapter(
        root / "tiedFalse", tmp_path / "ended" / "hf", len(NAMES), AutoModelForTokenClassification
    )
    check_record(ended[-1], evaluate(model, find_dataset(tmp_path)))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "overrides"), [("pp2", ()), ("zero2", ()), ("pp2", PACKED)])
def test_five_sgd_steps_with_adapters_equal_peft(
    workers: Callable[[int], WorkerGroup], run, root: Path, tmp_path: Path, layout: str, overrides: tuple[str, ...]
) -> None:
    """From an exported adapter, so that its matrices and its head have gradients in the first step."""
    run("first", "pp1", "adapter=lora", "adapter.r=4", "learning_rate=1e-2", "max_steps=2")
    adapter = tmp_path / "first" / "hf"
    lora = ("adapter=lora", f"adapter.name_or_path={adapter}", SMALL_STEPS)
    case = build_case(root, tmp_path, layout, *lora, CHECKPOINTED, *overrides)
    model = load_with_adapter(root / "tiedFalse", adapter, len(NAMES), AutoModelForTokenClassification)
    check_adapter_steps(merge(workers(case.world_size).run(train_answers, case)), train_token_oracle(case, model))


def test_entities_are_those_of_conlleval() -> None:
    tags = ["B-A", "I-A", "B-A", "O", "I-B", "I-A", "E-A", "I-A", "S-C", "A", "A"]
    documents = [0] * 10 + [1]
    expected = {
        (0, 2, "A"),
        (2, 3, "A"),
        (4, 5, "B"),
        (5, 7, "A"),
        (7, 8, "A"),
        (8, 9, "C"),
        (9, 10, "A"),
        (10, 11, "A"),
    }
    assert list_entities(tags, documents) == expected


def test_the_first_token_of_a_word_has_its_label(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    record = {"words": ["isinstance", "of", "deco\u00f6r"], "labels": ["B-KEY", "O", "O"]}
    text = " ".join(record["words"])
    owners = find_words(record["words"], tokenizer(text, return_offsets_mapping=True)["offset_mapping"])
    for every in (False, True):
        sample = TokenClassificationEncoder(labels=NAMES, label_all_pieces=every).encode(record, "a.jsonl:1", tokenizer)
        ids, labels = sample["input_ids"], [*sample["labels"][1:], -100]  # each at its own token
        plain = tokenizer(text)["input_ids"]
        assert ids[: len(plain)] == plain and len(ids) == len(sample["labels"])
        assert ids[len(plain) :] in ([tokenizer.eos_token_id], [])
        words: list[list[int]] = [[], [], []]
        for owner, label in zip(owners, labels):
            if owner is not None:
                words[owner].append(label)
        assert min(map(len, words)) >= 1 and max(map(len, words)) > 2
        rest = [NAMES.index(name) if every else -100 for name in ("I-KEY", "O", "O")]  # an entity begins once
        for found, name, other in zip(words, record["labels"], rest, strict=True):
            assert found == [NAMES.index(name), *[other] * (len(found) - 1)]


@pytest.mark.parametrize("letters", [{}, {"E": "L", "S": "U"}, {"I": "M"}], ids=["bies", "bilou", "bmes"])
@pytest.mark.parametrize(
    "tags", [["S-A"], ["B-A", "E-A"], ["B-A", "I-A", "E-A"], ["B-A", "I-A"], ["S-A", "S-A"], ["A"]]
)
@pytest.mark.parametrize("without", ["", "I", "B", "E"])
def test_an_entity_of_words_of_several_tokens_is_one(
    tmp_path: Path, tags: list[str], without: str, letters: dict[str, str]
) -> None:
    tags = [letters.get(tag[0], tag[0]) + tag[1:] for tag in tags]
    used = [f"{letters.get(letter, letter)}-A" for letter in "BIES" if letter != without]
    labels = list(dict.fromkeys(["O", *used, "A", *tags]))
    record = {"words": ["isinstance", "deco\u00f6r", "isinstance"][: len(tags)], "labels": tags}
    encoder = TokenClassificationEncoder(labels=labels, label_all_pieces=True)
    sample = encoder.encode(record, "a.jsonl:1", save_tokenizer(tmp_path))
    found = [labels[label] for label in sample["labels"] if label != -100]
    one = [0] * len(found)
    count = len(list_entities(tags, one[: len(tags)], labels))
    assert len(list_entities(found, one, labels)) == count, found


@pytest.mark.parametrize("letters", [{"E": "L", "S": "U"}, {"I": "M"}], ids=["bilou", "bmes"])
def test_other_letters_name_the_same_entities(letters: dict[str, str]) -> None:
    tags = ["B-A", "I-A", "E-A", "S-A", "B-A", "E-A", "O", "I-A", "S-B", "B-B"]
    other = [letters.get(tag[0], tag[0]) + tag[1:] for tag in tags]
    assert other != tags and list_entities(other, [0] * len(tags), other) == list_entities(tags, [0] * len(tags))
    classes = ["M-16", "L-9"]  # not prefixes: there is no B-16
    assert list_entities(classes, [0, 0], classes) == {(0, 1, "M-16"), (1, 2, "L-9")}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": ["O"]}, "words: 2, labels: 1; fix or remove the record"),
        ({"words": "a b"}, "field 'words' must be a list of texts; fix or remove the record"),
        ({"words": ["a", " "]}, "field 'words': text 2 is empty; fix or remove the record"),
        ({"labels": ["O", "X"]}, "field 'labels' is 'X', which is not among the labels"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, changed: dict, message: str) -> None:
    record = {"words": ["a", "b"], "labels": ["O", "O"]} | changed
    with pytest.raises(UserError) as raised:
        TokenClassificationEncoder(labels=NAMES).encode(record, "a.jsonl:1", save_tokenizer(tmp_path))
    assert str(raised.value).startswith(f"a.jsonl:1: {message}")
