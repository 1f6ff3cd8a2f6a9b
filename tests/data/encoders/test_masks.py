"""Each kind of data on real text, through files, cache, packing and loader to a batch: which tokens carry loss, one by
one.

The tokenizer's pad token is its eos token.
"""

import inspect
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from data.collator import unshift_targets
from data.encoders.chat import ChatEncoder
from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.loading.loader import LoaderOptions, build_eval_loader
from data.options import Packing
from data.sample import Encoder
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, count_rows, prepare_rows
from data.storage.tokenizing import prepare_dataset
from errors import UserError

# ChatML as its models ship it, with a tool turn and a tool call.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if m.tool_calls %}call {{ m.tool_calls[0].function.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DOCUMENTS = [inspect.getdoc(function) for function in (textwrap.wrap, textwrap.fill, textwrap.dedent, textwrap.indent)]
Run = tuple[str, str]  # "masked" or "loss", text


@pytest.fixture(scope="module")
def tokenizer(build_tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=TEMPLATE, puts_bos=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    return tokenizer


@pytest.fixture
def read_documents(tokenizer, tmp_path: Path):
    """read_documents(encoder, records, packing, length): the documents of all batches, as runs of masked and trained
    text.
    """

    def read(encoder: Encoder, records: Sequence[dict], packing: Packing, length: int = 4096) -> list[list[Run]]:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        plan = RowPlan(length, packing)
        encoding = Encoding(encoder, tokenizer, None if packing is Packing.CONCATENATE else length)
        path = prepare_dataset([str(tmp_path / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=tmp_path)
        prepare_rows(path, plan, "train_file")
        options = LoaderOptions(
            True, True, 0, 1, micro_batch_size=2, row_plan=plan, pad_token_id=tokenizer.pad_token_id
        )
        documents = []
        for batch in build_eval_loader(path, options, count_rows(path, plan)).iterate():
            tensors = batch.inputs.input_ids, batch.inputs.position_ids, unshift_targets(batch.targets.ids)
            for row in zip(*(tensor.tolist() for tensor in tensors)):
                documents += split_row(*row, tokenizer)
        return documents

    return read


def split_row(input_ids: list[int], position_ids: list[int], labels: list[int], tokenizer) -> list[list[Run]]:
    starts = [i for i, position in enumerate(position_ids) if position == 0]
    documents = []
    for start, stop in zip(starts, [*starts[1:], len(input_ids)]):
        assert labels[start] == -100
        documents.append(read_runs(input_ids[start:stop], labels[start:stop], tokenizer))
    # After the last trained token of a row comes padding, or an empty row of a short batch.
    while documents and documents[-1][-1][0] == "masked":
        assert set(documents[-1][-1][1].split("<|im_end|>")) == {""}, documents[-1][-1]
        documents[-1].pop()
        if not documents[-1]:
            documents.pop()
    return documents


def read_runs(input_ids: list[int], labels: list[int], tokenizer) -> list[Run]:
    runs: list[tuple[str, list[int]]] = []
    for token, label in zip(input_ids, labels):
        assert label in (-100, token)
        kind = "masked" if label == -100 else "loss"
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(token)
    return [(kind, tokenizer.decode(tokens)) for kind, tokens in runs]


PACKINGS = [Packing.NONE, Packing.BEST_FIT]


@pytest.mark.parametrize("packing", PACKINGS)
def test_prompt_and_completion(read_documents, packing: Packing) -> None:
    records = [{"prompt": f"What is {n}?", "completion": text} for n, text in enumerate(DOCUMENTS)]
    expected = [[("masked", f"<s>What is {n}?\n"), ("loss", f"{text}<|im_end|>")] for n, text in enumerate(DOCUMENTS)]
    assert sorted(read_documents(SFTEncoder(), records, packing)) == sorted(expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_conversations(read_documents, packing: Packing) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "wrap", "arguments": {}}}],
    }
    with_tools = {
        "tools": [{"name": "wrap"}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": DOCUMENTS[0]},
            call,
            {"role": "tool", "content": DOCUMENTS[1]},
            {"role": "assistant", "content": "Wrapped."},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": DOCUMENTS[2]},
        ],
    }
    alpaca = {"instruction": DOCUMENTS[3], "input": "", "output": "Indented."}
    start, end, answer = "<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n"
    expected = [
        [
            (
                "masked",
                f'{start}system\ntools: [{{"name": "wrap"}}]{end}\n{start}system\nBe brief.{end}\n'
                f"{start}user\n{DOCUMENTS[0]}{end}\n{answer}",
            ),
            ("loss", f"call wrap{end}"),
            ("masked", f"\n{start}tool\n{DOCUMENTS[1]}{end}\n{answer}"),
            ("loss", f"Wrapped.{end}"),
            ("masked", f"\n{start}user\nThanks{end}\n{answer}"),
            ("loss", f"{DOCUMENTS[2]}{end}"),
        ],
        [("masked", f"{start}user\n{DOCUMENTS[3]}{end}\n{answer}"), ("loss", f"Indented.{end}")],
    ]
    assert sorted(read_documents(ChatEncoder(), [with_tools, alpaca], packing)) == sorted(expected)


@pytest.mark.parametrize("length", [2, 17, 64, 4096])
def test_raw_text(read_documents, tokenizer, length: int) -> None:
    """All but the bos token is trained on, each token exactly once, the end tokens included."""
    documents = read_documents(PretrainEncoder(), [{"text": text} for text in DOCUMENTS], Packing.CONCATENATE, length)
    assert all([kind for kind, _ in document] == ["masked", "loss"] for document in documents)
    assert "".join(text for document in documents for _, text in document[1:]) == "".join(
        f"{text}<|im_end|>" for text in DOCUMENTS
    )
    tokens = [
        len(tokenizer(text)["input_ids"]) for text in DOCUMENTS
    ]  # with bos; one more for eos, one less for the overlap
    assert len(documents) == (sum(tokens) if length == 2 else len(documents)) >= len(DOCUMENTS)
    if length == 4096:
        assert documents == [[("masked", "<s>"), ("loss", f"{text}<|im_end|>")] for text in DOCUMENTS]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"body": "a"}, "a.jsonl:1: no field 'text'; the record has 'body'; set data.text_field"),
        ({"text": " \n"}, "a.jsonl:1: field 'text' is empty; fill it or remove the record"),
        ({"text": None}, "a.jsonl:1: field 'text' must be text, not NoneType"),
    ],
)
def test_bad_documents(tokenizer, record: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        PretrainEncoder().encode(record, "a.jsonl:1", tokenizer)
    assert str(caught.value).startswith(message)
