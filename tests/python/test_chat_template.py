"""Builtin chat templates, their registry and configs, and the choice among all templates.

The expected strings are written out from the documented markers.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import pytest
from allspark.chat_template import (
    MODELS,
    BaseChatTemplate,
    ChatTemplateConfig,
    TokenizerTemplate,
    choose,
    names,
)
from allspark.chat_template.builtin import OLDER_NAMES
from support.chats import assistant, user


def system(content, **more):
    return {"role": "system", "content": content, **more}


def make(name, **fields):
    return MODELS.get(name)(**fields)


@pytest.fixture
def registry(monkeypatch):
    """Registrations of a test do not outlive it."""
    monkeypatch.setattr(MODELS, "_classes", dict(MODELS.module_dict))
    return MODELS


RAW = ("Sabc", "q")
VICUNA = ("S USER: a ASSISTANT: b</s>USER: c ASSISTANT: ", "USER: q ASSISTANT: ")
UNSPACED = tuple(text[:-1] for text in VICUNA)
INTERNLM = (
    "<|System|>:S\n<|User|>:a\n<|Bot|>:b<eoa>\n<|User|>:c\n<|Bot|>:",
    "\n<|User|>:q\n<|Bot|>:",
)
CHATML = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
    "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
)
CHATML_DENSE = (
    "<|im_start|>system\nS<|im_end|><|im_start|>user\na<|im_end|>"
    "<|im_start|>assistant\nb<|im_end|><|im_start|>user\nc<|im_end|><|im_start|>assistant\n",
    "<|im_start|>user\nq<|im_end|><|im_start|>assistant\n",
)
XCOMPOSER = (
    "[UNUSED_TOKEN_146]system\nS[UNUSED_TOKEN_145]\n[UNUSED_TOKEN_146]user\na[UNUSED_TOKEN_145]\n"
    "[UNUSED_TOKEN_146]assistant\nb[UNUSED_TOKEN_145]\n\n"
    "[UNUSED_TOKEN_146]user\nc[UNUSED_TOKEN_145]\n[UNUSED_TOKEN_146]assistant\n",
    "\n[UNUSED_TOKEN_146]user\nq[UNUSED_TOKEN_145]\n[UNUSED_TOKEN_146]assistant\n",
)
LLAMA2 = (
    "[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b</s><s>[INST] c [/INST] ",
    "<s>[INST] q [/INST] ",
)
MISTRAL = ("S[INST] a [/INST]b</s>[INST] c [/INST]", "[INST] q [/INST]")
ULTRA = (
    "User: S</s>\nUser: a</s>\nAssistant: b</s>\nUser: c</s>\nAssistant: ",
    "\nUser: q</s>\nAssistant: ",
)
# Of each template: the conversation S, a, b, c; the prompt q after an answer; its stop words.
EXPECTED = {
    "base": (*RAW, None),
    "llama": (*RAW, None),
    "vicuna": (*VICUNA, ["</s>"]),
    "wizardlm": (*VICUNA, ["</s>"]),
    "llava-v1": (*UNSPACED, ["</s>"]),
    "mini-gemini-vicuna": (*UNSPACED, ["</s>"]),
    "internlm": (*INTERNLM, ["<eoa>"]),
    "internlm-20b": (*RAW, None),
    "internlm2-7b": (*RAW, None),
    "internlm2": (*CHATML, ["<|im_end|>", "<|action_end|>"]),
    "internvl-internlm2": (*CHATML, ["<|im_end|>", "<|action_end|>"]),
    "internlm-xcomposer2": (*XCOMPOSER, ["[UNUSED_TOKEN_145]"]),
    "internlm-xcomposer2-4khd": (*XCOMPOSER, ["[UNUSED_TOKEN_145]"]),
    "baichuan-base": (*RAW, None),
    "baichuan2": (
        "S<reserved_106>a<reserved_107>b<reserved_106>c<reserved_107>",
        "<reserved_106>q<reserved_107>",
        None,
    ),
    "puyu": (*RAW, None),
    "llama2": (*LLAMA2, None),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ["<|eot_id|>", "<|end_of_text|>"],
    ),
    "qwen": (*CHATML, ["<|im_end|>"]),
    "codellama": (*LLAMA2, None),
    "falcon": (*RAW, None),
    "chatglm": (
        "S[Round 1]\n\n问：a\n\n答：b\n\n[Round 2]\n\n问：c\n\n答：",
        "[Round 1]\n\n问：q\n\n答：",
        None,
    ),
    "solar": (
        "### System:\nS\n\n### User:\na\n\n### Assistant:\nb### User:\nc\n\n### Assistant:\n",
        "### User:\nq\n\n### Assistant:\n",
        None,
    ),
    "ultracm": (*ULTRA, ["</s>"]),
    "ultralm": (*ULTRA, ["</s>"]),
    "yi": (*CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "mistral": (*MISTRAL, None),
    "mixtral": (*MISTRAL, None),
    "gemma": (
        "S<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n",
        "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n",
        None,
    ),
    "deepseek": (
        "SUser: a\n\nAssistant: b<｜end▁of▁sentence｜>User: c\n\nAssistant:",
        "User: q\n\nAssistant:",
        None,
    ),
    "internvl-zh": (
        "S<human>: a <bot>: b</s><human>: c <bot>:",
        "<human>: q <bot>:",
        None,
    ),
    "deepseek-vl": (
        "S\n\nUser: a\n\nAssistant: b<｜end▁of▁sentence｜>User: c\n\nAssistant:",
        "User: q\n\nAssistant:",
        None,
    ),
    "deepseek-vl2": (
        "S<|User|>: a\n\n<|Assistant|>: b<｜end▁of▁sentence｜><|User|>: c\n\n<|Assistant|>:",
        "<|User|>: q\n\n<|Assistant|>:",
        None,
    ),
    "deepseek-coder": (
        "S### Instruction:\na\n### Response:\nb\n<|EOT|>\n### Instruction:\nc\n### Response:\n",
        "\n### Instruction:\nq\n### Response:\n",
        ["<|EOT|>"],
    ),
    "yi-vl": (
        "S### Human: a\n### Assistant:b\n### Human: c\n### Assistant:",
        "### Human: q\n### Assistant:",
        ["###"],
    ),
    "dbrx": (*CHATML, None),
    "llava-chatml": (*CHATML_DENSE, None),
    "internvl-zh-hermes2": (*CHATML_DENSE, None),
    "phi-3": (
        "<|system|>\nS<|end|>\n<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n\n"
        "<|user|>\nc<|end|>\n<|assistant|>\n",
        "\n<|user|>\nq<|end|>\n<|assistant|>\n",
        ["<|end|>", "<|endoftext|>"],
    ),
    "cogvlm": (
        "SQuestion: a Answer:b</s>\nQuestion: c Answer:",
        "\nQuestion: q Answer:",
        ["</s>"],
    ),
}
CONVERSATION = [system("S"), user("a"), assistant("b"), user("c")]
# Texts that come before a conversation without a system message: how they begin and end.
SYSTEM_TEXTS = {
    "vicuna": ("A chat between a curious user and an artificial", "the user's questions. "),
    "llava-v1": ("A chat between a curious human and an", "the human's questions. "),
    "internlm": ("<|System|>:You are an AI assistant whose name is InternLM (书生·", "中文.\n\n"),
    "internlm2": (
        "<|im_start|>system\nYou are an AI assistant whose name is InternLM (书生·浦语).\n- Int",
        "such as English and 中文.\n<|im_end|>\n",
    ),
    "internvl-internlm2": (
        "<|im_start|>system\nYou are an AI assistant whose name is InternLM (书生·浦语).<|im_end|>",
        "<|im_end|>\n",
    ),
    "internlm-xcomposer2": (
        "[UNUSED_TOKEN_146]system\nYou are an AI assistant whose name is InternLM-XComposer (浦语·",
        "based on the provided image.[UNUSED_TOKEN_145]\n",
    ),
    "llama2": (
        "[INST] <<SYS>>\nYou are a helpful, respectful and honest assistant. Always answer as",
        "nature.\n\nIf a question does not make any sense, or is not factually coherent, explain "
        "why instead of answering something not correct. If you don't know the answer to a "
        "question, please don't share false information.\n<</SYS>>\n\n",
    ),
    "codellama": ("[INST] <<SYS>>\n\n<</SYS>>\n\n", ""),
    "qwen": ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", ""),
    "ultracm": ("User: A one-turn chat between a curious user", "questions.</s>\n"),
    "deepseek-vl": ("You are a helpful language and vision assistant. You", "language.\n\n"),
    "deepseek-coder": ("You are an AI programming assistant, utilizing", "refuse to answer\n"),
    "yi-vl": ("This is a chat between an inquisitive human and an AI", "详细的和礼貌的回答。\n\n"),
    "dbrx": ("<|im_start|>system\nYou are DBRX, created by Databricks.", "QUERY.<|im_end|>\n"),
    "llava-chatml": ("<|im_start|>system\nAnswer the questions.<|im_end|>", ""),
    "solar": ("### System:\n\n\n", ""),
    "llama3": ("<|begin_of_text|>", ""),
    "phi-3": ("", ""),
    "yi": ("", ""),
    "mistral": ("", ""),
    "base": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_builtin_templates(name):
    conversation, after_answer, stop_words = EXPECTED[name]
    template = make(name)
    assert template.messages2prompt(CONVERSATION) == conversation
    assert template.render(CONVERSATION) == conversation
    assert template.stop_words == stop_words
    assert template.name == name
    template = make(name)
    assert template.get_prompt("q", sequence_start=False) == after_answer
    template = make(name)
    assert template.messages2prompt([user("q")], sequence_start=False) == after_answer
    assert template.messages2prompt("q") == make(name).messages2prompt([user("q")])
    completion = make(name, capability="completion")
    assert completion.get_prompt("q") == completion.get_prompt("q", False) == "q"


def test_every_builtin_name_is_tested():
    older = {name: MODELS.get(name).name for name in OLDER_NAMES}
    assert {*EXPECTED} == {name for name in MODELS if older.get(name, name) == name} - {"hf"}
    assert older["qwen-7b"] == "qwen" and older["internlm2-chat-20b"] == "internlm2"
    assert older["internlm-chat-20b"] == older["internlm-chat-7b-8k"] == "internlm"
    assert older["Mixtral-8x7B-Instruct"] == "mixtral" and older["llama-2-chat"] == "llama2"
    assert len(OLDER_NAMES) == 27


@pytest.mark.parametrize("name", SYSTEM_TEXTS)
def test_texts_before_the_first_question(name):
    begin, end = SYSTEM_TEXTS[name]
    template = make(name)
    prompt = template.get_prompt("q")
    assert prompt == template.messages2prompt([user("q")])
    first = prompt[: -len(make(name).get_prompt("q", False).removeprefix(template.separator))]
    assert first.startswith(begin) and first.endswith(end)
    assert (first == begin) == (end in ("", begin[-len(end) :]) and end == "")


def test_length_of_the_long_texts():
    """The published texts have these numbers of characters."""
    lengths = {
        name: len(make(name).meta_instruction)
        for name in ("vicuna", "llama2", "internlm", "deepseek-coder", "ultracm", "yi-vl", "dbrx")
    }
    assert lengths == {
        "vicuna": 154, "llama2": 507, "internlm": 337, "deepseek-coder": 297, "ultracm": 168,
        "yi-vl": 305, "dbrx": 1040,
    }  # fmt: skip


def test_an_answer_is_continued():
    messages = [user("a"), assistant("prefix")]
    for name in EXPECTED:
        template = make(name)
        text = template.messages2prompt(messages)
        assert text.endswith("prefix"), name
        assert text == template.render(messages, continue_final_message=True)
        closed = template.render(messages)
        assert closed.startswith(text) and closed.endswith(template.opening)
    qwen = make("qwen", meta_instruction=None)
    assert qwen.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nprefix<|im_end|>\n"
    )
    with pytest.raises(ValueError, match=r"messages\[0\].role is 'user'; with continue_final"):
        qwen.render([user("a")], continue_final_message=True)


def test_none_is_no_empty_system_message():
    fields = {"system": "<s>", "eosys": "</s>", "user": "U:", "assistant": "A:"}
    assert BaseChatTemplate(**fields).get_prompt("x") == "<s></s>U:xA:"
    assert BaseChatTemplate(**fields, meta_instruction=None).get_prompt("x") == "U:xA:"


def test_capabilities_of_codellama():
    """Examples of the documented page of CodeLlama."""
    code = "import socket\n\ndef ping_exponential_backoff(host: str):"
    for capability in ("completion", "python"):
        template = make("codellama", capability=capability)
        assert template.get_prompt(code) == template.get_prompt(code, False) == code
        assert template.messages2prompt([user(code)]) == code
        assert template.stop_words is None
    infilled = 'def remove_non_ascii(s: str) -> str:\n    """ <FILL>\n    return result\n'
    template = make("codellama", capability="infilling")
    begin, end = 'def remove_non_ascii(s: str) -> str:\n    """ ', "\n    return result\n"
    assert template.get_prompt(infilled) == f"<PRE> {begin} <SUF>{end} <MID>"
    assert template.messages2prompt([user(infilled)]) == f"<PRE> {begin} <SUF>{end} <MID>"
    assert template.stop_words == ["<EOT>"]
    template = make("codellama", capability="infilling", suffix_first=True)
    assert template.get_prompt(infilled) == f"<PRE> <SUF>{end} <MID> {begin}"
    template = make("codellama", meta_instruction="Provide answers in Python")
    assert template.get_prompt("q") == (
        "[INST] <<SYS>>\nProvide answers in Python\n<</SYS>>\n\nq [/INST] "
    )
    assert "Provide" not in template.get_prompt("q", False)
    own = make("codellama", capability="infilling", stop_words=["x"])
    assert own.stop_words == ["x"]


