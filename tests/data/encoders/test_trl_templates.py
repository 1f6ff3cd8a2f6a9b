"""Published chat templates, where the package trl is installed: its wheel ships them with a `_training` twin, whose
`{% generation %}` tags are the judge of ours. Only its template files are read."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from support.chat_families import CONVERSATIONS
from test_chat import read_targets_in_context
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.encoders.chat import ChatEncoder
from errors import UserError

SPEC = importlib.util.find_spec("trl")
FOLDER = Path(SPEC.origin).parent / "chat_templates" if SPEC and SPEC.origin else None
PICTURES = ("diffusion_gemma", "idefics3", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm")
NAMES = sorted(
    name
    for file in (FOLDER.glob("*_training.jinja") if FOLDER else ())
    if (name := file.stem.removesuffix("_training")) not in PICTURES
)
FIVE = ("one turn", "system", "two turns", "two thoughts", "tool call")
CONTROL = re.compile(r"<\|[^|>\s]+\|>|<\uff5c[^\uff5c>]+\uff5c>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
# Of each family: the tokenizer's eos token, and further ones of its generation_config.json.
STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek_r1_distill": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "deepseekv3": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "gemma": ("<eos>", "<end_of_turn>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "lfm2": ("<|im_end|>",),
    "lfm2_v2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "phi3_5": ("<|endoftext|>", "<|end|>"),
}


@cache
def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    assert FOLDER is not None
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    eos = STOPS.get(name, ("<|im_end|>",))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokens = dict.fromkeys([*eos, "<bos>", *CONTROL.findall(template)])
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos[0], bos_token="<bos>", chat_template=template
    )


# (family, conversation) -> why its training twin marks something else, as docs/data.md says.
OPENED = "the generation prompt opens a thought, which the model has to close; the twin shows the turn without either"
EARLIER = "the twin shows an earlier turn as the history does, without its thought"
ENDS = "an earlier turn ends for the model with <|return|>, though the history shows <|end|>"
BEYOND = "generation has stopped at <|end|> when the template writes <|endoftext|>"
DROPPED = "the template leaves out the tool call, and the record is refused"
WHY = {
    **{(name, each): OPENED for name in ("deepseek_r1_distill", "deepseekv3") for each in FIVE},
    **{(name, each): BEYOND for name in ("phi3", "phi3_5") for each in FIVE},
    **{(name, "two thoughts"): EARLIER for name in NAMES if name.startswith(("glm4", "gptoss", "nemotron_3"))},
    ("gptoss", "two turns"): ENDS,
    **{(name, "tool call"): DROPPED for name in ("deepseek_r1_distill", "lfm2", "llama3", "phi3", "phi3_5")},
}


def read_ours(name: str, record: dict) -> list[tuple[str, str]]:
    tokenizer = build_tokenizer(name)
    made = ChatEncoder(stop_tokens=STOPS.get(name, ("<|im_end|>",))).encode(record, "chat.jsonl:1", tokenizer)
    samples = made if isinstance(made, list) else [made]
    return [turn for sample in samples for turn in read_targets_in_context(sample, tokenizer)]


def read_theirs(name: str, record: dict) -> list[str]:
    """Returns the texts that transformers' own mask marks, by the training twin."""
    assert FOLDER is not None
    tokenizer = build_tokenizer(name)
    encoded = tokenizer.apply_chat_template(
        [
            {**turn, "content": turn["content"] or "", "thinking": turn.get("reasoning_content")}
            for turn in record["messages"]
        ],
        tools=record.get("tools"),
        chat_template=(FOLDER / f"{name}_training.jinja").read_text(encoding="utf-8"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    runs: list[list[int]] = [[]]
    for token, is_target in zip(encoded["input_ids"], encoded["assistant_masks"]):
        if is_target:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def agree(context: str, ours: str, theirs: str) -> bool:
    """Up to white space and the generation prompt, which is the end of the context."""
    context, ours, theirs = ("".join(text.split()) for text in (context, ours, theirs))
    return theirs.endswith(ours) and context.endswith(theirs.removesuffix(ours))


@pytest.mark.skipif(FOLDER is None, reason="the package trl is not installed")
def test_there_are_templates() -> None:
    assert len(NAMES) >= 20 and {name for name, _ in WHY} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_those_of_the_training_twin(name: str) -> None:
    for conversation in FIVE:
        record = CONVERSATIONS[conversation]
        try:
            theirs = read_theirs(name, record)
        except Exception:  # whatever a template raises
            with pytest.raises(UserError):
                read_ours(name, record)
            continue
        if (why := WHY.get((name, conversation))) == DROPPED:
            with pytest.raises(UserError, match="does not show tool call 1 of the turn"):
                read_ours(name, record)
            continue
        ours = read_ours(name, record)
        same = len(ours) == len(theirs) and all(agree(*pair, other) for pair, other in zip(ours, theirs))
        assert same == (why is None), (conversation, why, ours, theirs)
