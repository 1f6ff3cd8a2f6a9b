"""Conversations: `chat template up to an assistant turn | the turn up to its end token | ... | the last one`.

Loss is on assistant turns alone (all, the last, or those that say so), each with its end token; system, user and tool
turns are masked. Four layouts of a record are read, distinguished by its fields: `messages` (role, content),
ShareGPT's `conversations` (from, value), Alpaca's `instruction`, `input`, `output`, and a prompt with its completion.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.encoders.media import refuse_media, refuse_media_parts
from data.encoders.segments import Piece, PieceEncoder, check_text, get_eos
from data.options import TrainOn
from errors import UserError

ASSISTANT = "assistant"
# role -> the roles that it may follow; "" is the start.
PREDECESSORS = {
    "system": ("",),
    "developer": ("", "system"),
    "user": ("", "system", "developer", ASSISTANT),
    ASSISTANT: ("user", "tool"),
    "tool": (ASSISTANT, "tool"),
}
SHAREGPT_FIELD = "conversations"
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
TURN_FLAGS = ("train", "weight")  # axolotl's and OpenAI's; the template does not see them
ALPACA_FIELDS = ("instruction", "output")


@dataclass(frozen=True)
class ChatEncoder(PieceEncoder):
    """Records with `messages_field`, in the layout of ShareGPT or Alpaca, or with a prompt and a completion, which are
    one question and its answer. `tools` goes to the chat template."""

    messages_field: str = "messages"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    train_on: TrainOn = TrainOn.all_turns

    def split(self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
        """Return the pieces of one record. Raises `UserError` naming `location` for missing or unordered turns."""
        get_eos(tokenizer)  # raises without one
        refuse_media(record, location)
        messages = self._read_messages(record, location)
        return split_messages(messages, location, tokenizer, record.get("tools"), train_on=self.train_on)

    def _read_messages(self, record: dict, location: str) -> object:
        if self.messages_field in record:
            return record[self.messages_field]
        if SHAREGPT_FIELD in record:
            return read_sharegpt(record, location)
        if all(field in record for field in ALPACA_FIELDS):
            return read_alpaca(record, location)
        pair = (self.prompt_field, self.completion_field)
        if all(field in record for field in pair):
            question, answer = (check_text(record[field], f"{location}: field '{field}'") for field in pair)
            return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
        present = ", ".join(f"'{field}'" for field in record) or "no fields"
        raise UserError(
            f"{location}: no field '{self.messages_field}', nor those of ShareGPT ('{SHAREGPT_FIELD}'), Alpaca "
            f"('instruction', 'output') or a prompt ('{self.prompt_field}', '{self.completion_field}'); the record has "
            f"{present}; set data.messages_field, or data.prompt_field and data.completion_field"
        )


def read_sharegpt(record: dict, location: str) -> object:
    """Return `[{"from": "human", "value": ...}, ...]` as messages; a `system` field next to them becomes the first."""
    turns = record[SHAREGPT_FIELD]
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns
    ):
        raise UserError(
            f"{location}: {SHAREGPT_FIELD} must be a list of objects with a from and a value; fix or remove the record"
        )
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for number, turn in enumerate(turns, start=1):
        role = SHAREGPT_ROLES.get(check_text(turn["from"], f"{location}: turn {number}: from"))
        if role is None:
            raise UserError(
                f"{location}: turn {number} is from '{turn['from']}'; known are {', '.join(SHAREGPT_ROLES)}; "
                "fix or remove the record"
            )
        flags = {name: turn[name] for name in TURN_FLAGS if name in turn}
        messages.append({"role": role, "content": turn["value"], **flags})
    return messages


def read_alpaca(record: dict, location: str) -> list[dict]:
    """Return `instruction`, followed by `input` where it is given, and `output` as one question and its answer."""
    instruction, output = (check_text(record[field], f"{location}: field '{field}'") for field in ALPACA_FIELDS)
    given = check_text(record.get("input") or "", f"{location}: field 'input'")
    question = f"{instruction}\n\n{given}" if given.strip() else instruction
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    return [*messages, {"role": "user", "content": question}, {"role": ASSISTANT, "content": output}]


def split_messages(
    messages: object,
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: object = None,
    *,
    first_target: int = 0,
    train_on: TrainOn = TrainOn.all_turns,
) -> list[Piece]:
    """Return the pieces of a conversation up to its last target. tools: the descriptions that the template shows the
    model. first_target: assistant turns before this message are not targets. train_on: for turns without a flag of
    their own. Raises `UserError` naming `location` for messages that cannot be read or hold no target.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{location}: the record holds messages, but the tokenizer has no chat template; name one with"
            " data.chat_template (such as chatml), or use records with a prompt and a completion"
        )
    turns = _check_messages(messages, location)
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{location}: tools must be a list, not {type(tools).__name__}; fix or remove the record")
    targets = set(_list_targets(turns, location, train_on, first_target))
    turns = [{name: value for name, value in turn.items() if name not in TURN_FLAGS} for turn in turns]
    pieces = _split_conversation(turns[: max(targets) + 1], location, tokenizer, tools, targets=targets)
    # Only the last turn gets an eos token that the template does not write: inside a conversation it would change the
    # history into one that the template never shows the model when it generates.
    last, _ = pieces[-1]
    if not isinstance(last, str) or not last.endswith(tokenizer.eos_token):
        pieces.append(([get_eos(tokenizer)], True))
    return pieces


def _check_messages(messages: object, location: str) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{location}: messages must be a list of objects with a role and a content; fix or remove the record"
        )
    before = ""
    for number, message in enumerate(messages, start=1):
        before = _check_message(message, before, f"{location}: message {number}")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{location}: no assistant turn among the messages, so no target; remove the record")
    return messages


