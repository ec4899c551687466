"""Calls that a chat template wrote are read again as the same calls, however they are cut."""

from __future__ import annotations

import json
import os

import pytest

transformers = pytest.importorskip("transformers")

from allspark.chat_template import TokenizerTemplate  # noqa: E402
from allspark.chat_template.jinja_syntax import template_facts  # noqa: E402
from allspark.serve.parsers import (  # noqa: E402
    MessageParser,
    choose_reasoning_parser,
    choose_tool_parser,
    read_tools,
)
from support.checkpoints import shared_data  # noqa: E402
from support.tool_samples import AWKWARD, TOOLS  # noqa: E402
from support.vocabularies import qwen_tokenizer  # noqa: E402

# What templates write after an answer.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")
READ_TOOLS = read_tools(TOOLS)
# Some templates need descriptions.
DESCRIBED = [
    {"type": "function", "function": {"description": "A tool.", **tool["function"], "parameters": {
        "type": "object", "properties": {}}}}
    for tool in TOOLS
]  # fmt: skip
CITY = ("get_weather", {"city": "Paris"})
# Templates that have no form for several calls.
SINGLE = ("Llama-3", "DeepSeek-R1-Distill")

# The parts of other models' templates that write a call.
GLM = """{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>
{%- for tc in m.tool_calls %}{% set tc = tc.function %}
{{ '\\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
QWEN3_CODER = """{% for message in messages %}{% if message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}{% for tool_call in message.tool_calls %}
{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for args_name, args_value in tool_call.arguments|items %}
{{- '<parameter=' + args_name + '>\\n' }}
{%- set args_value = args_value | tojson | safe if args_value is mapping or
    (args_value is sequence and args_value is not string) else args_value | string %}
{{- args_value }}{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
DEEPSEEK_V31 = """{% for message in messages %}{% if message['role'] == 'assistant' %}
{{- '<｜Assistant｜></think>' }}{% for tool in message['tool_calls'] %}{% if loop.first %}
{%- if message['content'] is none %}{{- '<｜tool▁calls▁begin｜>' }}
{%- else %}{{- message['content'] + '<｜tool▁calls▁begin｜>' }}{% endif %}{% endif %}
{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'
    + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- else %}{{- '<｜User｜>' + message['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}
{%- if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"""
OTHERS = {"glm": GLM, "qwen3-coder": QWEN3_CODER, "deepseek-v3.1": DEEPSEEK_V31}
PARSERS = {"glm": "glm47", "qwen3-coder": "qwen3coder", "deepseek-v3.1": "deepseek-v3"}
PUBLISHED = (
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "llama-cpp-deepseek-r1",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
)


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer()


def template_text(name):
    if name in OTHERS:
        return OTHERS[name]
    return (shared_data() / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def asked(content, calls):
    """A question, and the calls that answer it."""
    made = [
        {"id": f"callid{i:03}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": content, "tool_calls": made},
    ]


def written_calls(tokenizer, text, content, calls):
    """What a model would have written for these calls, by its chat template."""
    template = TokenizerTemplate(tokenizer, text)
    messages = asked(content, calls)
    # Some cannot be rendered without tools, and llama.cpp's not with them.
    has_tools = "tools" in template_facts(text).variables and "map(attribute" not in text
    tools = DESCRIBED if has_tools else None
    prompt = template.render(messages[:1], tools).removesuffix("<think>\n")
    whole = template.render(messages, tools, add_generation_prompt=False)
    return whole[len(os.path.commonprefix([prompt, whole])) :]


def parse(text, pieces):
    parser = MessageParser(
        choose_tool_parser(text),
        choose_reasoning_parser(text),
        tools=READ_TOOLS,
        left_out=ENDS,
    )
    for piece in pieces:
        parser.put(piece)
    parser.flush()
    message = parser.message()
    assert all(call.is_complete for call in message.tool_calls), message
    found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.content, found


@pytest.mark.parametrize("content", [None, ""], ids=["none", "empty"])
@pytest.mark.parametrize("name", [*PUBLISHED, *OTHERS])
def test_calls_come_back(tokenizer, name, content):
    text = template_text(name)
    parser = choose_tool_parser(text)
    assert parser is not None and PARSERS.get(name, parser.names[0]) == parser.names[0]
    several = [[CITY], [("now", {})], [("get_weather", AWKWARD)]]
    if not any(part in name for part in SINGLE):
        several.append([("get", {"days": 3}), ("get_weather", AWKWARD), ("now", {})])
    for calls in several:
        output = written_calls(tokenizer, text, content, calls)
        assert output and (calls[0][0] in output)
        for pieces in ([output], output, [output[i : i + 7] for i in range(0, len(output), 7)]):
            assert parse(text, pieces) == ("", calls), output


def test_a_text_between_reasoning_and_calls(tokenizer):
    text = DEEPSEEK_V31
    output = written_calls(tokenizer, text, "I look. ", [CITY])
    assert parse(text, [output]) == ("I look.", [CITY])
