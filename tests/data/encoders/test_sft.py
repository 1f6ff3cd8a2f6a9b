"""SFT records: which tokens carry loss, token by token, and errors of bad records."""

import pytest
from support.tiny import read_runs
from transformers import PreTrainedTokenizerFast

from data.encoders.sft import SFTEncoder
from data.sample import Sample, count_targets
from errors import UserError

# A template that writes no end token of its own.
TEMPLATE_WITHOUT_EOS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RECORD = {"prompt": "Is {x} {prompt}?", "completion": "The capital of France."}


def encode(record: dict, tokenizer: PreTrainedTokenizerFast, **options: str) -> Sample:
    return SFTEncoder(**options).encode(record, "train.jsonl:12", tokenizer)


def test_loss_is_on_the_completion_and_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = encode(RECORD, tokenizer)
    assert read_runs(sample, tokenizer) == [("masked", "Is {x} {prompt}?\n"), ("loss", "The capital of France.</s>")]
    # Token by token; a completion of several tokens shows a wrong alignment.
    prompt = tokenizer.encode("Is {x} {prompt}?\n", add_special_tokens=False)
    completion = tokenizer.encode("The capital of France.", add_special_tokens=False)
    assert len(completion) > 3
    assert sample["input_ids"] == prompt + completion + [tokenizer.eos_token_id]
    assert sample["labels"] == [-100] * len(prompt) + completion + [tokenizer.eos_token_id]
    assert count_targets(sample) == len(completion) + 1


def test_prompt_and_completion_never_share_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode(" legs", add_special_tokens=False)) == 1
    sample = encode({"prompt": " le", "completion": "gs"}, tokenizer, prompt_template="{prompt}")
    assert read_runs(sample, tokenizer) == [("masked", " le"), ("loss", "gs</s>")]


def test_bos_only_where_the_tokenizer_puts_one(build_tokenizer) -> None:
    with_bos = build_tokenizer(puts_bos=True)
    assert read_runs(encode(RECORD, with_bos), with_bos)[0] == ("masked", "<s>Is {x} {prompt}?\n")
    one_token_for_both = build_tokenizer(bos_token="</s>")
    assert read_runs(encode(RECORD, one_token_for_both), one_token_for_both)[0] == ("masked", "Is {x} {prompt}?\n")
    without_bos = build_tokenizer(bos_token=None)
    assert read_runs(encode(RECORD, without_bos), without_bos)[0] == ("masked", "Is {x} {prompt}?\n")