@pytest.mark.parametrize("prompt", ["no place", "<FILL><FILL>"])
def test_infilling_needs_one_place(prompt):
    number = prompt.count("<FILL>")
    with pytest.raises(ValueError, match=f"prompt has <FILL> {number} times; for infilling"):
        make("codellama", capability="infilling").get_prompt(prompt)


@pytest.mark.parametrize("name", ["qwen", "llama2", "base"])
def test_other_templates_refuse_infilling_at_once(name):
    with pytest.raises(ValueError, match=f"capability is 'infilling', which the template '{name}'"):
        make(name, capability="infilling")


def test_a_class_with_prompts_of_its_own_may_fill_in():
    class Filling(BaseChatTemplate):
        def get_prompt(self, prompt, sequence_start=True):
            return prompt.replace("<FILL>", "<mid>")

    assert Filling(capability="infilling").get_prompt("a<FILL>b") == "a<mid>b"


def test_rounds_of_chatglm():
    template = make("chatglm")
    assert template.get_prompt("a") == "[Round 1]\n\n问：a\n\n答："
    assert template.get_prompt("b", sequence_start=False) == "[Round 2]\n\n问：b\n\n答："
    assert template.get_prompt("c", sequence_start=False) == "[Round 3]\n\n问：c\n\n答："
    assert template.get_prompt("d") == "[Round 1]\n\n问：d\n\n答："
    own = make("chatglm", meta_instruction="M\n")
    assert own.get_prompt("a") == "M\n[Round 1]\n\n问：a\n\n答："


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Compute «a + b»", "parameters": {}},
    }
]


