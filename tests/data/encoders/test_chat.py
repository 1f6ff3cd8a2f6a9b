"""Conversations: layouts, and errors of bad ones. Which tokens carry loss is in `test_masks.py`."""

import pytest

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder, split_messages
from data.encoders.sft import SFTEncoder
from data.options import RewrittenTurns, TrainOn
from data.sample import IGNORE_INDEX, Sample
from errors import UserError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Legs?"},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
SHAREGPT = [
    {"from": "human", "value": "Legs?"},
    {"from": "gpt", "value": "Eight."},
    {"from": "human", "value": "Sure?"},
    {"from": "gpt", "value": "Yes."},
]


def encode(record: dict, tokenizer, **options: object) -> Sample:
    return ChatEncoder(**options).encode(record, "chat.jsonl:7", tokenizer)


def test_sharegpt_is_the_same_conversation(chat_tokenizer) -> None:
    expected = encode({"messages": MESSAGES}, chat_tokenizer)
    assert encode({"conversations": SHAREGPT, "system": "Be brief."}, chat_tokenizer) == expected
    with_system = [{"from": "system", "value": "Be brief."}, *SHAREGPT]
    assert encode({"conversations": with_system}, chat_tokenizer) == expected


def test_alpaca_is_a_question_and_its_answer(chat_tokenizer) -> None:
    asked = encode({"messages": [{"role": "user", "content": "Count.\n\nLegs"}, MESSAGES[2]]}, chat_tokenizer)
    assert encode({"instruction": "Count.", "input": "Legs", "output": "Eight."}, chat_tokenizer) == asked
    without = encode({"messages": [{"role": "user", "content": "Count."}, MESSAGES[2]]}, chat_tokenizer)
    for nothing in ({}, {"input": ""}, {"input": None}):
        assert encode({"instruction": "Count.", "output": "Eight.", **nothing}, chat_tokenizer) == without


def test_the_history_of_alpaca_comes_before_the_question(chat_tokenizer) -> None:
    record = {"instruction": "Sure?", "output": "Yes.", "system": "Be brief.", "history": [["Legs?", "Eight."]]}
    assert encode(record, chat_tokenizer) == encode({"messages": MESSAGES}, chat_tokenizer)
    without = encode({key: value for key, value in record.items() if key != "history"}, chat_tokenizer)
    for nothing in ([], None):
        assert encode({**record, "history": nothing}, chat_tokenizer) == without
    for wrong in ("Legs?", [["Legs?"]], [{"Legs?": "Eight."}]):
        with pytest.raises(
            UserError, match=r"^chat.jsonl:7: field 'history' must be a list of pairs, \[\[question, ans"
        ):
            encode({**record, "history": wrong}, chat_tokenizer)


def test_a_prompt_and_its_completion_are_a_question_and_its_answer(chat_tokenizer) -> None:
    asked = encode({"messages": [{"role": "user", "content": "Count."}, MESSAGES[2]]}, chat_tokenizer)
    assert encode({"prompt": "Count.", "completion": "Eight."}, chat_tokenizer) == asked
    named = {"prompt_field": "question", "completion_field": "answer"}
    assert encode({"question": "Count.", "answer": "Eight."}, chat_tokenizer, **named) == asked


def test_another_field(chat_tokenizer) -> None:
    expected = encode({"messages": MESSAGES}, chat_tokenizer)
    assert encode({"talk": MESSAGES, "messages": "no"}, chat_tokenizer, messages_field="talk") == expected


def read_targets(record: dict, tokenizer, **options: object) -> tuple[str, str]:
    """Return (the trained text, the whole text)."""
    sample = encode(record, tokenizer, **options)
    trained = [label for label in sample["labels"] if label != IGNORE_INDEX]
    return tokenizer.decode(trained), tokenizer.decode(sample["input_ids"])


def test_the_last_turn_alone(chat_tokenizer) -> None:
    trained, text = read_targets({"messages": MESSAGES}, chat_tokenizer, train_on=TrainOn.last_turn)
    assert trained == "Yes.<|im_end|>" and "Eight.<|im_end|>" in text
    sft = SFTEncoder(train_on=TrainOn.last_turn).encode({"messages": MESSAGES}, "chat.jsonl:7", chat_tokenizer)
    assert sft == encode({"messages": MESSAGES}, chat_tokenizer, train_on=TrainOn.last_turn)


