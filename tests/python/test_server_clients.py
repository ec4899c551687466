"""The clients of OpenAI and Anthropic, which check every answer against their own types; and, in
the slow tests, programs that users run against a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from allspark.chat_template import TokenizerTemplate  # noqa: E402
from support import oracles  # noqa: E402
from support.chats import SUM, TEMPLATE, strict_schema  # noqa: E402
from support.http_server import RunningServer  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402

ANSWER = "12 + 35 = 47"
CHAT = {"model": "demo", "messages": SUM, "temperature": 0}
TEXT = {"model": "demo", "prompt": "2+2=", "max_tokens": 4, "temperature": 0}
SCHEMA = strict_schema(zone={"enum": ["CET", "UTC"]})
TOOL = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}
CALL = {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
MESSAGE = {"model": "demo", "messages": SUM, "max_tokens": 40, "extra_body": {"temperature": 0}}
USE = {
    **MESSAGE,
    "max_tokens": 200,
    "tools": [{"name": "clock", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture(scope="module")
def server(model):
    tool_model = dataclasses.replace(model, template=TokenizerTemplate(model.tokenizer, TEMPLATE))
    with RunningServer([tool_model], tool_call_parser="qwen") as server:
        yield server
        wait_for_requests(model, 0)


def options(server, path=""):
    url = f"http://127.0.0.1:{server.port}{path}"
    return {"base_url": url, "api_key": "x", "max_retries": 0, "_strict_response_validation": True}


class Caller:
    """A client, synchronous or not, by the same calls."""

    def __init__(self, client, loop=None):
        self.client = client
        self._loop = loop

    def __call__(self, method, **fields):
        result = method(**fields)
        if self._loop is None:
            return list(result) if fields.get("stream") else result

        async def whole():
            answer = await result
            return [each async for each in answer] if fields.get("stream") else answer

        return self._loop.run_until_complete(whole())

    def list(self, pages):
        if self._loop is None:
            return list(pages)

        async def whole():
            return [each async for each in pages]

        return self._loop.run_until_complete(whole())


def callers(sync, asynchronous):
    yield Caller(sync)
    sync.close()
    loop = asyncio.new_event_loop()
    yield Caller(asynchronous, loop)
    loop.run_until_complete(asynchronous.close())
    loop.close()


def test_the_client_of_openai_reads_every_answer(server):
    given = options(server, "/v1")
    for call in callers(openai.OpenAI(**given), openai.AsyncOpenAI(**given)):
        create = call.client.chat.completions.create
        rich = {"logprobs": True, "top_logprobs": 3, "n": 2, "seed": 1, "temperature": 1}
        whole = call(create, **CHAT)
        assert whole.choices[0].message.content == ANSWER
        assert len(call(create, **{**CHAT, **rich}).choices) == 2
        chunks = call(create, **CHAT, stream=True, stream_options={"include_usage": True})
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        assert text == ANSWER and chunks[-1].usage == whole.usage
        assert call(create, **{**CHAT, **rich}, stream=True)
        (tool_call,) = call(create, **CALL, parallel_tool_calls=False).choices[0].message.tool_calls
        assert json.loads(tool_call.function.arguments)["zone"] in ("CET", "UTC")
        parts = [each.choices[0].delta for each in call(create, **CALL, stream=True)]
        calls = [each for part in parts for each in part.tool_calls or ()]
        assert "".join(each.function.arguments or "" for each in calls).startswith('{"zone"')

        create = call.client.completions.create
        whole = call(create, **TEXT, logprobs=2)
        assert whole.choices[0].text == "4"
        assert len(call(create, **{**TEXT, "prompt": ["1+1=", "2+2="], "n": 2}).choices) == 4

        found = call(call.client.embeddings.create, model="demo", input=["a"],
                     encoding_format="float")  # fmt: skip
        assert len(found.data[0].embedding) > 8
        assert [each.id for each in call.list(call.client.models.list())] == ["demo"]
        assert call(call.client.models.retrieve, model="demo").id == "demo"


def test_the_client_of_openai_decodes_embeddings(server):
    # Its type of an answer lacks the form that it asks for by itself.
    given = {**options(server, "/v1"), "_strict_response_validation": False}
    with openai.OpenAI(**given) as client:
        found = client.embeddings.create(model="demo", input=["a", "b"])
        floats = client.embeddings.create(model="demo", input=["a", "b"], encoding_format="float")
        for one, other in zip(found.data, floats.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding)


def test_the_client_of_openai_reads_streamed_texts(server):
    # Its type of a text completion lacks the finish_reason that all chunks but the last have.
    given = {**options(server, "/v1"), "_strict_response_validation": False}
    with openai.OpenAI(**given) as client:
        chunks = list(client.completions.create(**TEXT, stream=True))
    assert "".join(each.choices[0].text for each in chunks) == "4"
    assert [each.choices[0].finish_reason for each in chunks][-1] is not None


def test_the_client_of_openai_knows_the_errors(server, model):
    with openai.OpenAI(**options(server, "/v1")) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(**{**CHAT, "model": "nobody"})
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**TEXT, n=129)
        assert caught.value.param == "n" and "129" in caught.value.message
    with RunningServer([model], api_keys=("k",)) as guarded:
        with openai.OpenAI(**options(guarded, "/v1")) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()


def test_the_client_of_anthropic_reads_every_answer(server):
    given = options(server)
    clients = anthropic.Anthropic(**given), anthropic.AsyncAnthropic(**given)
    for call in callers(*clients):
        create = call.client.messages.create
        whole = call(create, **MESSAGE)
        assert whole.content[0].text == ANSWER and whole.stop_reason == "end_turn"
        events = call(create, **MESSAGE, stream=True)
        texts = [each.delta.text for each in events if each.type == "content_block_delta"]
        assert "".join(texts) == ANSWER
        used = call(create, **USE)
        assert used.stop_reason == "tool_use" and used.content[-1].input["zone"] in ("CET", "UTC")
        assert call(create, **USE, stream=True)[-1].type == "message_stop"
        count = call(call.client.messages.count_tokens, model="demo", messages=SUM)
        usage = whole.usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        assert [each.id for each in call.list(call.client.models.list())] == ["demo"]
        assert call(call.client.models.retrieve, model_id="demo").id == "demo"


# Programs.


@pytest.fixture(scope="module")
def url(server):
    return f"http://127.0.0.1:{server.port}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["langchain", "agents"])
def test_frameworks_call_functions(url, name):
    out = oracles.run(oracles.environment("clients"), f"{name}_run.py", url)
    assert out.endswith("RESULT ok\n")


@pytest.mark.slow
def test_lm_eval_scores_by_both_routes(url, model, demo_model, tmp_path):
    out = oracles.run(
        oracles.environment("clients"), "lm_eval_run.py", url, demo_model, tmp_path,
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path),
    )  # fmt: skip
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    scored = found["local-completions sums_choice"]
    assert scored["metrics"]["acc,none"] == 1.0
    # The log-likelihood of each answer is the engine's own.
    for row, options_of in zip(scored["answers"], [(3, 4, 13), (4, 5, 14)], strict=False):
        question = {3: "1+2=", 4: "2+2="}[options_of[0]]
        begin = len(model.tokenizer.encode(question))
        for ((likelihood, is_greedy),), option in zip(row, options_of, strict=True):
            (score,) = model.engine.score("demo", model.loader, f"{question}{option}")
            assert likelihood == pytest.approx(sum(score.logprobs[begin - 1 :]), rel=1e-4)
            assert is_greedy == (option == options_of[0])
    for name in ("local-completions sums_chat", "local-chat-completions sums_chat"):
        assert found[name]["metrics"]["exact_match,number"] == 1.0, found[name]