def test_the_end_token_is_trained_where_pad_is_eos(build_tokenizer) -> None:
    tokenizer = build_tokenizer(pad_token="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    sample = encode(RECORD, tokenizer)
    assert sample["labels"][-1] == sample["input_ids"][-1] == tokenizer.eos_token_id
    assert read_runs(sample, tokenizer)[1] == ("loss", "The capital of France.</s>")


def test_template_and_named_fields(tokenizer: PreTrainedTokenizerFast) -> None:
    options = {"prompt_field": "q", "completion_field": "a", "prompt_template": "{json}\nQ: {prompt}\nA:"}
    sample = encode({"q": "{a}", "a": " b"}, tokenizer, **options)
    assert read_runs(sample, tokenizer) == [("masked", "{json}\nQ: {a}\nA:"), ("loss", " b</s>")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            "train.jsonl:12: no field 'prompt'; the record has 'question', 'answer'; "
            "set data.prompt_field and data.completion_field",
        ),
        ({"prompt": "a", "answer": "b"}, "no field 'completion'; the record has 'prompt', 'answer'; set data.comp"),
        ({"completion": "a"}, "train.jsonl:12: no field 'prompt'; the record has 'completion'; set data.prompt_field"),
        ({}, "train.jsonl:12: no field 'prompt'; the record has no fields; set"),
        ({"prompt": 1, "completion": "b"}, "train.jsonl:12: field 'prompt' must be text, not int; fix"),
        ({"prompt": "a", "completion": None}, "train.jsonl:12: field 'completion' must be text, not NoneType; fix"),
        ({"prompt": "a", "completion": " \n"}, "train.jsonl:12: field 'completion' is empty; fill it or remove"),
        ({"prompt": "\ud800", "completion": "b"}, "train.jsonl:12: field 'prompt' holds half of a surrogate pair"),
    ],
)
def test_bad_records(tokenizer: PreTrainedTokenizerFast, record: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        encode(record, tokenizer)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_without_eos(build_tokenizer) -> None:
    with pytest.raises(UserError, match="the tokenizer has no eos token"):
        encode(RECORD, build_tokenizer(eos_token=None))


def test_a_template_without_a_prompt() -> None:
    with pytest.raises(UserError, match="data.prompt_template='Q: ' has no {prompt}; write it where"):
        SFTEncoder(prompt_template="Q: ")


def test_a_chat_template_is_not_ignored(build_tokenizer, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    """It is not applied to texts, only to messages."""
    with pytest.raises(UserError, match=r"train.jsonl:12: data.chat_template=chatml is not applied .* give data=chat"):
        encode(RECORD, build_tokenizer(), chat_template="chatml")
    assert encode(CONVERSATION, chat_tokenizer, chat_template="chatml") == encode(CONVERSATION, chat_tokenizer)


def chat(*turns: tuple[str, str], **fields: str) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


CONVERSATION = chat(
    ("system", "Be brief."), ("user", "Legs?"), ("assistant", "Eight."), ("user", "Sure?"), ("assistant", "Yes.")
)


def test_loss_is_on_assistant_turns_and_their_end_tokens(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert read_runs(encode(CONVERSATION, chat_tokenizer), chat_tokenizer) == [
        ("masked", f"{system}<|im_start|>user\nLegs?<|im_end|>\n<|im_start|>assistant\n"),
        ("loss", "Eight.<|im_end|>"),
        ("masked", "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
        ("loss", "Yes.<|im_end|>"),
    ]


def test_turns_after_the_last_answer_are_dropped(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    longer = chat(("user", "Legs?"), ("assistant", "Eight."), ("user", "Thanks"))
    shorter = chat(("user", "Legs?"), ("assistant", "Eight."))
    assert encode(longer, chat_tokenizer) == encode(shorter, chat_tokenizer)


def test_a_turn_ends_with_the_eos_that_the_template_lacks(build_tokenizer) -> None:
    tokenizer = build_tokenizer(chat_template=TEMPLATE_WITHOUT_EOS, pad_token="</s>")
    record = chat(("user", "Legs?"), ("assistant", "Eight."), ("user", "Sure?"), ("assistant", "Yes."))
    sample = encode(record, tokenizer)
    text = "user: Legs?\nassistant: Eight.\nuser: Sure?\nassistant: Yes.</s>"
    assert tokenizer.decode(sample["input_ids"]) == text  # in between as the template shows it
    assert tokenizer.decode([label for label in sample["labels"] if label != -100]) == "Eight.</s>Yes.</s>"
    place = sample["labels"].index(tokenizer.eos_token_id)
    assert tokenizer.decode(sample["input_ids"][:place]).endswith("Eight.")


def test_an_eos_inside_an_answer_does_not_end_it(chat_tokenizer: PreTrainedTokenizerFast, build_tokenizer) -> None:
    record = chat(("user", "a"), ("assistant", "b<|im_end|>c"))
    assert read_runs(encode(record, chat_tokenizer), chat_tokenizer)[1] == ("loss", "b<|im_end|>c<|im_end|>")
    no_end = build_tokenizer(chat_template=TEMPLATE_WITHOUT_EOS, eos_token="<|im_end|>")
    assert read_runs(encode(record, no_end), no_end)[1] == ("loss", "b<|im_end|>c<|im_end|>")


def test_which_fields_a_record_is_read_by(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    both = CONVERSATION | {"prompt": "a", "completion": "b"}
    assert read_runs(encode(both, chat_tokenizer), chat_tokenizer) == [("masked", "a\n"), ("loss", "b<|im_end|>")]
    with_prompt_only = CONVERSATION | {"prompt": "a"}
    assert encode(with_prompt_only, chat_tokenizer) == encode(CONVERSATION, chat_tokenizer)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "train.jsonl:12: messages must be a list of objects with a role and a content"),
        ("hello", "train.jsonl:12: messages must be a list of objects with a role and a content"),
        ([{"role": "user"}], "train.jsonl:12: message 1 must be an object with a role and a content"),
        ([{"role": "user", "content": ["a"]}], "train.jsonl:12: message 1: content must be text, not list"),
        ([{"role": "user", "content": "a"}], "train.jsonl:12: no assistant turn among the messages"),
        ([{"role": "assistant", "content": "a"}], "train.jsonl:12: message 1 is an assistant turn; put the turn"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}],
            "train.jsonl:12: message 2 is an empty assistant turn",
        ),
    ],
)
def test_bad_messages(chat_tokenizer: PreTrainedTokenizerFast, messages: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        encode({"messages": messages}, chat_tokenizer)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_messages_without_a_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="train.jsonl:12: the record holds messages, but the tokenizer has no chat"):
        encode(CONVERSATION, tokenizer)


def test_a_template_that_refuses_the_roles(build_tokenizer) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate\nfrom user') }}{% endif %}x"
    with pytest.raises(UserError, match="^train.jsonl:12: the chat template refuses .*line 1.: roles .* from user"):
        encode(CONVERSATION, build_tokenizer(chat_template=template))


def test_a_template_that_rewrites_what_comes_before_the_question(build_tokenizer) -> None:
    """The turn is found after the question, and its context is the prompt."""
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = build_tokenizer(chat_template=template)
    sample = SFTEncoder().encode(CONVERSATION, "train.jsonl:12", tokenizer)
    question, answer = (turn["content"] for turn in CONVERSATION["messages"][1:3])
    system = CONVERSATION["messages"][0]["content"]
    assert read_runs(sample[0], tokenizer) == [("masked", f"2{system}{question}"), ("loss", f"{answer}</s>")]


def test_a_template_that_rewrites_the_question(build_tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}{% endfor %}"
    with pytest.raises(UserError, match="train.jsonl:12: message 3: the chat template rewrites earlier turns"):
        encode(CONVERSATION, build_tokenizer(chat_template=template))


def test_a_text_with_a_marker_where_the_response_begins(build_tokenizer) -> None:
    tokenizer = build_tokenizer(puts_bos=True)
    options = {"response_marker": "### Answer:"}
    text = "### Question: ### Answer: or not?\n### Answer: Eight."
    runs = [
        ("masked", "<s>### Question: ### Answer: or not?\n### Answer:"),
        ("loss", " Eight.</s>"),
    ]
    for written in (text, f"{text}</s>", f"<s>{text}</s>\n"):
        assert read_runs(encode({"text": written}, tokenizer, **options), tokenizer) == runs
    assert encode({"body": text}, tokenizer, text_field="body", **options) == encode(
        {"text": text}, tokenizer, **options
    )
    with_pair = encode(RECORD | {"text": text}, tokenizer, **options)
    assert with_pair == encode(RECORD, tokenizer)


@pytest.mark.parametrize("text", ["no marker", "### Answer:", "### Answer: \n", "### Answer: </s>"])
def test_a_text_without_a_response(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    with pytest.raises(UserError, match="train.jsonl:12: field 'text' has nothing after data.response_marker='### A"):
        encode({"text": text}, tokenizer, response_marker="### Answer:")
    with pytest.raises(UserError, match="^data.response_marker is empty"):
        SFTEncoder(response_marker="")
