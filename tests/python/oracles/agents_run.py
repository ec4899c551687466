"""Runs an agent of OpenAI's agents package with a function, over a server's chat route, whole and
streamed.

usage: agents_run.py URL
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

calls: list[str] = []


@function_tool
def clock(zone: Literal["CET", "UTC"]) -> str:
    """The time in a zone."""
    calls.append(zone)
    return f"noon in {zone}"


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    settings = ModelSettings(
        temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False
    )
    agent = Agent(
        name="clock",
        instructions="You tell the time.",
        model=OpenAIChatCompletionsModel(model="demo", openai_client=client),
        model_settings=settings,
        tools=[clock],
    )
    # The choice is required once; then the model answers in words.
    result = await Runner.run(agent, "What is the time?", max_turns=4)
    assert len(calls) == 1 and calls[0] in ("CET", "UTC"), calls
    assert isinstance(result.final_output, str), result
    streamed = Runner.run_streamed(agent, "What is the time?", max_turns=4)
    kinds = [event.type async for event in streamed.stream_events()]
    assert calls[1:] == calls[:1], calls
    assert "raw_response_event" in kinds and "run_item_stream_event" in kinds, kinds
    assert isinstance(streamed.final_output, str), streamed


set_tracing_disabled(True)
asyncio.run(main())
print("RESULT ok")
