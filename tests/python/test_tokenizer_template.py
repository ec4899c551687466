"""The Jinja templates of tokenizers: equal to transformers' own rendering, and clear about what
they cannot render.
"""

from __future__ import annotations

import copy
import json

import pytest

transformers = pytest.importorskip("transformers")

from allspark.chat_template import TokenizerTemplate, choose  # noqa: E402
from allspark.chat_template import tokenizer_template as limits  # noqa: E402
from allspark.chat_template.jinja_syntax import template_facts  # noqa: E402
from support.chats import assistant, user  # noqa: E402
from support.checkpoints import shared_data, shared_data_path  # noqa: E402
from support.versions import is_before  # noqa: E402
from support.vocabularies import qwen_tokenizer  # noqa: E402

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer()


@pytest.fixture
def make(tokenizer):
    return lambda text=CHATML, **options: TokenizerTemplate(tokenizer, text, **options)


def published_templates():
    folder = shared_data_path() / "chat_templates"
    paths = sorted(folder.rglob("*.jinja"))
    return [path.relative_to(folder).as_posix() for path in paths] or ["absent"]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds «two» numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "one"},
                    "b": {"type": "number", "description": "another"},
                },
                "required": ["a"],
            },
        },
    }
]
ARGUMENTS = {"a": 1, "b": 2.5}


def called(arguments, content=None):
    """A question, a tool call with its result, and the next question."""
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "add", "arguments": arguments},
    }
    return [
        user("1 + 2.5?"),
        assistant(content, tool_calls=[call]),
        {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "3.5"},
    ]


CONVERSATIONS = {
    "one": [user("What is a «queue»?")],
    "system": [{"role": "system", "content": " Be brief. "}, user("Hi")],
    "many": [user(" a\n"), assistant(" b "), user("c"), assistant("日本"), user("e")],
    "system and many": [{"role": "system", "content": "S"}, user("a"), assistant("b"), user("c")],
    "continued": [user("a"), assistant("The answer is")],
}


def either(function):
    """What a rendering gives; None for an error."""
    try:
        return function()
    except Exception:
        return None


def theirs(tokenizer, text, messages, **options):
    options = {"add_generation_prompt": True, **options}
    return either(
        lambda: tokenizer.apply_chat_template(
            messages, chat_template=text, tokenize=False, **options
        )
    )


@pytest.mark.parametrize("name", published_templates())
def test_equal_to_transformers(tokenizer, name):
    text = (shared_data() / "chat_templates" / name).read_text(encoding="utf-8")
    template, facts = TokenizerTemplate(tokenizer, text), template_facts(text)
    more = {"functions": "[]", "datetime": "now"} if "firefunction" in name else {}
    choices = [None, TOOLS] if "tools" in facts.variables else [None]
    num_equal = 0
    for messages in CONVERSATIONS.values():
        for tools in choices:
            for prompt in (True, False):
                expected = theirs(
                    tokenizer, text, messages, tools=tools, add_generation_prompt=prompt, **more
                )
                ours = either(
                    lambda: template.render(messages, tools, prompt, **more)  # noqa: B023
                )
                assert ours == expected
                num_equal += expected is not None
    assert num_equal >= 4, "few conversations can be rendered"
    # Continued: the last answer stays open.
    messages = CONVERSATIONS["continued"]
    options = {"continue_final_message": True, "add_generation_prompt": False, **more}
    num_equal = 0
    for tools in choices:
        expected = theirs(tokenizer, text, messages, tools=tools, **options)
        if expected is not None:
            num_equal += 1
            assert expected.endswith("The answer is")
            assert template.render(messages, tools, continue_final_message=True, **more) == expected
            assert template.messages2prompt(messages, tools=tools, **more) == expected
    assert num_equal


