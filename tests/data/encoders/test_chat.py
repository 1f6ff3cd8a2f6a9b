"""Conversations: layouts, and what every bad one says. Which tokens carry loss is in `test_masks.py`."""

import pytest

from data.encoders.chat import ChatEncoder, split_messages
from data.encoders.sample import Sample
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


def encode(record: dict, tokenizer, **options: str) -> Sample:
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


def test_another_field(chat_tokenizer) -> None:
    expected = encode({"messages": MESSAGES}, chat_tokenizer)
    assert encode({"talk": MESSAGES, "messages": "no"}, chat_tokenizer, messages_field="talk") == expected


def turns(*roles: str) -> dict:
    return {"messages": [{"role": role, "content": "text"} for role in roles]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "chat.jsonl:7: no field 'messages', nor those of ShareGPT ('conversations') or Alpaca"),
        ({"prompt": "a"}, "the record has 'prompt'; set data.messages_field"),
        (turns("user"), "chat.jsonl:7: no assistant turn among the messages"),
        (
            turns("system", "assistant"),
            "chat.jsonl:7: message 2 is an assistant turn behind system, where only user or tool may",
        ),
        (turns("user", "user", "assistant"), "chat.jsonl:7: message 2 is a user turn behind user"),
        (turns("user", "assistant", "assistant"), "chat.jsonl:7: message 3 is an assistant turn behind assistant"),
        (turns("user", "system", "assistant"), "message 2 is a system turn behind user, where only nothing may stand"),
        (turns("tool", "assistant"), "chat.jsonl:7: message 1 is a tool turn behind nothing"),
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


# As those of Qwen 3, which shows thoughts in the last turn alone, and Phi-3, which puts the eos token behind the
# conversation, not behind a turn
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% else %}</s>{% endif %}"
)


def test_a_template_that_shows_earlier_turns_without_thoughts_trains_the_last(build_tokenizer) -> None:
    tokenizer = build_tokenizer(eos_token="<|im_end|>", chat_template=QWEN3)
    pieces = ChatEncoder().split({"messages": MESSAGES}, "chat.jsonl:7", tokenizer)
    assert [text for text, is_target in pieces if is_target] == ["<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert pieces[0] == (
        tokenizer.apply_chat_template(MESSAGES[:-1], tokenize=False, add_generation_prompt=True),
        False,
    )


def test_an_eos_token_behind_the_conversation_alone(build_tokenizer) -> None:
    tokenizer = build_tokenizer(chat_template=PHI3)
    pieces = ChatEncoder().split({"messages": MESSAGES}, "chat.jsonl:7", tokenizer)
    assert [text for text, is_target in pieces if is_target] == ["Eight.<end>\n", "Yes.<end>\n</s>"]
    assert "".join(text for text, _ in pieces) == tokenizer.apply_chat_template(MESSAGES, tokenize=False)


@pytest.mark.parametrize("template", [QWEN3, PHI3])
def test_turns_before_the_answers_are_no_targets(build_tokenizer, template: str) -> None:
    tokenizer = build_tokenizer(eos_token="<|im_end|>" if template is QWEN3 else "</s>", chat_template=template)
    pieces = split_messages(MESSAGES, "chat.jsonl:7", tokenizer, first_target=4)
    assert ["Yes." in text for text, is_target in pieces if is_target] == [True]