def test_roles_of_internlm2():
    messages = [
        system("You have access to python environment.", name="interpreter"),
        user("use python to draw a line"),
        assistant("<|action_start|><|interpreter|>\ncode<|action_end|>\n"),
        {"role": "environment", "name": "interpreter", "content": "[{'type': 'image'}]"},
    ]
    system_block = (
        "<|im_start|>system name=<|interpreter|>\n"
        + "You have access to python environment.<|im_end|>\n"
    )
    rest = (
        "<|im_start|>user\nuse python to draw a line<|im_end|>\n"
        "<|im_start|>assistant\n<|action_start|><|interpreter|>\ncode<|action_end|>\n<|im_end|>\n"
        "<|im_start|>environment name=<|interpreter|>\n[{'type': 'image'}]<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    template = make("internlm2")
    assert template.messages2prompt(messages) == system_block + rest
    tools = (
        '<|im_start|>system name=<|plugin|>\n[{"type": "function", "function": {"name": "add", '
        '"description": "Compute «a + b»", "parameters": {}}}]<|im_end|>\n'
    )
    assert template.messages2prompt(messages, tools=TOOLS) == system_block + tools + rest
    assert template.render(messages, TOOLS) == system_block + tools + rest
    other = make(
        "internlm2", meta_instruction=None, environment="<env>", eoenv="</env>", plugin="P"
    )
    assert other.render([user("a", name="somebody")], TOOLS) == (
        tools.replace("<|plugin|>", "P") + "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert other.render([{"role": "environment", "content": "x"}]).startswith("<env>x</env>")


def test_tool_calls_of_internlm2():
    call = {"id": "1", "type": "function", "function": {"name": "mul", "arguments": '{"a": 8}'}}
    messages = [
        user("Compute"),
        assistant("8*2 =", tool_calls=[call]),
        {"role": "tool", "content": "16", "tool_call_id": "1", "name": "mul"},
    ]
    assert make("internlm2", meta_instruction=None).render(messages) == (
        "<|im_start|>user\nCompute<|im_end|>\n"
        '<|im_start|>assistant\n8*2 =<|action_start|><|plugin|>\n{"name": "mul", "parameters": '
        '{"a": 8}}<|action_end|><|im_end|>\n'
        "<|im_start|>environment\n16<|im_end|>\n<|im_start|>assistant\n"
    )


def test_markers_for_tools():
    marked = make("base", user="U:", assistant="A:", tool="<tool>", eotool="</tool>")
    messages = [user("1+2"), assistant("add"), {"role": "tool", "content": "3"}]
    assert marked.render(messages) == "U:1+2A:add<tool>3</tool>A:"
    assert marked.render([system("S"), *messages], [{"name": "ä"}]) == (
        'S<tool>[{"name": "ä"}]</tool>U:1+2A:add<tool>3</tool>A:'
    )
    assert marked.render([system("S")], [{"name": "ä"}]) == 'S<tool>[{"name": "ä"}]</tool>A:'


CALL = {"function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([user("a")], TOOLS), "tools: the template 'vicuna' has no markers for tools"),
        (([{"role": "tool", "content": "3"}],), "messages[0].role is 'tool'; for the template 'vi"),
        (([user("a"), {"role": "judge", "content": "b"}],), "messages[1].role is 'judge'; for the "
         "template 'vicuna' it must be one of system, user, assistant"),
        (([assistant("a", tool_calls=[CALL])],), "messages[0].tool_calls: the template 'vicuna' h"),
        (([user("a")], None, True, False, [{"text": "b"}]), "documents: the template 'vicuna' has"),
        (([],), "messages is empty; it must hold at least one message"),
    ],
)  # fmt: skip
def test_what_a_template_has_no_form_for(arguments, message):
    with pytest.raises(ValueError) as caught:
        make("vicuna").render(*arguments)
    assert str(caught.value).startswith(message)


def test_forms_of_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = make("gemma")
    assert template.render([user(parts)]) == template.get_prompt("a\nb")
    assert template.render([{"role": "developer", "content": "S"}, user("a")]).startswith("S<")
    assert template.render([user("a")], tools=[]) == template.get_prompt("a")
    with pytest.raises(TypeError, match="^prompt is None; it must be a str$"):
        template.get_prompt(None)


# Registry.


def test_the_documented_class(registry):
    @registry.register_module(name="customized_model")
    class CustomizedModel(BaseChatTemplate):
        """A customized chat template."""

        def __init__(
            self,
            system="<|im_start|>system\n",
            meta_instruction="You are a robot developed by LMDeploy.",
            user="<|im_start|>user\n",
            assistant="<|im_start|>assistant\n",
            eosys="<|im_end|>\n",
            eoh="<|im_end|>\n",
            eoa="<|im_end|>",
            separator="\n",
            stop_words=["<|im_end|>", "<|action_end|>"],  # noqa: B006
        ):
            super().__init__(
                system=system, meta_instruction=meta_instruction, eosys=eosys, user=user, eoh=eoh,
                assistant=assistant, eoa=eoa, separator=separator, stop_words=stop_words,
            )  # fmt: skip

    template = ChatTemplateConfig("customized_model").chat_template
    assert isinstance(template, CustomizedModel) and template.name == "customized_model"
    expected = (
        "<|im_start|>system\nYou are a robot developed by LMDeploy.<|im_end|>\n"
        "<|im_start|>user\nwho are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.messages2prompt([user("who are you?")]) == expected
    assert choose(None, None, "customized_model").render([user("who are you?")]) == expected
    assert "customized_model" in names() and "customized_model" in list(registry)
    with pytest.raises(
        ValueError, match="capability is 'chat'; the template 'customized_model' ta"
    ):
        ChatTemplateConfig("customized_model", capability="chat").chat_template  # noqa: B018


def test_registration(registry):
    @registry.register_module(name=["one", "two"])
    @registry.register_module()
    class Three(BaseChatTemplate):
        pass

    assert {registry.get(name) for name in ("one", "two", "Three")} == {Three}
    assert registry.get("four") is None and "one" in registry and len(registry) > 50
    with pytest.raises(ValueError, match="name is 'one', which is registered already; force=True"):
        registry.register_module("one", module=BaseChatTemplate)
    registry.register_module("one", force=True, module=BaseChatTemplate)
    assert registry.get("one") is BaseChatTemplate
    for name, error, message in (
        (5, TypeError, "name is a int; it must be a str or a list of str"),
        (["a", None], TypeError, r"name\[1\] is None; it must be a str"),
        ("", ValueError, "name is ''; it must not be empty"),
        ([], ValueError, r"name is \[\]; it must not be empty"),
    ):
        with pytest.raises(error, match=message):
            registry.register_module(name, module=Three)
    with pytest.raises(TypeError, match="module is a type; it must be a class derived from Base"):
        registry.register_module("x", module=int)


def test_a_class_with_its_own_messages2prompt(registry):
    """As LMDeploy's documents write such classes: they know no tools and no keywords."""

    @registry.register_module("own")
    class Own(BaseChatTemplate):
        def messages2prompt(self, messages, sequence_start=True):
            return f"{len(messages)}:{messages[-1]['content']}"

    template = choose(None, None, "own")
    assert template.render([user("a"), user("b")], enable_thinking=False) == "2:b"
    for options in ({"tools": TOOLS}, {"add_generation_prompt": False}):
        with pytest.raises(
            ValueError, match=f"^{next(iter(options))}: messages2prompt of 'own' do"
        ):
            template.render([user("a")], **options)

    @registry.register_module("kwargs")
    class Kwargs(BaseChatTemplate):
        def messages2prompt(self, messages, sequence_start=True, **kwargs):
            return str(sorted(kwargs))

    assert choose(None, None, "kwargs").render([user("a")], thinking=1) == "['thinking']"
    with pytest.raises(ValueError, match="sequence_start is no variable that can be given to a ch"):
        choose(None, None, "kwargs").render([user("a")], **{"sequence_start": False})


# Configs.


def test_fields_of_a_config():
    fields = (
        "model_name model_path system meta_instruction eosys user eoh assistant eoa tool eotool "
        "separator capability stop_words"
    )
    config = ChatTemplateConfig("vicuna")
    assert list(vars(config)) == fields.split()
    assert set(vars(config).values()) == {"vicuna", None}
    assert (
        ChatTemplateConfig(model_name="vicuna")
        .chat_template.get_prompt("q")
        .endswith("questions. USER: q ASSISTANT: ")
    )


@pytest.mark.parametrize("name", ["llama2", "yi", "qwen-7b", "vicuna"])
def test_fields_override_those_of_the_builtin(name):
    template = ChatTemplateConfig(name, meta_instruction="[fake]", stop_words=["x"]).chat_template
    assert "[fake]" in template.get_prompt("")
    assert template.stop_words == ["x"]
    assert template.user == make(name).user
    changed = ChatTemplateConfig(name, eosys="", separator="").chat_template
    assert changed.eosys == "" == changed.separator


def test_a_new_name_has_the_fields_alone(caplog):
    config = ChatTemplateConfig("new one", user="U:", assistant="A:", model_path="/x")
    with caplog.at_level(logging.WARNING, "allspark.chat_template"):
        assert config.chat_template.get_prompt("q") == "U:qA:"
    assert "'new one', which is no registered chat template" in caplog.text
    assert "new one" not in MODELS


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model_name": 5}, TypeError, "model_name is a int; it must be a str"),
        ({"model_name": ""}, ValueError, "model_name is ''; it must not be empty"),
        ({"system": 5}, TypeError, "system is a int; it must be a str or None"),
        ({"eotool": ["x"]}, TypeError, "eotool is a list; it must be a str or None"),
        ({"capability": "voice"}, ValueError,
         "capability is 'voice'; it must be one of completion, infilling, chat, python"),
        ({"capability": 1}, TypeError,
         "capability is a int; it must be one of completion, infilling, chat, python"),
        ({"stop_words": "</s>"}, TypeError, "stop_words is a str; it must be a list of str"),
        ({"stop_words": ["a", 2]}, TypeError, "stop_words[1] is a int; it must be a str"),
    ],
)  # fmt: skip
def test_wrong_fields(fields, error, message):
    for make_config in (
        lambda: ChatTemplateConfig(**{"model_name": "qwen", **fields}),
        lambda: ChatTemplateConfig.from_json(json.dumps({"model_name": "qwen", **fields})),
    ):
        with pytest.raises(error) as caught:
            make_config()
        assert str(caught.value) == f"ChatTemplateConfig.{message}"