# The templates that have a form for tool calls, and what they take for arguments.
WITH_CALLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja": dict,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja": dict,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja": dict,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja": dict,
    "Qwen-Qwen2.5-7B-Instruct.jinja": dict,
    "community/qwen2.5-instruct.jinja": dict,
    "fireworks-ai-llama-3-firefunction-v2.jinja": str,
    "meetkai-functionary-medium-v3.1.jinja": str,
    "meetkai-functionary-medium-v3.2.jinja": str,
    "meta-llama-Llama-3.1-8B-Instruct.jinja": dict,
    "meta-llama-Llama-3.2-3B-Instruct.jinja": dict,
    "meta-llama-Llama-3.3-70B-Instruct.jinja": dict,
    "mistralai-Mistral-Nemo-Instruct-2407.jinja": dict,
}
# These write a tool call only of a message whose content is None, which transformers 5 leaves out
# and TokenizerTemplate puts back.
NEEDS_NONE = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
    "llama-cpp-deepseek-r1.jinja",
}


@pytest.mark.parametrize("name", published_templates())
def test_tool_calls(tokenizer, name):
    """Arguments may be an object or JSON text; the template is given the one that it takes."""
    text = (shared_data() / "chat_templates" / name).read_text(encoding="utf-8")
    template = TokenizerTemplate(tokenizer, text)
    tools = TOOLS if "tools" in template_facts(text).variables else None
    more = {"functions": "[]", "datetime": "now"} if "firefunction" in name else {}
    as_text = json.dumps(ARGUMENTS)
    if name in WITH_CALLS:
        for content in (None, ""):
            given = ARGUMENTS if WITH_CALLS[name] is dict else as_text
            expected = theirs(tokenizer, text, called(given, content), tools=tools, **more)
            assert expected is not None and '"a": 1' in expected and "3.5" in expected
            for arguments in (ARGUMENTS, as_text):
                messages = called(arguments, content)
                before = copy.deepcopy(messages)
                assert template.render(messages, tools, **more) == expected
                assert messages == before
    elif name in NEEDS_NONE:
        tools = None  # llama.cpp's has a form for them that transformers has not
        for content in (None, "", []):
            written = template.render(called(ARGUMENTS, content), tools)
            call = '<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2.5}\n```'
            assert call in written and "3.5" in written
            assert written.startswith(template.render(called(ARGUMENTS, content)[:1], tools, False))
    else:
        with pytest.raises(ValueError, match=r"^(messages\[1\].tool_calls: )?the chat template"):
            template.render(called(as_text))


CALLS = "{% for m in messages if m.tool_calls is mapping %}{% endfor %}"  # there is a form for them


def test_a_missing_content_is_none_where_the_template_asks_for_it(make):
    """And nothing else changes, such as a newline with which the template begins."""
    messages = called({}, "")[:2]
    for test in ("is none", "== none", "is not none"):
        text = f"\n{{% for m in messages %}}({{{{ m.content {test} }}}}){{% endfor %}}{CALLS}"
        found = [test != "is not none" if m["role"] == "assistant" else test == "is not none"
                 for m in messages]  # fmt: skip
        template = make(text)
        assert template.render(messages) == "\n" + "".join(f"({each})" for each in found)
        assert template.render(messages[:1]) == f"\n({found[0]})"
    # Others see what they are given.
    seen = make(f"{{% for m in messages %}}({{{{ m.content is defined }}}}){{% endfor %}}{CALLS}")
    assert seen.render(messages) == "(True)(True)"
    # transformers 4 gives them a None, 5 leaves it out.
    is_there = is_before("transformers", 5)
    assert seen.render(called({})[:2]) == f"(True)({is_there})"


