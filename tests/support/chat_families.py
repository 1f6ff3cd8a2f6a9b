"""Chat templates in the manner of the families that publish one, written for the tests, and conversations for them.

Guillemets mark what the model has to generate of a turn, by whoever wrote the template here: a judge that knows nothing
of how `data/encoders` finds it. What a template is called with has no guillemets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OPEN, CLOSE = "\u00ab", "\u00bb"
Turn = dict[str, Any]


def each(body: str, prompt: str, start: str = "", turns: str = "messages") -> str:
    """A template that writes `start`, the body of each turn `m`, and the prompt of the assistant."""
    return (
        start
        + "{% for m in "
        + turns
        + " %}"
        + body
        + "{% endfor %}{% if add_generation_prompt %}"
        + prompt
        + "{% endif %}"
    )


def by_role(**bodies: str) -> str:
    """The body of a turn by its role; other roles are refused."""
    cases = "".join(
        ("{% if" if number == 0 else "{% elif") + f" m.role == '{role}' %}}{body}"
        for number, (role, body) in enumerate(bodies.items())
    )
    return cases + "{% else %}{{ raise_exception('no form for the role ' + m.role) }}{% endif %}"


NO_CALLS = "{% if m.tool_calls %}{{ raise_exception('no form for tool calls') }}{% endif %}"
TEXT = "{{ m.content }}"
CHATML = by_role(
    system="<|im_start|>system\n{{ m.content }}<|im_end|>\n",
    user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
    assistant=NO_CALLS + "<|im_start|>assistant\n\u00ab{{ m.content }}<|im_end|>\u00bb\n",
)
CHATML_PROMPT = "<|im_start|>assistant\n"
# A tool turn as Qwen's: in a user turn, several of them in one.
QWEN_TOOL = (
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
QWEN_CALLS = (
    "{% for call in m.tool_calls %}{% if not loop.first or m.content %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
XML_CALLS = (
    "{% for call in m.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>\n{% endfor %}"
)
LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)
NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}"
NO_TOOLS = "{% if tools %}{{ raise_exception('no form for tools') }}{% endif %}"


@dataclass(frozen=True)
class Family:
    """A family's template. marked: with guillemets. eos: the tokenizer's. stops: those of generation_config.json.
    special: further special tokens. call_stop, turn_stop: what ends a turn where the template writes it with the next
    one. switch: the variable that turns reasoning on and off. truth: a marked template for the judge where the
    template drops of a last turn what the model has to generate. as_text: arguments are joined with text. hides: the
    template has no form for reasoning."""

    marked: str
    eos: str
    stops: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    bos: str | None = None
    call_stop: str = ""
    turn_stop: str = ""
    switch: str | None = None
    truth: str | None = None
    as_text: bool = False
    hides: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        return unmark(self.marked)


def unmark(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


LLAMA3 = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
GLM_ASSISTANT = (
    "<|assistant|>{% if m.reasoning_content and loop.index0 > ns.last %}\u00ab"
    "{{ '\n<think>' + m.reasoning_content + '</think>' }}"
    "{% elif loop.last and enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}\u00ab"
    "{% else %}\u00ab{{ '\n<think></think>' }}{% endif %}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}\n"
    "{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>\n"
    "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}\u00bb"
)
GPT_OSS_ASSISTANT = (
    "{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one tool call per message') }}{% endif %}"
    "<|start|>assistant\u00ab{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>\u00bb"
    "{% elif loop.last and not add_generation_prompt %}<|start|>assistant\u00ab{% if m.thinking %}<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}<|return|>\u00bb"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
)
DEEPSEEK_CALLS = (
    "<|calls_begin|>{% for call in m.tool_calls %}<|call_begin|>{{ call.type + '<|sep|>' + call.function.name }}\n"
    "```json\n{{ '' + call.function.arguments }}\n```<|call_end|>{% endfor %}<|calls_end|><|eos|>"
)
DEEPSEEK_ANSWER = "{{ m.content.split('</think>')[-1] | trim }}<|eos|>"
# What DeepSeek's prompt opens, the model has to close; the template shows it of no turn.
DEEPSEEK_OPENED = "<think>\n\u00ab{{ m.reasoning_content or '' }}\n</think>\n\n{% else %}\u00ab{% endif %}"
MISTRAL_CALLS = (
    "[TOOL_CALLS] [{% for call in m.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('ids of tool calls have 9 characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)
GRANITE_ROLE = "<|start_of_role|>{{ m.role }}<|end_of_role|>"


def deepseek(assistant: str, tool: str, opened: str, truth: bool) -> str:
    condition = "loop.last" if truth else "false"
    shown = "<|Assistant|>{% if " + condition + " %}" + opened if truth else "<|Assistant|>\u00ab"
    return each(
        by_role(system="", user="<|User|>{{ m.content }}", assistant=shown + assistant + "\u00bb", tool=tool),
        "<|Assistant|><think>\n",
        "<|bos|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
    )


def mistral(shows_system: str) -> str:
    user = (
        "{% if tools and loop.index0 == ns.last - messages | length + turns | length %}[AVAILABLE_TOOLS] "
        "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {% if system and " + shows_system + " %}{{ system + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    )
    assistant = "\u00ab{% if m.tool_calls %}" + MISTRAL_CALLS + "{% else %} {{ m.content }}{% endif %}</s>\u00bb"
    tool = '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    return each(by_role(user=user, assistant=assistant, tool=tool), "", "<s>" + LAST_USER + SYSTEM_FIRST, "turns")


DEEPSEEK_V3 = "{% if m.tool_calls %}" + DEEPSEEK_CALLS + "{% else %}" + DEEPSEEK_ANSWER + "{% endif %}"
DEEPSEEK_TOOL = "<|output_begin|>{{ m.content }}<|output_end|>"
FAMILIES = {
    "ChatML (Yi)": Family(each(CHATML, CHATML_PROMPT, NO_TOOLS), "<|im_end|>", special=("<|im_start|>",), hides=True),
    "Command R": Family(
        each(
            by_role(
                system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
                user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
                assistant=NO_CALLS
                + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>\u00ab{{ m.content }}<|END_OF_TURN_TOKEN|>\u00bb",
            ),
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "<BOS_TOKEN>" + NO_TOOLS,
        ),
        "<|END_OF_TURN_TOKEN|>",
        special=("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        bos="<BOS_TOKEN>",
        hides=True,
    ),
    "DeepSeek-R1 distilled": Family(
        deepseek(NO_CALLS + DEEPSEEK_ANSWER, "", "", False),
        "<|eos|>",
        special=("<|User|>", "<|Assistant|>"),
        bos="<|bos|>",
        truth=deepseek(NO_CALLS + DEEPSEEK_ANSWER, "", DEEPSEEK_OPENED, True),
    ),
    "DeepSeek-V3": Family(
        deepseek(DEEPSEEK_V3, DEEPSEEK_TOOL, "", False),
        "<|eos|>",
        special=("<|User|>", "<|Assistant|>", "<|calls_begin|>", "<|calls_end|>", "<|call_begin|>", "<|call_end|>"),
        bos="<|bos|>",
        truth=deepseek(DEEPSEEK_V3, DEEPSEEK_TOOL, DEEPSEEK_OPENED, True),
        as_text=True,
    ),
    "DeepSeek-V3.1": Family(
        each(
            by_role(
                system="{{ m.content }}",
                user="<|User|>{{ m.content }}",
                assistant="<|Assistant|>{% if m.reasoning_content and loop.index0 > ns.last %}<think>\u00ab"
                "{{ m.reasoning_content }}</think>{% else %}</think>\u00ab{% endif %}{{ m.content or '' }}"
                "{% for call in m.tool_calls or [] %}<|call_begin|>{{ call.function.name + '<|sep|>' + call.function."
                "arguments }}<|call_end|>{% endfor %}<|eos|>\u00bb",
                tool=DEEPSEEK_TOOL,
            ),
            "<|Assistant|>{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}",
            "<|bos|>" + LAST_USER,
        ),
        "<|eos|>",
        special=("<|User|>", "<|Assistant|>", "<|call_begin|>", "<|call_end|>", "<|sep|>"),
        bos="<|bos|>",
        switch="thinking",
        as_text=True,
    ),
    "EXAONE": Family(
        each(
            by_role(
                system="[|system|]{{ m.content }}[|endofturn|]\n",
                user="[|user|]{{ m.content }}\n",
                assistant=NO_CALLS + "[|assistant|]\u00ab{{ m.content }}[|endofturn|]\u00bb\n",
            ),
            "[|assistant|]",
            NO_TOOLS,
        ),
        "[|endofturn|]",
        special=("[|user|]", "[|assistant|]", "[|system|]"),
        hides=True,
    ),
    "Falcon": Family(
        each(
            by_role(
                system="System: {{ m.content }}\n",
                user="User: {{ m.content }}\n",
                assistant=NO_CALLS + "Falcon: \u00ab{{ m.content }}\u00bb\n",
            ),
            "Falcon: ",
            NO_TOOLS,
        ),
        "<|endoftext|>",
        turn_stop="<|endoftext|>",
        hides=True,
    ),
    "Gemma 2": Family(
        each(
            by_role(
                user="<start_of_turn>user\n{{ m.content }}<end_of_turn>\n",
                assistant=NO_CALLS + "<start_of_turn>model\n\u00ab{{ m.content }}<end_of_turn>\u00bb\n",
            ),
            "<start_of_turn>model\n",
            "<bos>" + NO_TOOLS,
        ),
        "<eos>",
        stops=("<end_of_turn>",),
        special=("<start_of_turn>",),
        bos="<bos>",
        hides=True,
    ),
    "Gemma 3": Family(
        each(
            by_role(
                user="<start_of_turn>user\n{% if loop.first and system %}{{ system }}\n\n{% endif %}"
                "{{ m.content | trim }}<end_of_turn>\n",
                assistant=NO_CALLS + "<start_of_turn>model\n\u00ab{{ m.content | trim }}<end_of_turn>\u00bb\n",
            ),
            "<start_of_turn>model\n",
            "<bos>" + NO_TOOLS + SYSTEM_FIRST,
            "turns",
        ),
        "<eos>",
        stops=("<end_of_turn>",),
        special=("<start_of_turn>",),
        bos="<bos>",
        hides=True,
    ),
    "GLM-4.5": Family(
        each(
            by_role(
                system="<|system|>\n{{ m.content }}",
                user="<|user|>\n{{ m.content }}{% if enable_thinking is defined and not enable_thinking %}/nothink"
                "{% endif %}",
                assistant=GLM_ASSISTANT,
                tool="{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}\n<tool_response>\n{{ m.content }}"
                "\n</tool_response>",
            ),
            "<|assistant|>" + NO_THINKING + "{{ '\n<think></think>' }}{% endif %}",
            "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
            + LAST_USER,
        ),
        "<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        call_stop="<|observation|>",
        turn_stop="<|user|>",
        switch="enable_thinking",
    ),
    "gpt-oss": Family(
        each(
            by_role(
                user="<|start|>user<|message|>{{ m.content }}<|end|>",
                assistant=GPT_OSS_ASSISTANT,
                tool="<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>",
            ),
            "<|start|>assistant",
            SYSTEM_FIRST + "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
            "{% if system or tools %}<|start|>developer<|message|>{{ system }}{% for tool in tools or [] %}\n"
            "{{ tool | tojson }}{% endfor %}<|end|>{% endif %}",
            "turns",
        ),
        "<|return|>",
        stops=("<|call|>", "<|endoftext|>"),
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    ),
    "Granite 3": Family(
        each(
            by_role(
                system=GRANITE_ROLE + "{{ m.content }}<|end_of_text|>\n",
                user=GRANITE_ROLE + "{{ m.content }}<|end_of_text|>\n",
                assistant=GRANITE_ROLE + "\u00ab{% if m.tool_calls %}<|tool_call|>"
                "{{ m.tool_calls | map(attribute='function') | list | tojson }}{% else %}{% if m.thinking %}"
                "{{ 'Here is my thought process: ' + m.thinking + '\nHere is my response: ' }}{% endif %}"
                "{{ m.content }}{% endif %}<|end_of_text|>\u00bb\n",
                tool="<|start_of_role|>tool_response<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            ),
            "<|start_of_role|>assistant<|end_of_role|>",
            "{% if thinking is defined and thinking %}<|start_of_role|>system<|end_of_role|>Think first.<|end_of_text|>"
            "\n{% endif %}{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n"
            "{% endif %}",
        ),
        "<|end_of_text|>",
        special=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        switch="thinking",
    ),
    "Hunyuan": Family(
        each(
            by_role(
                system="{{ m.content }}<|hy_place|>",
                user="<|hy_User|>{{ m.content }}{% if enable_thinking is defined and not enable_thinking and loop.last"
                " and add_generation_prompt %}{% endif %}",
                assistant=NO_CALLS + "<|hy_Assistant|>{% if loop.last %}{% if m.reasoning_content %}\u00ab<think>\n"
                "{{ m.reasoning_content }}\n</think>\n{% else %}<think>\n\n</think>\n\u00ab{% endif %}<answer>\n"
                "{{ m.content }}\n</answer>{% else %}{{ m.content }}{% endif %}<|hy_eos|>{% if loop.last %}\u00bb"
                "{% endif %}",
            ),
            "<|hy_Assistant|>" + NO_THINKING + "<think>\n\n</think>\n{% endif %}",
            "<|hy_bos|>" + NO_TOOLS,
        ),
        "<|hy_eos|>",
        special=("<|hy_User|>", "<|hy_Assistant|>", "<|hy_place|>"),
        bos="<|hy_bos|>",
        switch="enable_thinking",
    ),
    "InternLM2": Family(
        each(
            by_role(
                system="<|im_start|>system\n{{ m.content }}<|im_end|>\n",
                user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
                assistant="<|im_start|>assistant\n\u00ab{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
                "<|action_start|><|plugin|>\n{{ call.function | tojson }}<|action_end|>{% endfor %}<|im_end|>\u00bb\n",
                tool="<|im_start|>environment name=<|plugin|>\n{{ m.content }}<|im_end|>\n",
            ),
            CHATML_PROMPT,
            "<s>{% if tools %}<|im_start|>system name=<|plugin|>\n{{ tools | tojson }}<|im_end|>\n{% endif %}",
        ),
        "</s>",
        stops=("<|im_end|>",),
        special=("<|im_start|>", "<|plugin|>", "<|action_start|>", "<|action_end|>"),
        bos="<s>",
        hides=True,
    ),
    "Kimi K2": Family(
        each(
            by_role(
                system="<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
                user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
                assistant="<|im_assistant|>assistant<|im_middle|>\u00ab{{ m.content or '' }}{% if m.tool_calls %}"
                "<|calls_begin|>{% for call in m.tool_calls %}<|call_begin|>{{ call.id }}<|argument_begin|>"
                "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
                "{{ call.function.arguments | tojson }}{% endif %}<|call_end|>{% endfor %}<|calls_end|>{% endif %}"
                "<|im_end|>\u00bb",
                tool="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
            ),
            "<|im_assistant|>assistant<|im_middle|>",
            "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}",
        ),
        "[EOS]",
        stops=("<|im_end|>",),
        special=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|call_begin|>", "<|call_end|>"),
        hides=True,
    ),
    "LFM2": Family(
        each(
            by_role(
                system="<|im_start|>system\n{{ m.content }}<|im_end|>\n",
                user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
                assistant="<|im_start|>assistant\n\u00ab{{ m.content or '' }}{% if m.tool_calls %}<|tool_call_start|>["
                "{% for call in m.tool_calls %}{{ call.function.name }}({% for name, value in "
                "call.function.arguments.items() %}{{ name }}='{{ value }}'{% endfor %})"
                "{% if not loop.last %}, {% endif %}{% endfor %}]<|tool_call_end|>{% endif %}<|im_end|>\u00bb\n",
                tool="<|im_start|>tool\n<|tool_response_start|>{{ m.content }}<|tool_response_end|><|im_end|>\n",
            ),
            CHATML_PROMPT,
            "<|startoftext|>{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}",
        ),
        "<|im_end|>",
        special=("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        bos="<|startoftext|>",
        hides=True,
    ),
    "Llama 2": Family(
        each(
            by_role(
                user="<s>[INST] {% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
                "{{ m.content }} [/INST]",
                assistant=NO_CALLS + "\u00ab {{ m.content }} </s>\u00bb",
            ),
            "",
            NO_TOOLS + SYSTEM_FIRST,
            "turns",
        ),
        "</s>",
        bos="<s>",
        hides=True,
    ),
    "Llama 3": Family(
        each(
            by_role(
                system=LLAMA3 + "{{ m.content | trim }}<|eot_id|>",
                user=LLAMA3 + "{{ m.content | trim }}<|eot_id|>",
                assistant=NO_CALLS + LLAMA3 + "\u00ab{{ m.content | trim }}<|eot_id|>\u00bb",
            ),
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|begin_of_text|>" + NO_TOOLS,
        ),
        "<|end_of_text|>",
        stops=("<|eot_id|>",),
        special=("<|start_header_id|>", "<|end_header_id|>"),
        bos="<|begin_of_text|>",
        hides=True,
    ),
    "Llama 3.1": Family(
        each(
            by_role(
                user=LLAMA3 + "{% if loop.first and tools %}{{ tools | tojson }}\n\n{% endif %}"
                "{{ m.content | trim }}<|eot_id|>",
                assistant="{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
                "{{ raise_exception('one tool call at a time') }}{% endif %}"
                + LLAMA3
                + '\u00ab{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
                "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>\u00bb"
                "{% else %}" + LLAMA3 + "\u00ab{{ m.content | trim }}<|eot_id|>\u00bb{% endif %}",
                tool="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>",
            ),
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            SYSTEM_FIRST + "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Today Date: {{ date_string or '26 Jul 2024' }}\n\n{{ system }}<|eot_id|>",
            "turns",
        ),
        "<|eot_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>"),
        special=("<|start_header_id|>", "<|end_header_id|>"),
        bos="<|begin_of_text|>",
        hides=True,
    ),
    "Llama 4": Family(
        each(
            by_role(
                system="<|header_start|>system<|header_end|>\n\n{{ m.content }}<|eot|>",
                user="<|header_start|>user<|header_end|>\n\n{{ m.content }}<|eot|>",
                assistant="<|header_start|>assistant<|header_end|>\n\n\u00ab{{ m.content or '' }}"
                "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|eot|>\u00bb",
                tool="<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>",
            ),
            "<|header_start|>assistant<|header_end|>\n\n",
            "<|begin_of_text|>{% if tools %}<|header_start|>system<|header_end|>\n\n{{ tools | tojson }}<|eot|>"
            "{% endif %}",
        ),
        "<|eot|>",
        stops=("<|end_of_text|>", "<|eom|>"),
        special=("<|header_start|>", "<|header_end|>"),
        bos="<|begin_of_text|>",
        hides=True,
    ),
    "MiniCPM": Family(
        each(
            by_role(user="<User>{{ m.content }}", assistant=NO_CALLS + "<AI>\u00ab{{ m.content }}</s>\u00bb"),
            "<AI>",
            NO_TOOLS + SYSTEM_FIRST + "{{ system }}",
            "turns",
        ),
        "</s>",
        hides=True,
    ),
    "Mistral 7B": Family(
        each(
            by_role(user="[INST] {{ m.content }} [/INST]", assistant=NO_CALLS + "\u00ab{{ m.content }}</s>\u00bb"),
            "",
            "<s>" + NO_TOOLS,
        ),
        "</s>",
        bos="<s>",
        hides=True,
    ),
    "Mistral 7B v0.3": Family(
        mistral("loop.last"),
        "</s>",
        special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        bos="<s>",
        # The system prompt is in the last turn, if that is the user's: at inference.
        truth=mistral("(loop.last or loop.revindex0 == 1)"),
        hides=True,
    ),
    "Mistral Small 3": Family(
        each(
            by_role(
                system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
                user="[INST]{{ m.content }}[/INST]",
                assistant="\u00ab{{ m.content or '' }}{% for call in m.tool_calls or [] %}[TOOL_CALLS]"
                "{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>\u00bb",
                tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
            ),
            "",
            "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}",
        ),
        "</s>",
        special=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"),
        bos="<s>",
        hides=True,
    ),
    "Nemotron 3": Family(
        each(
            by_role(
                system="",
                user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
                assistant="<|im_start|>assistant\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n\u00ab"
                "{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>\u00ab{% endif %}"
                "{{ m.content or '' }}{% if m.tool_calls %}" + XML_CALLS + "{% endif %}<|im_end|>\u00bb\n",
                tool=QWEN_TOOL,
            ),
            "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}",
            "{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}"
            + QWEN_TOOLS
            + LAST_USER,
        ),
        "<|im_end|>",
        special=("<|im_start|>",),
        switch="enable_thinking",
    ),
    "OLMo 2": Family(
        each(
            by_role(
                system="<|system|>\n{{ m.content }}\n",
                user="<|user|>\n{{ m.content }}\n",
                assistant=NO_CALLS + "<|assistant|>\n\u00ab{{ m.content }}<|endoftext|>\u00bb"
                "{% if not loop.last %}\n{% endif %}",
            ),
            "<|assistant|>\n",
            "<|endoftext|>" + NO_TOOLS,
        ),
        "<|endoftext|>",
        bos="<|endoftext|>",
        hides=True,
    ),
    "Phi-3": Family(
        each(
            by_role(
                system="<|system|>\n{{ m.content }}<|end|>\n",
                user="<|user|>\n{{ m.content }}<|end|>\n",
                assistant=NO_CALLS + "<|assistant|>\n\u00ab{{ m.content }}<|end|>\u00bb\n",
            ),
            "<|assistant|>\n",
            NO_TOOLS,
        )
        + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
        "<|endoftext|>",
        stops=("<|end|>", "<|assistant|>"),
        special=("<|system|>", "<|user|>"),
        hides=True,
    ),
    "Phi-4": Family(
        each(
            by_role(
                system="<|im_start|>system<|im_sep|>{{ m.content }}<|im_end|>",
                user="<|im_start|>user<|im_sep|>{{ m.content }}<|im_end|>",
                assistant=NO_CALLS + "<|im_start|>assistant<|im_sep|>\u00ab{{ m.content }}<|im_end|>\u00bb",
            ),
            "<|im_start|>assistant<|im_sep|>",
            NO_TOOLS,
        ),
        "<|endoftext|>",  # its first release's: no file says that <|im_end|> ends a turn
        special=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        hides=True,
    ),
    "Qwen2.5": Family(
        each(
            by_role(
                system="{% if not loop.first %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endif %}",
                user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
                assistant="<|im_start|>assistant\n\u00ab{{ m.content or '' }}" + QWEN_CALLS + "<|im_end|>\u00bb\n",
                tool=QWEN_TOOL,
            ),
            CHATML_PROMPT,
            QWEN_TOOLS,
        ),
        "<|im_end|>",
        stops=("<|endoftext|>",),
        special=("<|im_start|>",),
        hides=True,
    ),
    "Qwen3": Family(
        each(
            by_role(
                system="",
                user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
                assistant="<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
                "{% if m.reasoning_content %}\u00ab<think>\n{{ m.reasoning_content }}\n</think>\n\n{% else %}<think>"
                "\n\n</think>\n\n\u00ab{% endif %}{% else %}\u00ab{% endif %}{{ m.content or '' }}"
                + QWEN_CALLS
                + "<|im_end|>\u00bb\n",
                tool=QWEN_TOOL,
            ),
            CHATML_PROMPT
            + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
            QWEN_TOOLS + LAST_USER,
        ),
        "<|im_end|>",
        stops=("<|endoftext|>",),
        special=("<|im_start|>",),
        switch="enable_thinking",
    ),
    "Qwen3.5": Family(
        each(
            by_role(
                system="",
                user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
                assistant="<|im_start|>assistant\n{% if loop.index0 > ns.last %}{% if m.reasoning_content %}<think>\n"
                "\u00ab{{ m.reasoning_content }}\n</think>\n\n{% else %}<think>\n\n</think>\n\n\u00ab{% endif %}"
                "{% else %}\u00ab{% endif %}{{ m.content or '' }}{% if m.tool_calls %}"
                + XML_CALLS
                + "{% endif %}<|im_end|>\u00bb\n",
                tool=QWEN_TOOL,
            ),
            CHATML_PROMPT + NO_THINKING + "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}",
            QWEN_TOOLS + LAST_USER,
        ),
        "<|im_end|>",
        stops=("<|endoftext|>",),
        special=("<|im_start|>",),
        switch="enable_thinking",
    ),
    "SmolLM3": Family(
        each(
            by_role(
                user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
                assistant="<|im_start|>assistant\n{% if m.reasoning_content %}\u00ab<think>\n{{ m.reasoning_content }}"
                "\n</think>\n{% elif loop.last and enable_thinking is defined and not enable_thinking %}<think>\n\n"
                "</think>\n\u00ab{% else %}\u00ab{% endif %}"
                "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
                "</tool_call>{% endfor %}<|im_end|>\u00bb\n",
                tool="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
            ),
            CHATML_PROMPT
            + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}",
            SYSTEM_FIRST
            + "<|im_start|>system\nReasoning Mode: {% if enable_thinking is defined and not enable_thinking "
            "%}/no_think{% else %}/think{% endif %}\n{{ system }}{% if tools %}{{ tools | tojson }}{% endif %}"
            "<|im_end|>\n",
            "turns",
        ),
        "<|im_end|>",
        special=("<|im_start|>",),
        switch="enable_thinking",
    ),
    "Vicuna": Family(
        each(
            by_role(user="USER: {{ m.content }} ", assistant=NO_CALLS + "ASSISTANT:\u00ab {{ m.content }}</s>\u00bb"),
            "ASSISTANT:",
            NO_TOOLS + SYSTEM_FIRST + "{{ system or 'A chat.' }} ",
            "turns",
        ),
        "</s>",
        hides=True,
    ),
    "Zephyr": Family(
        each(
            by_role(
                system="<|system|>\n{{ m.content }}</s>\n",
                user="<|user|>\n{{ m.content }}</s>\n",
                assistant=NO_CALLS + "<|assistant|>\n\u00ab{{ m.content }}</s>\u00bb\n",
            ),
            "<|assistant|>\n",
            NO_TOOLS,
        ),
        "</s>",
        hides=True,
    ),
}


def user(content: str) -> Turn:
    return {"role": "user", "content": content}


def assistant(content: str, thought: str = "") -> Turn:
    return {"role": "assistant", "content": content} | ({"reasoning_content": thought} if thought else {})


def calls(*cities: str, thought: str = "") -> Turn:
    made = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city}},
        }
        for number, city in enumerate(cities)
    ]
    turn = {"role": "assistant", "content": None, "tool_calls": made}
    return turn | ({"reasoning_content": thought} if thought else {})


def result(content: str, number: int = 0) -> Turn:
    return {"role": "tool", "name": "weather", "tool_call_id": f"call0000{number}", "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ASKED = user("How many legs has a spider?")
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [ASKED, assistant("Eight.")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, ASKED, assistant("Eight.")]},
    "two turns": {"messages": [ASKED, assistant("Eight."), user("A bee?"), assistant("Six.")]},
    "a thought": {"messages": [ASKED, assistant("Eight.", "An arachnid.")]},
    "two thoughts": {
        "messages": [ASKED, assistant("Eight.", "An arachnid."), user("A bee?"), assistant("Six.", "An insect.")]
    },
    "tool call": {
        "tools": TOOLS,
        "messages": [user("Weather in Oslo?"), calls("Oslo"), result("rain"), assistant("It rains.")],
    },
    "parallel calls": {
        "tools": TOOLS,
        "messages": [
            user("Oslo or Rome?"),
            calls("Oslo", "Rome"),
            result("rain"),
            result("sun", 1),
            assistant("Rome."),
            user("Thanks."),
            assistant("You are welcome."),
        ],
    },
    "ends with a call": {
        "tools": TOOLS,
        "messages": [ASKED, assistant("Eight."), user("Weather in Oslo?"), calls("Oslo", thought="Ask the tool.")],
    },
}


def judge(family: Family, record: Mapping[str, Any], tokenizer: Any) -> list[tuple[str, str]]:
    """Returns (context, what the model generates) of each assistant turn, read from the guillemets. Raises whatever the
    template does."""
    answers = []
    for index, turn in enumerate(record["messages"]):
        if turn["role"] != "assistant":
            continue
        thinks = bool(turn.get("reasoning_content"))
        text = tokenizer.apply_chat_template(
            [as_family_reads(family, each) for each in record["messages"][: index + 1]],
            tools=record.get("tools"),
            tokenize=False,
            chat_template=family.truth or family.marked,
            **({family.switch: thinks} if family.switch else {}),
        )
        context, _, generated = text.rpartition(OPEN)
        stop = family.call_stop if turn.get("tool_calls") else family.turn_stop
        answers.append((unmark(context), generated.partition(CLOSE)[0] + stop))
    return answers


def as_family_reads(family: Family, turn: Turn) -> Turn:
    """Returns a turn with reasoning under the family's name, and arguments as the family's template reads them."""
    read = {name: value for name, value in turn.items() if value is not None}
    if "reasoning_content" in read:
        read["thinking"] = read["reasoning_content"]
    if "tool_calls" in read and family.as_text:
        read["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in read["tool_calls"]
        ]
    return read


def list_special(family: Family) -> Sequence[str]:
    tokens = (*family.special, *family.stops, family.eos, family.call_stop, family.turn_stop, family.bos or "")
    return sorted({token for token in tokens if token})


@cache
def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with the special tokens of a family."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list_special(family))
    names = {"eos_token": family.eos, "bos_token": family.bos}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=family.template,
        **{key: token for key, token in names.items() if token},
    )