def test_wrong_name():
    with pytest.raises(TypeError, match="^ChatTemplateConfig.model_name is None; it must be a str"):
        ChatTemplateConfig(None)


def test_wrong_fields_of_templates():
    with pytest.raises(TypeError, match="^user is None; it must be a str$"):
        make("qwen", user=None)
    with pytest.raises(TypeError, match="^meta_instruction is a int; it must be a str or None$"):
        make("qwen", meta_instruction=5)
    with pytest.raises(ValueError, match="^capability is 'java'; it must be one of completion, in"):
        make("codellama", capability="java")
    with pytest.raises(TypeError, match="'usr'"):
        make("qwen", usr="x")
    config = ChatTemplateConfig("qwen")
    config.user = 5
    with pytest.raises(TypeError, match="^ChatTemplateConfig.user is a int"):
        config.chat_template  # noqa: B018


DOCUMENTED = """{
    "model_name": "your awesome chat template name",
    "system": "<|im_start|>system\\n",
    "meta_instruction": "You are a robot developed by LMDeploy.",
    "eosys": "<|im_end|>\\n",
    "user": "<|im_start|>user\\n",
    "eoh": "<|im_end|>\\n",
    "assistant": "<|im_start|>assistant\\n",
    "eoa": "<|im_end|>",
    "separator": "\\n",
    "capability": "chat",
    "stop_words": ["<|im_end|>"]
}"""