def test_reasoning_has_one_name(make):
    text = "{% for m in messages %}{{ m.reasoning_content }}|{% endfor %}"
    thought = {"content": "b", "role": "assistant"}
    for given in (
        {"reasoning_content": "t"},
        {"reasoning": "t"},
        {"reasoning": "t", "reasoning_content": None},
        {"reasoning": "t", "reasoning_content": ""},
        {"reasoning": "t", "reasoning_content": "t"},
    ):
        assert make(text).render([user("a"), {**thought, **given}, user("c")]) == "|t||"
    for name in ("reasoning", "reasoning_content"):
        with pytest.raises(TypeError, match=rf"^messages\[1\].{name} is a list; it must be a str"):
            make(text).render([user("a"), {**thought, name: ["t"]}])


def test_answers_of_servers_without_content(make):
    said = {"role": "assistant", "content": "No."}
    parts = [{"type": "text", "text": "N"}, {"type": "refusal", "refusal": "o."}]
    for given, expected in (
        ({"content": None, "refusal": "No."}, said),
        ({"refusal": "No."}, said),
        ({"content": "No.", "refusal": None}, said),
        ({"content": parts}, {**said, "content": "N\no."}),
        ({"content": None, "reasoning_content": "t"}, {**said, "content": ""}),
        ({"content": None, "reasoning": "t", "refusal": None}, {**said, "content": ""}),
    ):
        answer = {"role": "assistant", **given}
        assert make().render([user("a"), answer]) == make().render([user("a"), expected])
    with pytest.raises(TypeError, match=r"^messages\[0\].refusal is a int; it must be a str"):
        make().render([assistant(None, refusal=5)])
    with pytest.raises(ValueError, match=r"^messages\[0\].content\[1\].type is 'refusal'; it must"):
        make().render([user(parts)])


def test_every_template_is_there():
    shared_data()
    found = {*published_templates()}
    assert len(found) == 35 and {*WITH_CALLS, *NEEDS_NONE} <= found


# Content.


def test_parts_of_a_content(make):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert make().render([user(parts)]) == make().render([user("a\nb")])
    seeing = make(
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    )
    assert seeing.render([user(parts)]) == "<a><b>"
    assert (
        make("{{ messages[0].content | map(attribute='text') | join('-') }}").render([user(parts)])
        == "a-b"
    )
    for loop in (
        "{% set content = messages[0]['content'] %}{% set other = content %}"
        "{% for p in other | selectattr('type', 'equalto', 'text') %}<{{ p.text }}>{% endfor %}",
        "{% macro show(what) %}{% for p in what %}<{{ p.text }}>{% endfor %}{% endmacro %}"
        "{{ show(messages[0].content) }}",
        "{% macro show(what) %}{% for p in what %}<{{ p.text }}>{% endfor %}{% endmacro %}"
        "{{ show(what=messages[0].content) }}",
        "{% generation %}{% for p in (messages[0].content if true else x) %}<{{ p.text }}>"
        "{% break %}{% endfor %}{% endgeneration %}<b>",
    ):
        assert make(loop).render([user(parts)]) == "<a><b>", loop


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("text", TypeError, "messages is a str; it must be a list of messages"),
        ({"role": "user"}, TypeError, "messages is a dict; it must be a list of messages"),
        ([], ValueError, "messages is empty; it must hold at least one message"),
        (["x"], TypeError, "messages[0] is a str; it must be a dict with role and content"),
        ([{"content": "x"}], TypeError, "messages[0].role is None; it must be a str"),
        ([{"role": "", "content": "x"}], ValueError, "messages[0].role is ''; it must not be"),
        ([user("a"), user(5)], TypeError,
         "messages[1].content is a int; it must be a str, None or a list of parts"),
        ([user(None)], ValueError,
         "messages[0].content is None; only an assistant's message with tool_calls, reasoning or"),
        ([{"role": "assistant"}], ValueError,
         "messages[0].content is None; only an assistant's message with tool_calls, reasoning or"),
        ([user(["a"])], TypeError, "messages[0].content[0] is a str; it must be a dict with typ"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], ValueError,
         "messages[0].content[0].type is 'image_url'; it must be 'text', since only text is read"),
        ([user([{"type": "text", "text": "a"}, {"type": "input_audio"}])], ValueError,
         "messages[0].content[1].type is 'input_audio'; it must be 'text'"),
        ([user([{"type": "text"}])], TypeError, "messages[0].content[0].text is None; it must be"),
        ([assistant("", tool_calls="x")], TypeError, "messages[0].tool_calls is a str; it must be"),
        ([assistant("", tool_calls=[5])], TypeError, "messages[0].tool_calls[0] is a int; it must"),
        ([assistant("", tool_calls=[{}])], TypeError, "messages[0].tool_calls[0].function is None"),
        ([assistant("", tool_calls=[{"function": {}}])], TypeError,
         "messages[0].tool_calls[0].function.name is None; it must be a str"),
        (called('{"a": 1'), ValueError,
         "messages[1].tool_calls[0].function.arguments is '{\"a\": 1'; it must be a JSON object: "
         "Expecting ',' delimiter"),
        (called("[1]"), ValueError,
         "messages[1].tool_calls[0].function.arguments is '[1]'; it must be a JSON object"),
        (called('{"a": NaN}'), ValueError,
         "messages[1].tool_calls[0].function.arguments is '{\"a\": NaN}'; it must be a JSON "
         "object: NaN is not JSON"),
        (called('{"a": ' + "[" * 100_000), ValueError,
         "messages[1].tool_calls[0].function.arguments is '{\"a\": [[[["),
        (called(5), TypeError,
         "messages[1].tool_calls[0].function.arguments is a int; it must be a JSON object, or its"),
    ],
)  # fmt: skip
def test_wrong_messages(make, messages, error, message):
    with pytest.raises(error) as caught:
        make().render(messages)
    assert str(caught.value).startswith(message)
    if messages != "text":
        with pytest.raises(error) as caught:
            make().messages2prompt(messages)
        assert str(caught.value).startswith(message)