@pytest.mark.parametrize("train_on", list(TrainOn))
@pytest.mark.parametrize("flag, yes, no", [("train", True, False), ("weight", 1, 0)])
def test_a_flag_of_a_turn_sets_whether_it_is_trained_on(
    chat_tokenizer, train_on, flag: str, yes: object, no: object
) -> None:
    marked = [
        MESSAGES[0],
        {**MESSAGES[1], "weight": 1},
        {**MESSAGES[2], flag: yes},
        MESSAGES[3],
        {**MESSAGES[4], flag: no},
    ]
    trained, text = read_targets({"messages": marked}, chat_tokenizer, train_on=train_on)
    assert trained == "Eight.<|im_end|>" and text.endswith("Eight.<|im_end|>")  # and nothing after the last target
    spoken = [{**SHAREGPT[0]}, {**SHAREGPT[1], flag: no}, *SHAREGPT[2:]]
    assert read_targets({"conversations": spoken}, chat_tokenizer, train_on=train_on)[0] == "Yes.<|im_end|>"


def test_flags_do_not_reach_the_template(chat_tokenizer, build_tokenizer) -> None:
    shows = "{% for m in messages %}{{ m.keys() | list }}<|im_end|>{% endfor %}"
    tokenizer = build_tokenizer(eos_token="<|im_end|>", chat_template=shows)
    text = read_targets({"messages": [MESSAGES[1], {**MESSAGES[2], "train": True}]}, tokenizer)[1]
    assert "role" in text and "train" not in text


@pytest.mark.parametrize(
    "flags, message",
    [
        ({2: {"train": "yes"}}, "message 3 has train=yes; true or false say whether it is trained on"),
        ({2: {"weight": 0.5}}, "message 3 has weight=0.5; 0 or 1 say whether it is trained on"),
        ({1: {"train": True}}, "message 2 has train true, but only assistant turns are trained on"),
        ({2: {"train": True, "weight": 0}}, "message 3 says both that it is trained on and that it is not"),
        ({2: {"train": False}, 4: {"weight": 0}}, "none of the assistant turns is to be trained on, so no target"),
    ],
)
def test_invalid_flags(chat_tokenizer, flags: dict, message: str) -> None:
    messages = [{**turn, **flags.get(index, {})} for index, turn in enumerate(MESSAGES)]
    with pytest.raises(UserError, match=f"^chat.jsonl:7: {message}"):
        encode({"messages": messages}, chat_tokenizer)


def turns(*roles: str) -> dict:
    return {"messages": [{"role": role, "content": "text"} for role in roles]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "chat.jsonl:7: no field 'messages', nor those of ShareGPT ('conversations'), Alpaca"),
        ({"prompt": "a"}, "the record has 'prompt'; set data.messages_field"),
        (turns("user"), "chat.jsonl:7: no assistant turn among the messages"),
        (
            turns("system", "assistant"),
            "chat.jsonl:7: message 2 is an assistant turn, after a system turn; it may only come after a",
        ),
        (
            turns("user", "user", "assistant"),
            "chat.jsonl:7: message 2 is a user turn, after a user turn; it may only",
        ),
        (
            turns("user", "assistant", "assistant"),
            "chat.jsonl:7: message 3 is an assistant turn, after an assis",
        ),
        (
            turns("user", "system", "assistant"),
            "is a system turn, after a user turn; it may only come as the first message: fix",
        ),
        (
            turns("tool", "assistant"),
            "chat.jsonl:7: message 1 is a tool turn, the first message; it may only",
        ),
        (
            turns("user", "bot"),
            "chat.jsonl:7: message 2 has the role 'bot'; known are system, developer, user, assistant, tool",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]},
            "message 2 must be an object with a role",
        ),
        ({"conversations": "a"}, "chat.jsonl:7: conversations must be a list of objects with a from and a value"),
        (
            {"conversations": [{"from": "dog", "value": "a"}]},
            "chat.jsonl:7: turn 1 is from 'dog'; known are system, human",
        ),
        ({"conversations": [{"from": "human", "value": 1}]}, "chat.jsonl:7: message 1: content must be text, not int"),
        ({"instruction": "a", "output": ""}, "chat.jsonl:7: message 2 is an empty assistant turn"),
        ({"instruction": "a", "output": None}, "chat.jsonl:7: field 'output' must be text, not NoneType"),
        ({"messages": MESSAGES, "tools": "x"}, "chat.jsonl:7: tools must be a list, not str"),
        ({"messages": MESSAGES, "tools": [{}, "x"]}, "chat.jsonl:7: tool 2 must be an object, not str; fix the record"),
    ],
)
def test_bad_conversations(chat_tokenizer, record: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        encode(record, chat_tokenizer)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_without_a_template(tokenizer) -> None:
    with pytest.raises(
        UserError, match="chat.jsonl:7: the record holds messages, but the tokenizer has no chat template"
    ):
        encode({"messages": MESSAGES}, tokenizer)


# Like those of Qwen 3, which shows reasoning in the last turn alone, and Phi-3, which puts the eos token after the
# conversation, not after a turn
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% else %}</s>{% endif %}"
)