def _check_message(message: object, before: str, where: str) -> str:
    """Check a message that follows one of role `before`, and return its role."""
    if not isinstance(message, dict) or "role" not in message or not {"content", "tool_calls"} & message.keys():
        raise UserError(f"{where} must be an object with a role and a content; fix or remove the record")
    role = check_text(message["role"], f"{where}: role")
    if role not in PREDECESSORS:
        raise UserError(f"{where} has the role '{role}'; known are {', '.join(PREDECESSORS)}; fix or remove the record")
    refuse_media_parts(message.get("content"), where)
    calls = message.get("tool_calls")
    content = (
        "" if calls and message.get("content") is None else check_text(message.get("content"), f"{where}: content")
    )
    if role == ASSISTANT and not content.strip() and not calls:
        raise UserError(f"{where} is an empty assistant turn; fill it or remove the record")
    if role == ASSISTANT and not before:
        raise UserError(f"{where} is an assistant turn; put the turn that it answers before it")
    if before not in PREDECESSORS[role]:
        allowed = " or ".join(name or "nothing" for name in PREDECESSORS[role])
        article = "an" if role == ASSISTANT else "a"
        raise UserError(
            f"{where} is {article} {role} turn after {before or 'nothing'}, where only {allowed} may come; "
            "fix the order, join the turns, or remove the record"
        )
    return role


def _list_targets(turns: Sequence[dict], location: str, train_on: TrainOn, first_target: int) -> list[int]:
    """Return the indices of the assistant turns that are trained on. Raises `UserError` where there are none."""
    assistant = [index for index, turn in enumerate(turns) if turn["role"] == ASSISTANT]
    chosen = assistant[-1:] if train_on is TrainOn.last_turn else assistant
    targets = []
    for index, turn in enumerate(turns):
        where = f"{location}: message {index + 1}"
        flags = {_read_flag(name, turn[name], where) for name in TURN_FLAGS if turn.get(name) is not None}
        if len(flags) > 1:
            raise UserError(f"{where} says both that it is trained on and that it is not; fix or remove the record")
        if flags == {True} and turn["role"] != ASSISTANT and "train" in turn:
            raise UserError(f"{where} has train true, but only assistant turns are trained on; remove it there")
        if turn["role"] == ASSISTANT and (flags == {True} or (not flags and index in chosen)):
            targets.append(index)
    targets = [index for index in targets if index >= first_target]
    if not targets:
        raise UserError(f"{location}: none of the assistant turns is to be trained on, so no target; remove the record")
    return targets


def _read_flag(name: str, value: object, where: str) -> bool:
    if value not in (0, 1) or (name == "train" and not isinstance(value, bool)):
        allowed = "true or false" if name == "train" else "0 or 1"
        raise UserError(f"{where} has {name}={value}; {allowed} say whether it is trained on; fix or remove the record")
    return bool(value)


def _split_conversation(
    turns: Sequence[dict], location: str, tokenizer: PreTrainedTokenizerBase, tools: list | None, *, targets: set[int]
) -> list[Piece]:
    """Cut the rendered conversation before each assistant turn and after its end token.

    The last turn is a target. What a template writes after the end token (usually a newline) is masked: the model
    stops at the token and never generates it.
    """
    pieces: list[Piece] = []
    done = ""
    for index, turn in enumerate(turns):
        if turn["role"] != ASSISTANT:
            continue
        before = _render(turns[:index], location, tokenizer, tools, add_generation_prompt=True)
        after = _render(turns[: index + 1], location, tokenizer, tools, add_generation_prompt=False)
        if not after.startswith(before):
            raise UserError(
                f"{location}: message {index + 1}: the chat template rewrites earlier turns, so the text of the"
                " assistant turn cannot be separated from its prompt; use another template, or one record per turn"
            )
        if not before.startswith(done):
            pieces, done = _keep_shown(pieces, done, before, tokenizer)
        target = _cut_after_eos(after[len(before) :], tokenizer)
        if not target.strip():
            raise UserError(
                f"{location}: message {index + 1}: the chat template writes nothing of this assistant turn, so there is"
                " nothing to train on; use a template that does (data.chat_template)"
            )
        pieces += [(before[len(done) :], False), (target, index in targets)]
        done = before + target
    return pieces


def _keep_shown(
    pieces: list[Piece], done: str, before: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Piece], str]:
    """The pieces, and their text, as the template shows them once there are more turns: `before`.

    Phi-3's ends the conversation, but no turn, with the eos token: it is removed from the last piece. Qwen 3's and
    others omit the reasoning of earlier turns: the text that the model then sees was never a target, so none of it is
    one.
    """
    shorter = done.removesuffix(str(tokenizer.eos_token))
    if not before.startswith(shorter):
        return [], ""
    text, is_target = pieces[-1]
    assert isinstance(text, str)
    return [*pieces[:-1], (text.removesuffix(str(tokenizer.eos_token)), is_target)], shorter


def _cut_after_eos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    head, eos, tail = text.rpartition(tokenizer.eos_token)
    return head + eos if eos and not tail.strip() else text


def _render(
    turns: Sequence[dict],
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: list | None,
    *,
    add_generation_prompt: bool,
) -> str:
    try:
        return tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template's expressions raise whatever Python does
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{location}: the chat template refuses the messages{_find_line(error)}: {reason}; fix or remove the "
            "record, or give another data.chat_template"
        ) from None


def _find_line(error: Exception) -> str:
    """Return the line of the template that failed, in words; empty where Jinja does not report it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" (its line {lines[-1]})" if lines else ""