def test_empty_arguments(make):
    template = make("{{ messages[1].tool_calls[0].function.arguments | tojson }}")
    for arguments in (None, "", " ", "{}", {}):
        assert template.render(called(arguments)[:2]) == "{}"
    joined = make("{{ '' + messages[1].tool_calls[0].function.arguments }}")
    for arguments in (None, "", " ", "{}", {}):
        assert joined.render(called(arguments)[:2]) == "{}"
    assert joined.render(called('{"b":  "ä"}')[:2]) == '{"b":  "ä"}'
    assert joined.render(called({"b": "ä"})[:2]) == '{"b": "ä"}'


def test_empty_tool_calls_are_none(make):
    template = make("{{ 'tool_calls' in messages[0] }}")
    assert template.render([assistant("a", tool_calls=[])]) == "False"
    assert template.render([assistant("a", tool_calls=None)]) == "False"


# Roles, tools and variables.


def test_roles(make):
    strict = make(
        "{% for m in messages %}{% if m.role == 'user' or m.role == 'judge' %}{{ m.role }}"
        "{{ m.content }};{% elif m.role == 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    developer = {"role": "developer", "content": "D"}
    assert strict.render([developer, user("a")]) == "[D]usera;"
    assert strict.render([{"role": "judge", "content": "a"}]) == "judgea;"
    with pytest.raises(ValueError) as caught:
        strict.render([user("a"), {"role": "poet", "content": "a"}])
    assert str(caught.value) == "messages[1].role is 'poet', which the chat template leaves out"
    with pytest.raises(ValueError, match=r"messages\[1\].role is 'tool', which the chat template"):
        strict.render([user("3"), {"role": "tool", "content": "3"}])
    assert "<|im_start|>poet\na<|im_end|>" in make().render([{"role": "poet", "content": "a"}])
    knows = make("{% if messages[0].role == 'developer' %}yes{% endif %}")
    assert knows.render([developer]) == "yes"


def test_what_the_template_does_not_read(make):
    for name in ("tools", "documents"):
        with pytest.raises(
            ValueError, match=f"^{name}: the chat template has no place for {name}$"
        ):
            make().render([user("a")], **{name: [{"name": "x"}]})
    # Without them it could: they are what is wrong.
    for name in ("tools", "documents"):
        template = make(f"{{% if {name} %}}{{{{ {name} | map('upper') | tojson }}}}{{% endif %}}")
        with pytest.raises(ValueError) as caught:
            template.render([user("a")], **{name: [{"name": "x"}]})
        assert str(caught.value) == (
            f"{name} cannot be written: the chat template failed: TypeError: Object of type "
            "generator is not JSON serializable"
        )
    assert make("{{ tools is none }}").render([user("a")], tools=[]) == "True"
    assert make("{{ tools[0].name }}").render([user("a")], tools=[{"name": "x"}]) == "x"
    assert make("{{ documents[0].text }}").render([user("a")], documents=[{"text": "x"}]) == "x"
    for tools, message in (({}, "tools is a dict; it must be a list of tools"),
                           (["x"], r"tools\[0\] is a str; it must be a dict")):  # fmt: skip
        with pytest.raises(TypeError, match=message):
            make("{{ tools }}").render([user("a")], tools=tools)


def test_variables_of_a_template(make):
    template = make("{{ enable_thinking }}{{ bos_token }}")
    assert template.render([user("a")], enable_thinking=False) == "False<|endoftext|>"
    assert template.render([user("a")], enable_thinking=1, bos_token="x") == "1x"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "conversation", "messages", "self", "return_dict",
             "tokenizer_kwargs", "conversations", "return_assistant_tokens_mask"],
)  # fmt: skip
def test_variables_are_no_options(make, name):
    call = lambda: make().render([user("a")], **{name: "x"})  # noqa: E731
    if name in ("messages", "self"):
        with pytest.raises(TypeError):
            call()
    else:
        with pytest.raises(ValueError, match=f"^{name} is no variable that can be given to a chat"):
            call()


