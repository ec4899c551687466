"""Asks a server by LangChain's chat model and embeddings. Fails where an answer is not the expected
one.

usage: langchain_run.py URL
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict

options = {"base_url": sys.argv[1] + "/v1", "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(model="demo", temperature=0, max_completion_tokens=200, **options)
SUM = [("user", "What is 12+35?")]


@tool
def clock(zone: Literal["CET", "UTC"]) -> str:
    """The time in a zone."""
    return f"noon in {zone}"


class Colour(BaseModel):
    """A colour."""

    # Else a small model writes spaces, or more properties, until its length ends.
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"x-guidance": {"whitespace_flexible": False}}
    )
    name: Literal["red", "blue"]


answer = chat.invoke(SUM)
assert answer.content == "12 + 35 = 47", answer
assert answer.usage_metadata["output_tokens"] > 4, answer
assert answer.response_metadata["finish_reason"] == "stop", answer

whole = None
for chunk in chat.stream(SUM, stream_usage=True):
    whole = chunk if whole is None else whole + chunk
assert whole.content == "12 + 35 = 47", whole
assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"], whole


async def asynchronous():
    parts = [chunk.content async for chunk in chat.astream(SUM)]
    assert "".join(parts) == (await chat.ainvoke(SUM)).content
    assert [each.content for each in await chat.abatch([SUM, SUM])] == ["12 + 35 = 47"] * 2


asyncio.run(asynchronous())

asking = chat.bind_tools([clock], tool_choice="any", parallel_tool_calls=False)
called = asking.invoke([("user", "What is the time?")])
(call,) = called.tool_calls
assert call["name"] == "clock" and call["args"]["zone"] in ("CET", "UTC"), called
whole = None
for chunk in asking.stream([("user", "What is the time?")]):
    whole = chunk if whole is None else whole + chunk
assert [each["args"] for each in whole.tool_calls] == [call["args"]], whole
result = ToolMessage(clock.invoke(call["args"]), tool_call_id=call["id"])
last = chat.bind_tools([clock], tool_choice="none")
assert last.invoke([("user", "What is the time?"), called, result]).content

for method in ("json_schema", "function_calling"):
    structured = chat.with_structured_output(Colour, method=method, include_raw=True)
    found = structured.invoke([("user", "A colour?")])
    assert found["parsed"] and found["parsed"].name in ("red", "blue"), (method, found)

vectors = OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False, **options)
assert len({len(row) for row in vectors.embed_documents(["a", "b c"])}) == 1
assert abs(sum(x * x for x in vectors.embed_query("a")) - 1) < 1e-3
print("RESULT ok")