def test_the_documented_json(registry, tmp_path):
    path = tmp_path / "template.json"
    path.write_text(DOCUMENTED)
    expected = (
        "<|im_start|>system\nYou are a robot developed by LMDeploy.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    for source in (DOCUMENTED, str(path), path):
        config = ChatTemplateConfig.from_json(source)
        assert config.chat_template.render(CONVERSATION[1:]) == expected
        assert config.chat_template.stop_words == ["<|im_end|>"]
    assert registry.get("your awesome chat template name") is BaseChatTemplate
    assert choose(None, "any", str(path)).render(CONVERSATION[1:]) == expected
    assert choose(None, "any", DOCUMENTED).render(CONVERSATION[1:]) == expected


def test_json_there_and_back(tmp_path):
    config = ChatTemplateConfig("qwen", meta_instruction="书生 «ä»", stop_words=["a", "b"])
    path = tmp_path / "config.json"
    text = config.to_json(path)
    assert path.read_text(encoding="utf-8") == text == config.to_json()
    assert text.startswith('{\n    "model_name": "qwen",\n    "model_path": null,\n')
    assert "书生 «ä»" in text
    assert ChatTemplateConfig.from_json(text) == config == ChatTemplateConfig.from_json(path)
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert ChatTemplateConfig.from_json(str(path)) == config


def test_names_in_json(registry):
    builtin = ChatTemplateConfig.from_json('{"model_name": "llama2", "meta_instruction": "M"}')
    assert builtin.chat_template.get_prompt("q") == "[INST] <<SYS>>\nM\n<</SYS>>\n\nq [/INST] "
    made_up = [ChatTemplateConfig.from_json(text) for text in ("{}", ' {"model_name": null}')]
    assert len({config.model_name for config in made_up}) == 2
    for config in made_up:
        assert len(config.model_name) == 32
        assert registry.get(config.model_name) is BaseChatTemplate
        assert config.chat_template.get_prompt("q") == "q"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_name": ', r"^the chat template is no JSON text: Expecting value: line 1 column"),
        ('{"a": 1}', "^the chat template has 'a'; its fields are model_name, model_path, system, "),
        (
            "/no/such/file.json",
            "^file_or_string is '/no/such/file.json'; it must be JSON text or a ",
        ),
        ("", "^file_or_string is ''; it must be JSON text or a readable file"),
        ("a\0b", r"^file_or_string is 'a\\x00b'; it must be JSON text or a readable file"),
        ("[" * 10, "^file_or_string is "),
        ('{"system": ' + "[" * 100_000, "^the chat template is no JSON text"),
    ],
)
def test_wrong_json(text, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplateConfig.from_json(text)


def test_wrong_json_files(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"a.json is \[1\]; it must be a JSON object"):
        ChatTemplateConfig.from_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be JSON text or a readable file: .*utf-8"):
        ChatTemplateConfig.from_json(path)
    with pytest.raises(ValueError, match="must be JSON text or a readable file"):
        ChatTemplateConfig.from_json(tmp_path)
    with pytest.raises(TypeError, match="file_or_string is a int; it must be a path or JSON text"):
        ChatTemplateConfig.from_json(5)


# Choice.

PATHS = {
    "internlm/internlm-chat-7b": "internlm",
    "internlm/internlm-chat-7b-8k": "internlm",
    "models--internlm--internlm-chat-7b/snapshots/1234567": "internlm",
    "internlm/internlm2-1_8b": "base",
    "internlm/internlm2-chat-20b": "internlm2",
    "internlm/internlm2-math-7b": "internlm2",
    "internlm/internlm-xcomposer2-7b": "internlm-xcomposer2",
    "internlm/internlm-xcomposer2-4khd-7b": "internlm-xcomposer2-4khd",
    "OpenGVLab/InternVL-Chat-V1-5": "internvl-internlm2",
    "OpenGVLab/InternVL-Chat-V1-1": "internvl-zh",
    "OpenGVLab/InternVL-Chat-V1-2-Plus": "internvl-zh-hermes2",
    "Qwen/Qwen-7B-Chat": "qwen",
    "codellama/CodeLlama-7b-hf": "codellama",
    "codellama/CodeLlama-34b-Instruct-hf": "codellama",
    "upstage/SOLAR-0-70b": "solar",
    "meta-llama/Llama-2-7b-chat-hf": "llama2",
    "/data/llama2-chat": "llama2",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama3",
    "lmsys/vicuna-7b-v1.5": "vicuna",
    "WizardLM/WizardLM-70B-V1.0": "wizardlm",
    "liuhaotian/llava-v1.5-7b": "llava-v1",
    "liuhaotian/llava-v1.6-vicuna-7b": "llava-v1",
    "llava-hf/llava-1.5-7b-hf": "llava-v1",
    "liuhaotian/llava-v1.6-34b": "llava-chatml",
    "liuhaotian/llava-v1.6-mistral-7b": "mistral",
    "YanweiLi/MGM-7B": "mini-gemini-vicuna",
    "THUDM/chatglm2-6b": "chatglm",
    "THUDM/chatglm3-6b": "base",
    "01-ai/Yi-6B-200k": "yi",
    "01-ai/Yi-34B-Chat": "yi",
    "models--01-ai--Yi-6B-Chat/snapshots/1": "yi",
    "01-ai/Yi-VL-6B": "yi-vl",
    "/home/playing/model": "base",
    "baichuan-inc/Baichuan2-7B-Chat": "baichuan2",
    "baichuan-inc/Baichuan2-7B-Base": "base",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral",
    "mistralai/Mistral-7B-v0.1": "base",
    "google/gemma-7b-it": "gemma",
    "deepseek-ai/deepseek-coder-6.7b-instruct": "deepseek-coder",
    "deepseek-ai/deepseek-vl-7b-chat": "deepseek-vl",
    "deepseek-ai/deepseek-vl2-chat": "deepseek-vl2",
    "deepseek-ai/deepseek-moe-16b-chat": "deepseek",
    "openbmb/UltraCM-13b": "ultracm",
    "openbmb/UltraLM-13b": "ultralm",
    "databricks/dbrx-instruct": "dbrx",
    "microsoft/Phi-3-mini-128k-instruct": "phi-3",
    "THUDM/cogvlm-chat-hf": "cogvlm",
    "tiiuae/falcon-7b": "falcon",
    "internal/puyu-7b": "puyu",
    "workspace": "base",
}


@pytest.mark.parametrize("suffix", ["", "-w4", "-4bit", "-16bit"])
def test_templates_by_path(suffix):
    found = {path: choose(None, path + suffix).name for path in PATHS}
    assert found == PATHS


def test_no_template_is_warned_of_once(caplog):
    with caplog.at_level(logging.INFO, "allspark.chat_template"):
        template = choose(None, "workspace")
    assert template.render([user("a"), assistant("b"), user("c")]) == "abc"
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"]
    assert "no chat template is known for workspace" in caplog.text


class OneTemplate:
    """What `choose` asks of a tokenizer."""

    chat_template = "{{ messages[0].content }}"
    eos_token = "<end>"


def test_order_of_the_choice(registry, tmp_path):
    tokenizer = OneTemplate()
    own = choose(tokenizer, "Qwen/Qwen-7B-Chat")
    assert isinstance(own, TokenizerTemplate) and own.stop_words == ["<end>"]
    assert choose(tokenizer, "Qwen/Qwen-7B-Chat", "vicuna").name == "vicuna"
    assert choose(tokenizer, None, ChatTemplateConfig("yi")).name == "yi"
    assert choose(tokenizer, None, "hf").tokenizer is tokenizer
    assert choose(tokenizer, None, ChatTemplateConfig("hf", stop_words=["x"])).stop_words == ["x"]
    tokenizer.chat_template = None
    assert choose(tokenizer, "Qwen/Qwen-7B-Chat").name == "qwen"
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        choose(tokenizer, None, "hf")

    @registry.register_module("mine")
    class Mine(BaseChatTemplate):
        @classmethod
        def match(cls, model_path):
            return "mine" if "qwen" in model_path.lower() else None

    assert isinstance(choose(tokenizer, "Qwen/Qwen-7B-Chat"), Mine)
    assert choose(tokenizer, tmp_path / "Yi-6B").name == "yi"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("vicunna", ValueError, "config is 'vicunna'; it must be a JSON file, JSON text or one of"),
        ("a\0", ValueError, r"config is 'a\\x00'; it must be a JSON file"),
        (5, TypeError, "config is a int; it must be a ChatTemplateConfig, a name, a file or JSON"),
        ('{"system": 5}', TypeError, "ChatTemplateConfig.system is a int; it must be a str or No"),
        (ChatTemplateConfig("hf", system="x"), ValueError,
         "ChatTemplateConfig.system is 'x'; the template 'hf' takes tokenizer, chat_template"),
    ],
)  # fmt: skip
def test_wrong_choices(config, error, message):
    with pytest.raises(error, match=f"^{message}"):
        choose(OneTemplate(), None, config)