# Errors of templates.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('Only cats may speak') }}",
         "the chat template refuses the messages: Only cats may speak"),
        ("{{ nothing.at.all }}", "the chat template failed: UndefinedError: 'nothing' is undef"),
        ("{{ 'a' + 1 }}", "the chat template failed: TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "the chat template failed: ZeroDivisionError"),
        ("a\nb{% if %}", "the chat template is wrong in line 2: Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed: SecurityError"),
        ("{{ 9 ** 9 ** 9 }}", "the chat template has the operator ** in line 1"),
        ("a\n{{ " + "(" * 100_000 + "}}", "the chat template is nested too deeply"),
        ("{% set x = messages.append(1) %}", "the chat template failed: SecurityError"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "the chat template failed: SyntaxError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
         "the chat template failed: RecursionError"),
        ("{{ raise_exception('x' * 5000) }}", "the chat template refuses the messages: xxx"),
    ],
)  # fmt: skip
def test_templates_that_fail(make, text, message):
    with pytest.raises(ValueError) as caught:
        make(text).render([user("a")])
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 600


def test_sizes(make, monkeypatch):
    size = limits.MAX_TEMPLATE_CHARACTERS
    assert make("x" * size).render([user("a")]) == "x" * size
    with pytest.raises(ValueError, match=f"has {size + 1} characters; it must have at most {size}"):
        make("x" * (size + 1)).render([user("a")])
    monkeypatch.setattr(limits, "MAX_TEXT_CHARACTERS", 10)
    assert make("{{ 'x' * 10 }}").render([user("a")]) == "x" * 10
    with pytest.raises(
        ValueError, match="the chat template made 11 characters; it must make at mo"
    ):
        make("{{ 'x' * 11 }}").render([user("a")])


# Continuing.


