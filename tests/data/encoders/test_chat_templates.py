"""Templates by name and from a file: their text, their tokens, and which tokens carry loss."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.encoders.chat import ChatEncoder
from data.encoders.chat_templates import NAMED, load_chat_template
from data.encoders.segments import leading_bos
from data.encoders.sft import SFTEncoder
from data.options import OnBadRecord
from data.sample import IGNORE_INDEX
from data.sources.formats import RawRecord
from data.storage.encoding import Encoding, encode_batch
from errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = [
    {"role": "user", "content": "Legs?"},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
ALPACA_START = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
VICUNA_START = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
# Name -> the conversation as its publishers show it: without a system turn up to the second answer, and the text that
# a system turn changes.
PUBLISHED = {
    "alpaca": (
        f"<s>{ALPACA_START}### Instruction:\nLegs?\n\n### Response:\nEight.</s>\n\n"
        "### Instruction:\nSure?\n\n### Response:\nYes.</s>\n\n",
        "<s>Be brief.\n\n### Instruction:\nLegs?",
    ),
    "chatml": (
        "<|im_start|>user\nLegs?<|im_end|>\n<|im_start|>assistant\nEight.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nLegs?",
    ),
    "gemma": (
        "<s><start_of_turn>user\nLegs?<end_of_turn>\n<start_of_turn>model\nEight.<end_of_turn>\n"
        "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n",
        "<s><start_of_turn>user\nBe brief.\n\nLegs?",
    ),
    "llama2": (
        "<s>[INST] Legs? [/INST] Eight. </s><s>[INST] Sure? [/INST] Yes. </s>",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nLegs? [/INST]",
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nLegs?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nEight.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user",
    ),
    "mistral": (
        "<s>[INST] Legs? [/INST] Eight.</s>[INST] Sure? [/INST] Yes.</s>",
        "<s>[INST] Be brief.\n\nLegs? [/INST]",
    ),
    "phi3": (
        "<|user|>\nLegs?<|end|>\n<|assistant|>\nEight.<|end|>\n<|user|>\nSure?<|end|>\n<|assistant|>\nYes.<|end|>\n",
        "<|system|>\nBe brief.<|end|>\n<|user|>\nLegs?",
    ),
    "vicuna": (
        f"<s>{VICUNA_START}USER: Legs? ASSISTANT: Eight.</s>USER: Sure? ASSISTANT: Yes.</s>",
        "<s>Be brief. USER: Legs?",
    ),
    "zephyr": (
        "<|user|>\nLegs?</s>\n<|assistant|>\nEight.</s>\n<|user|>\nSure?</s>\n<|assistant|>\nYes.</s>\n",
        "<|system|>\nBe brief.</s>\n<|user|>\nLegs?",
    ),
}


def test_each_name_has_a_file_and_a_case_here() -> None:
    folder = Path(__file__).parents[3] / "data" / "chat_templates"
    assert set(NAMED) == set(PUBLISHED) == {file.stem for file in folder.iterdir()}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_named_template_writes_what_its_publishers_do(name: str, build_tokenizer) -> None:
    tokenizer = build_tokenizer()
    load_chat_template(name).apply_to(tokenizer)
    whole, with_system = PUBLISHED[name]
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == whole
    assert tokenizer.apply_chat_template([SYSTEM, *MESSAGES], tokenize=False).startswith(with_system)
    tokens, eos_token = NAMED[name]
    assert tokenizer.eos_token == (eos_token or "</s>")
    for token in tokens:
        assert len(tokenizer(token)["input_ids"]) == 1 and token in tokenizer.all_special_tokens

    sample = ChatEncoder().encode({"messages": MESSAGES}, "chat.jsonl:1", tokenizer)
    targets = [label for label in sample["labels"] if label != IGNORE_INDEX]
    end = tokenizer.eos_token
    answers = tokenizer.decode(targets).replace(" ", "")
    assert answers == f"Eight.{end}Yes.{end}"
    assert whole.startswith(tokenizer.decode(sample["input_ids"])) and targets[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_named_template_refuses_unsupported_roles(name: str, build_tokenizer) -> None:
    tokenizer = build_tokenizer()
    load_chat_template(name).apply_to(tokenizer)
    for record in (
        {"messages": MESSAGES, "tools": [{"name": "count"}]},
        {"messages": [*MESSAGES[:1], {**MESSAGES[1], "tool_calls": [{"name": "count"}]}]},
    ):
        with pytest.raises(
            UserError, match="chat.jsonl:1: the chat template refuses the messages .*has no form for tool"
        ):
            ChatEncoder().encode(record, "chat.jsonl:1", tokenizer)


def test_a_file_with_its_tokens(build_tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}<turn>{{ message.role + ':' + message.content }}<end>{% endfor %}\n")
    tokenizer = build_tokenizer()
    load_chat_template(str(file), ["<turn>"], "<end>").apply_to(tokenizer)
    assert tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False) == "<turn>user:Legs?<end>"
    assert tokenizer.eos_token == "<end>" and len(tokenizer("<turn><end>")["input_ids"]) == 2
    without = load_chat_template(str(file), [], "<end>")
    assert without.describe() != load_chat_template(str(file), ["<turn>"], "<end>").describe()


def test_tokens_without_a_template_leave_the_tokenizers_own(chat_tokenizer, build_tokenizer) -> None:
    tokenizer = build_tokenizer(chat_template=chat_tokenizer.chat_template)
    load_chat_template(None, ["<call>"], "<|im_end|>").apply_to(tokenizer)
    assert tokenizer.chat_template == chat_tokenizer.chat_template
    assert len(tokenizer("<call>")["input_ids"]) == 1 and tokenizer.eos_token == "<|im_end|>"
    assert not load_chat_template(None)


def test_what_cannot_be_a_template(build_tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.chat_template=chatlm: neither a file nor one of alpaca, chatml"):
        load_chat_template("chatlm")
    file = tmp_path / "broken.jinja"
    file.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    with pytest.raises(
        UserError, match=r"data.chat_template=.*broken.jinja: line 2 is not valid Jinja: unexpected '}'"
    ):
        load_chat_template(str(file)).apply_to(build_tokenizer())
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="broken.jinja cannot be read: .*; give a UTF-8 text file"):
        load_chat_template(str(file))
    with pytest.raises(UserError, match="data.special_tokens and data.eos_token: a token is empty"):
        load_chat_template("chatml", [""])


@pytest.mark.parametrize(
    "template, message",
    [
        (
            "{% for m in messages %}\n{{ m.content + m.nothing.at_all }}{% endfor %}",
            r"\(its line 2\): .* has no attribute",
        ),
        ("{{ messages[0].content + 1 }}", r"\(its line 1\): can only concatenate str"),
        ("{{ messages[0].content }}", "message 2: the chat template writes nothing of this assistant turn"),
        ("{{ messages | length }} {{ messages[-1].content }}", "message 2: the chat template rewrites earlier turns"),
    ],
)
def test_a_template_that_fails_on_a_record(build_tokenizer, tmp_path: Path, template: str, message: str) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text(template)
    tokenizer = build_tokenizer()
    load_chat_template(str(file)).apply_to(tokenizer)
    with pytest.raises(UserError, match=f"^chat.jsonl:7: .*{message}"):
        ChatEncoder().encode({"messages": MESSAGES}, "chat.jsonl:7", tokenizer)


def test_a_tokenizer_that_makes_no_token_of_a_word() -> None:
    backend = Tokenizer(models.BPE(vocab={"x": 0, "</s>": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert leading_bos(tokenizer) == []
    with pytest.raises(UserError, match="the tokenizer makes no token of 'Paris', because its vocabulary lacks"):
        SFTEncoder().encode({"prompt": "x", "completion": "Paris"}, "train.jsonl:1", tokenizer)
    records = [
        RawRecord(f"train.jsonl:{n}", json.dumps({"prompt": "x", "completion": c})) for n, c in ((1, "x"), (2, "Paris"))
    ]
    with pytest.raises(UserError, match="^train.jsonl:2: the tokenizer makes no token of 'Paris'"):
        encode_batch(records, Encoding(SFTEncoder(), tokenizer, 16))
    batch = encode_batch(records, Encoding(SFTEncoder(), tokenizer, 16, on_bad_record=OnBadRecord.skip))
    assert (len(batch.columns["length"]), batch.counts.num_skipped) == (1, 1)