def test_names():
    listed = names()
    assert listed == sorted(listed)
    assert {"base", "hf", "vicuna", "codellama", "internlm-xcomposer2-4khd"} <= {*listed}
    assert not OLDER_NAMES & {*listed}


# Encoding.


class Characters:
    """A tokenizer of one id per character; `first` and `last` are added to every text."""

    def __init__(self, first="<", last=""):
        self.first, self.last = first, last

    def encode(self, text, add_special_tokens=True):
        if add_special_tokens:
            text = self.first + text + self.last
        return [ord(character) for character in text]


@pytest.mark.parametrize(
    ("first", "last", "text", "at_start", "after"),
    [
        ("<", "", "ab", "<ab", "ab"),
        ("<", "", "<ab", "<ab", "<ab"),
        ("", "", "ab", "ab", "ab"),
        ("<", ">", "ab", "<ab", "ab"),
        ("{<", "", "ab", "{<ab", "ab"),
        ("a", "", "ab", "ab", "ab"),
        ("<", "", "", "<", ""),
    ],
)
def test_first_tokens(first, last, text, at_start, after):
    tokenizer, template = Characters(first, last), make("vicuna")
    assert template.encode(tokenizer, text) == [ord(each) for each in at_start]
    assert template.encode(tokenizer, text, sequence_start=False) == [ord(each) for each in after]
    own = TokenizerTemplate(OneTemplate())
    assert own.encode(tokenizer, text) == [ord(each) for each in text]