def read_samples(tokenizer, **options: object) -> list[list[tuple[str, str]]]:
    """Return (context, target) of each target turn of each sample."""
    samples = ChatEncoder(**options).encode({"messages": MESSAGES}, "chat.jsonl:7", tokenizer)
    return [
        read_targets_in_context(sample, tokenizer) for sample in (samples if isinstance(samples, list) else [samples])
    ]


def read_targets_in_context(sample: Sample, tokenizer) -> list[tuple[str, str]]:
    input_ids, labels = sample["input_ids"], sample["labels"]
    starts = [i for i, label in enumerate(labels) if label != IGNORE_INDEX and labels[i - 1] == IGNORE_INDEX]
    ends = [next((j for j in range(i, len(labels)) if labels[j] == IGNORE_INDEX), len(labels)) for i in starts]
    return [
        (tokenizer.decode(input_ids[:start]), tokenizer.decode(labels[start:end])) for start, end in zip(starts, ends)
    ]


def render_prompt(tokenizer, num_turns: int) -> str:
    return tokenizer.apply_chat_template(MESSAGES[:num_turns], tokenize=False, add_generation_prompt=True)


def test_a_template_that_shows_earlier_turns_without_reasoning_makes_a_sample_of_each(build_tokenizer) -> None:
    tokenizer = build_tokenizer(eos_token="<|im_end|>", chat_template=QWEN3)
    first, last = (
        (render_prompt(tokenizer, turns), f"<think>\n\n</think>\n\n{answer}<|im_end|>")
        for turns, answer in ((2, "Eight."), (4, "Yes."))
    )
    assert read_samples(tokenizer) == [[first], [last]]
    assert read_samples(tokenizer, rewritten_turns=RewrittenTurns.last) == [[last]]
    ((kept, end),) = read_samples(tokenizer, rewritten_turns=RewrittenTurns.keep)
    assert kept == (first[0], "Eight.<|im_end|>") and end == last


def test_an_eos_after_the_conversation_alone(build_tokenizer) -> None:
    """Generation stops at it after any turn, though a next turn is shown without it."""
    tokenizer = build_tokenizer(chat_template=PHI3)
    ((first, last),) = read_samples(tokenizer)
    assert first == (render_prompt(tokenizer, 2), "Eight.<end>\n</s>")
    assert last == (render_prompt(tokenizer, 4), "Yes.<end>\n</s>")


@pytest.mark.parametrize("template", [QWEN3, PHI3])
def test_turns_before_the_answers_are_not_targets(build_tokenizer, template: str) -> None:
    tokenizer = build_tokenizer(eos_token="<|im_end|>" if template is QWEN3 else "</s>", chat_template=template)
    split = split_messages(MESSAGES, {}, "chat.jsonl:7", tokenizer, ChatEncoder(), ContentCounts(), 4)
    assert [next("Yes." in piece.content for piece in pieces if piece.is_target) for pieces in split] == [True]
