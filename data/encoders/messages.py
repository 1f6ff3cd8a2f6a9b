"""Messages of records: the layouts that are read, the checks, and the one form in which a chat template gets them.

Four layouts are read, distinguished by the fields of a record: `messages` (role, content), ShareGPT's `conversations`
(from, value), Alpaca's `instruction`, `input`, `output`, and a prompt with its completion, texts or lists of messages.
"""

import json
from collections.abc import Sequence
from typing import Any

from data.encoders.segments import check_text
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
SHAREGPT_CALL = "function_call"  # the role of a turn whose value is the JSON text of a call, or of a list of calls
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    SHAREGPT_CALL: ASSISTANT,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
TURN_FLAGS = ("train", "weight")  # axolotl's and OpenAI's; the template does not see them
ALPACA_FIELDS = ("instruction", "output")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # templates differ in the one that they read
THOUGHT_START, THOUGHT_END = "<think>", "</think>"

MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # of a record
TEXT_PART = "text"  # the only accepted type of a part of a message; ignoring media would train on text about them

Turn = dict[str, Any]


def read_sharegpt(record: dict, location: str) -> list[dict]:
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
        if turn["from"] == SHAREGPT_CALL:
            said = {"tool_calls": _read_calls(turn["value"], f"{location}: turn {number}")}
        else:
            said = {"content": turn["value"]}
        messages.append({"role": role, **said, **flags})
    return messages


def _read_calls(value: object, where: str) -> list[dict]:
    """Return the calls of a turn of ShareGPT. Raises `UserError` naming `where` for what does not name functions."""
    parsed = parse_json(value)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and {"name", "function"} & call.keys() for call in calls):
        raise UserError(
            f"{where} is from '{SHAREGPT_CALL}', so its value must be the JSON text of a call, "
            '{"name": ..., "arguments": {...}}, or of a list of calls; fix or remove the record'
        )
    return calls


def read_alpaca(record: dict, location: str) -> list[dict]:
    """Return `instruction`, followed by `input` where it is given, and `output` as a question and its answer, after
    those of `history`."""
    instruction, output = (check_text(record[field], f"{location}: field '{field}'") for field in ALPACA_FIELDS)
    given = check_text(record.get("input") or "", f"{location}: field 'input'")
    question = f"{instruction}\n\n{given}" if given.strip() else instruction
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise UserError(
            f"{location}: field 'history' must be a list of pairs, [[question, answer], ...]; fix or remove the record"
        )
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for asked, answered in [*history, (question, output)]:
        messages += [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": answered}]
    return messages


def as_messages(value: str | list, role: str) -> list:
    """Return a list of messages as it is, and a text as one message of that role."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def read_tools(value: object, location: str) -> list | None:
    """Return the tools of a record, a list of objects or its JSON text. Raises `UserError` for anything else."""
    tools = parse_json(value)
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{location}: tools must be a list, not {type(tools).__name__}; fix or remove the record")
    parsed = [parse_json(tool) for tool in tools or ()]
    for number, tool in enumerate(parsed, start=1):
        if not isinstance(tool, dict):
            raise UserError(f"{location}: tool {number} must be an object, not {type(tool).__name__}; fix the record")
    return parsed or None


def check_messages(messages: object, location: str, needs_answer: bool = True) -> list[Turn]:
    """Return messages whose roles, order and content can be read, in the form that templates get. needs_answer: an
    assistant turn is among them. Raises `UserError` naming `location` for others."""
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{location}: messages must be a list of objects with a role and a content; fix or remove the record"
        )
    before = ""
    for number, message in enumerate(messages, start=1):
        before = _check_message(message, before, f"{location}: message {number}")
    if needs_answer and not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{location}: no assistant turn among the messages, so no target; remove the record")
    return [normalize_message(message) for message in messages]


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
        after = [_name_turn(name) for name in PREDECESSORS[role] if name]
        allowed = ["as the first message"] * ("" in PREDECESSORS[role]) + [f"after {' or '.join(after)}"] * bool(after)
        place = f"after {_name_turn(before)}" if before else "the first message"
        raise UserError(
            f"{where} is {_name_turn(role)}, {place}; it may only come {' or '.join(allowed)}: fix the order, join the "
            "turns, or remove the record"
        )
    return role


def _name_turn(role: str) -> str:
    return f"{'an' if role == ASSISTANT else 'a'} {role} turn"


def normalize_message(message: Turn) -> Turn:
    """Return a message with its reasoning under every name that templates read, and calls as objects."""
    turn = {name: value for name, value in message.items() if name not in REASONING_FIELDS and value is not None}
    thoughts = [message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)]
    if thought := next((thought for thought in thoughts if thought.strip()), ""):
        turn |= dict.fromkeys(REASONING_FIELDS, thought)
    calls = parse_json(turn.pop("tool_calls", None))
    if calls:
        turn["tool_calls"] = [_normalize_call(call) for call in calls] if isinstance(calls, list) else calls
    return turn


def _normalize_call(call: object) -> object:
    """Return a call in OpenAI's form, its arguments as an object where they are JSON text of one."""
    parsed = parse_json(call)
    if not isinstance(parsed, dict):
        return call
    function = parsed.get("function", {name: parsed[name] for name in ("name", "arguments") if name in parsed})
    if not isinstance(function, dict):
        return call
    if "arguments" in function:
        arguments = parse_json(function["arguments"])
        function = function | {"arguments": arguments if isinstance(arguments, dict) else function["arguments"]}
    others = {name: value for name, value in parsed.items() if name not in ("name", "arguments", "function")}
    return {"type": "function", **others, "function": function}


def parse_json(value: object) -> Any:
    """Return what a JSON text of an object or a list holds, and anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def list_targets(turns: Sequence[Turn], location: str, train_on: TrainOn, first_target: int) -> list[int]:
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


def split_thought(turn: Turn) -> tuple[str, str]:
    """Return the reasoning of a turn, from its field or from tags at the beginning of its content, and the rest of the
    content; both without white space around them, empty where there is none."""
    content = str(turn.get("content") or "").strip()
    if thought := str(turn.get(REASONING_FIELDS[0]) or "").strip():
        return thought, content
    head, end, answer = content.partition(THOUGHT_END)
    return (head.removeprefix(THOUGHT_START).strip(), answer.strip()) if end else ("", content)


def refuse_media(record: dict, location: str) -> None:
    """Raise UserError for a record with a media field."""
    for field in MEDIA_FIELDS:
        if record.get(field):
            raise UserError(
                f"{location}: the record has '{field}', and only text is trained on; remove the record, or the field "
                "if its text makes sense alone"
            )


def refuse_media_parts(content: object, where: str) -> None:
    """Raise UserError for message content in parts of which one is not text."""
    if not isinstance(content, list):
        return
    for part in content:
        kind = part.get("type", TEXT_PART) if isinstance(part, dict) else TEXT_PART
        if kind != TEXT_PART:
            raise UserError(
                f"{where} has a part of type '{kind}', and only text is trained on; remove the record, or the part if "
                "its text makes sense alone"
            )
