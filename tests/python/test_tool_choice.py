"""Which parsers a chat template and a name choose, and what is read from a request."""

from __future__ import annotations

import pytest
from allspark.serve.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Tool,
    ToolChoice,
    choose_reasoning_parser,
    choose_tool_parser,
    read_tool_choice,
    read_tools,
)
from support.checkpoints import shared_data
from support.tool_samples import TOOLS

NO_PARSER = (None, None)
# Template -> the parsers of tool calls and of reasoning.
TEMPLATES = {
    # Its calls are a list after "Action:".
    "CohereForAI-c4ai-command-r-plus-tool_use": NO_PARSER,
    # <|START_ACTION|> and <|START_THINKING|>.
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": NO_PARSER,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("qwen", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("qwen", None),
    "Qwen-Qwen2.5-7B-Instruct": ("qwen", None),
    # Their prompts end with <think>.
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek-v3", "default"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-v3", "default"),
    "llama-cpp-deepseek-r1": ("deepseek-v3", "default"),
    # functools[...].
    "fireworks-ai-llama-3-firefunction-v2": NO_PARSER,
    "google-gemma-2-2b-it": NO_PARSER,
    # <function=name>{...}</function>, and code after <|python_tag|>.
    "meetkai-functionary-medium-v3.1": NO_PARSER,
    # >>>name, a newline and the arguments.
    "meetkai-functionary-medium-v3.2": NO_PARSER,
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", None),
    "microsoft-Phi-3.5-mini-instruct": NO_PARSER,
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "community/alpaca": NO_PARSER,
    "community/amberchat": NO_PARSER,
    "community/chatml": NO_PARSER,
    "community/chatqa": NO_PARSER,
    "community/falcon-instruct": NO_PARSER,
    "community/gemma-it": NO_PARSER,
    # <|tool_call|> and a list; its template has it as a role.
    "community/granite-3.0-instruct": NO_PARSER,
    "community/llama-2-chat": NO_PARSER,
    "community/llama-3-instruct": NO_PARSER,
    "community/mistral-instruct": NO_PARSER,
    "community/openchat-3.5": NO_PARSER,
    "community/phi-3": NO_PARSER,
    "community/phi-3-small": NO_PARSER,
    "community/qwen2.5-instruct": ("qwen", None),
    "community/saiga": NO_PARSER,
    "community/solar-instruct": NO_PARSER,
    "community/vicuna": NO_PARSER,
    "community/zephyr": NO_PARSER,
}


def chosen(template):
    tools, reasoning = choose_tool_parser(template), choose_reasoning_parser(template)
    return tools and tools.names[0], reasoning and reasoning.names[0]


def test_published_templates():
    folder = shared_data() / "chat_templates"
    files = {
        str(path.relative_to(folder).with_suffix("")): path.read_text()
        for path in folder.rglob("*.jinja")
    }
    assert {name: chosen(text) for name, text in files.items()} == TEMPLATES


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        # What makes other models' templates what they are.
        ("{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", ("qwen3coder", None)),
        ("<tool_call>{{tc.name}}<arg_key>{{k}}</arg_key></think>", ("glm47", "default")),
        ('\\n<tool_call>\\n{\\"name\\": <f>, \\"arguments\\": <a>}</think>', ("qwen", "default")),
        ("<tool_call>[f(a=1)]</tool_call>", NO_PARSER),
        ("<seed:tool_call>", NO_PARSER),
        ("<|action_start|><|plugin|>\n", ("internlm", None)),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", ("mistral", None)),
        (
            "{% if not thinking is defined %}<｜Assistant｜></think><｜tool▁calls▁begin｜>",
            ("deepseek-v3", "deepseek-v3"),
        ),
        ("", NO_PARSER),
        (None, NO_PARSER),
    ],
)
def test_markers_in_templates(template, parsers):
    assert chosen(template) == parsers


def test_names():
    for parser in TOOL_PARSERS:
        for name in parser.names:
            assert choose_tool_parser("[TOOL_CALLS]", name) is parser
    for parser in REASONING_PARSERS:
        for name in parser.names:
            assert choose_reasoning_parser(None, name) is parser
    with pytest.raises(ValueError, match=r"'qwen9'.*deepseek-v3.*hermes.*qwen2d5.*qwen3coder"):
        choose_tool_parser(None, "qwen9")
    with pytest.raises(ValueError, match="'think'.*deepseek-r1.*default"):
        choose_reasoning_parser("</think>", "think")


def function(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def test_tools():
    schema = {"type": "object", "properties": {"a": {}}}
    read = read_tools([function("a.b-c_1", parameters=schema, strict=True), function("g")])
    assert read[0] == Tool("a.b-c_1", schema, True)
    assert read[1].parameters["additionalProperties"] is False and not read[1].strict
    assert read_tools(None) == read_tools([]) == ()
    (tool,) = read_tools([function(parameters={"type": ["object", "null"]})])
    assert tool.parameters == {"type": "object"}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("f", ["str"]),
        ({}, ["dict"]),
        ([3], ["tools[0]"]),
        ([function(), {"type": "web_search"}], ["tools[1]", "function"]),
        ([{"type": "function"}], ["tools[0]", "'function'"]),
        ([function("a b")], ["'a b'", "64"]),
        ([function("x" * 65)], ["64"]),
        ([function(3)], ["3"]),
        ([function(), function()], ["'f'", "two"]),
        ([function(parameters=[])], ["'f'", "JSON Schema"]),
        ([function(parameters={"type": "string"})], ["'f'", "'object'"]),
        ([function(strict="yes")], ["'f'", "'strict'"]),
    ],
)
def test_tools_that_are_none(tools, words):
    with pytest.raises(ValueError) as error:
        read_tools(tools)
    assert all(word in str(error.value) for word in words), error.value


NAMED = {"type": "function", "function": {"name": "get"}}


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (NAMED, ToolChoice("required", ("get",))),
        ({"type": "function", "name": "get"}, ToolChoice("required", ("get",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED, NAMED]}},
            ToolChoice("auto", ("get",)),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"name": "now"}, NAMED]},
            ToolChoice("required", ("now", "get")),
        ),
    ],
)
def test_tool_choice(choice, read):
    tools = read_tools(TOOLS)
    assert read_tool_choice(choice, tools) == read
    expected = {"none": []}.get(read.mode, read.names or ["get_weather", "get", "now"])
    assert {tool.name for tool in read.of(tools)} == set(expected)


def test_no_tools():
    assert read_tool_choice(None, []) == read_tool_choice("auto", []) == ToolChoice("none")
    with pytest.raises(ValueError, match="no tools"):
        read_tool_choice("required", [])


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        3,
        {},
        {"type": "function"},
        {"type": "function", "function": {"name": "nobody"}},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}},
    ],
)
def test_tool_choices_that_are_none(choice):
    with pytest.raises(ValueError, match="tool_choice"):
        read_tool_choice(choice, read_tools(TOOLS))
