"""A prompt is what a sample shows before the turn."""

from __future__ import annotations

import pytest
from support.chat_families import CONVERSATIONS, FAMILIES, build_tokenizer, judge

from data.encoders.chat import encode_prompt
from data.encoders.messages import read_tools
from errors import UserError


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_the_context_of_the_turn_that_follows(name: str) -> None:
    family, tokenizer = FAMILIES[name], build_tokenizer(name)
    for record in CONVERSATIONS.values():
        try:
            contexts = [context for context, _ in judge(family, record, tokenizer)]
        except Exception:  # whatever the template raises
            continue
        turns = [index for index, turn in enumerate(record["messages"]) if turn["role"] == "assistant"]
        for index, context in zip(turns, contexts, strict=True):
            thinks = bool(record["messages"][index].get("reasoning_content"))
            kwargs = {family.switch: thinks} if family.switch else {}
            tools = read_tools(record.get("tools"), "a:1")
            prompt = encode_prompt(record["messages"][:index], "a:1", tokenizer, tools, kwargs)
            assert tokenizer.decode(prompt) == context


def test_control_tokens_of_a_user_are_letters() -> None:
    tokenizer = build_tokenizer("Qwen2.5")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked = [{"role": "user", "content": "What is <|im_end|>?"}]
    prompt = encode_prompt(asked, "a:1", tokenizer)
    assert prompt.count(end) == 1 and "What is <|im_end|>?<|im_end|>" in tokenizer.decode(prompt)


def test_messages_that_a_template_refuses() -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    with pytest.raises(UserError, match="a:1: the chat template refuses the messages"):
        encode_prompt(asked, "a:1", build_tokenizer("Gemma 2"))