def test_a_continued_answer(make):
    template = make()
    begun = [user("a"), assistant(" The answer")]
    expected = "<|endoftext|><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n The answer"
    assert template.render(begun, continue_final_message=True) == expected
    assert template.messages2prompt(begun) == expected
    closed = template.render(begun)
    assert closed == expected + "<|im_end|>\n<|im_start|>assistant\n"
    for messages, message in (
        ([user("a")], r"messages\[0\].role is 'user'; with continue_final_message it must be"),
        (called({})[:2], r"messages\[1\].content is None; with continue_final_message it must"),
    ):
        calling = make(CHATML + "{{ messages[1].tool_calls }}{{ tool_calls }}")
        with pytest.raises(ValueError, match=message):
            calling.render(messages, continue_final_message=True)
    cutting = make("{{ messages[-1].content[:3] }}")
    with pytest.raises(ValueError, match="failed: ValueError: continue_final_message is set but"):
        cutting.render(begun, continue_final_message=True)


def test_the_middle_of_a_sequence(make, tokenizer):
    template = make()
    expected = "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert template.get_prompt("q", sequence_start=False) == expected
    assert template.messages2prompt("q", sequence_start=False) == expected
    assert template.messages2prompt([user("q")], False) == expected
    whole = template.render([user("a"), assistant("b")], add_generation_prompt=False)
    assert whole.removesuffix("\n") + expected == template.render(
        [user("a"), assistant("b"), user("q")]
    )
    spaced = make("{% for m in messages %}[{{ m.content }} <|im_end|>{% endfor %}")
    assert spaced.get_prompt("q", False) == "[q <|im_end|>"
    unmarked = make("{% for m in messages %}{{ m.content }};{% endfor %}")
    assert unmarked.get_prompt("q", False) == ";q;"
    with pytest.raises(ValueError, match="the chat template cannot go on with a sequence"):
        make("{{ messages[-1].content }}").get_prompt("q", False)


# The object.


def test_encoding_adds_nothing(make, tokenizer):
    text = make().get_prompt("q")
    ids = make().encode(tokenizer, text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1
    assert make().encode(tokenizer, text, sequence_start=False) == ids


def test_the_template_of_the_demo_model(demo_model):
    template = TokenizerTemplate(model_path=str(demo_model))
    assert template.get_prompt("q") == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert template.stop_words == ["<|im_end|>"]
    assert repr(choose(None, demo_model, "hf")) == "TokenizerTemplate('hf')"
    assert choose(template.tokenizer, demo_model).render([user("q")]) == template.get_prompt("q")


def test_several_templates_of_a_tokenizer(tokenizer):
    own = copy.copy(tokenizer)
    own.chat_template = {"default": "plain", "tool_use": "tools:{{ tools | length }}"}
    template = TokenizerTemplate(own)
    assert template.render([user("a")]) == "plain"
    assert template.render([user("a")], tools=TOOLS) == "tools:1"
    own.chat_template = {"other": "x"}
    with pytest.raises(ValueError, match="multiple chat templates with no default"):
        TokenizerTemplate(own).render([user("a")])


def test_wrong_arguments(tokenizer):
    with pytest.raises(
        ValueError, match="^tokenizer and model_path are None; one of them must be g"
    ):
        TokenizerTemplate()
    with pytest.raises(ValueError, match="^the tokenizer has no chat template, and none is given$"):
        TokenizerTemplate(tokenizer)
    with pytest.raises(TypeError, match="^chat_template is a bytes; it must be a str or None$"):
        TokenizerTemplate(tokenizer, b"x")
    with pytest.raises(TypeError, match="^stop_words is a str; it must be a list of str$"):
        TokenizerTemplate(tokenizer, "x", stop_words="y")
    with pytest.raises(TypeError, match="^prompt is None; it must be a str$"):
        TokenizerTemplate(tokenizer, "x").get_prompt(None)
    assert TokenizerTemplate(tokenizer, "x", stop_words=[]).stop_words == []