def test_many_threads_use_one_template():
    template, texts = make("internlm2"), set()

    def work():
        for _ in range(200):
            texts.add(template.messages2prompt(CONVERSATION))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {EXPECTED["internlm2"][0]}


# Imports and documents.


def test_import_is_light():
    code = (
        "import sys, allspark.chat_template as c; c.names()\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'jinja2'} & {*sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_the_page_lists_all_names(repo_root):
    text = (repo_root / "docs" / "chat_templates.md").read_text(encoding="utf-8")
    table = text.split("| form | names |")[1].split("\n\n")[0]
    listed = [name for row in table.splitlines() for name in row.split("`")[1::2]]
    builtin = [name for name in names() if name in EXPECTED or name == "hf"]
    assert sorted(listed) == builtin


def test_the_page_lists_the_bounds(repo_root):
    from allspark.chat_template import tokenizer_template

    bounds = (
        f"| {tokenizer_template.MAX_SECONDS:g} s",
        f"{tokenizer_template.MAX_TEMPLATE_CHARACTERS:,}",
        f"{tokenizer_template.MAX_TEXT_CHARACTERS:,}",
    )
    for page in ("chat_templates.md", "security.md"):
        text = (repo_root / "docs" / page).read_text(encoding="utf-8")
        assert all(bound in text for bound in bounds), page
