"""The readers of pipeline and server miss no token, whenever these and the end come."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
from allspark.pipeline.runs import Request, Running
from allspark.serve.choice import Choice, Own
from allspark.text_options import TextOptions
from allspark.text_queue import TextQueue
from support.native_queue import NativeElements, SteppedNative

TOKENS = [97, 98, 99, 100]


class Letters:
    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def text_queue(rng, stop_words=()):
    """A queue whose request takes steps before any call of the reader."""
    native = SteppedNative(
        [rng.choice([0, 0, 1, 2]) for _ in range(40)],
        TOKENS,
        elements=lambda ids: NativeElements(ids_from_generate=ids),
    )
    options = TextOptions(stop_words=stop_words)
    return TextQueue(native, Letters(), options, stop=native.run_to_the_end)


@pytest.mark.parametrize("stop_words", [(), ("c",)])
def test_a_choice_of_the_server_has_all_tokens(stop_words):
    async def read(seed):
        engine = SimpleNamespace(release_request=lambda name, handle: None)
        entry = SimpleNamespace(model=SimpleNamespace(engine=engine, name="m"))
        queue = text_queue(random.Random(seed), stop_words)
        choice = Choice(0, entry, None, queue, Own())
        while not choice.is_finished:
            choice.read()
        return choice.token_ids, choice.take().text

    wanted = (TOKENS[:3], "ab") if stop_words else (TOKENS, "abcd")
    for seed in range(200):
        assert asyncio.run(read(seed)) == wanted, seed


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_of_the_pipeline_has_all_tokens(stream):
    fields = {"skip_special_tokens": True}
    request = Request(None, 0, [1], fields, frozenset(), stream)
    for seed in range(200):
        running = Running(request, None, text_queue(random.Random(seed)))
        found = []
        while not running.is_done:
            if (response := running.read()) is not None:
                found.append(response)
        assert "".join(response.text for response in found) == "abcd", seed
        assert [i for response in found for i in response.token_ids] == TOKENS, seed
