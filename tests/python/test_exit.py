"""A process ends with its own exit code and no noise while daemon threads wait in the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Threads that wait for long, and threads that return to Python all the time. The last argument says
# how the process ends.
PROGRAM = """
import asyncio, contextlib, itertools, sys, threading, time
from allspark._allspark import MaskQueue
from engine_fixture import GREEDY, start_endless, start_engine
from support.vocabularies import tokenizer_directory
from tokenizers import Tokenizer

checkpoint, num_threads, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
stuck, _ = start_engine(
    checkpoint, engine_max_batch=1, max_waiting_requests=1, queue_full_policy="block",
    token_mask_timeout_ms=10**6,
)
[endless] = start_endless(stuck)
_, waiting, queue = stuck.start_request_ids("m", None, [1, 2], GREEDY)
draining, _ = start_engine(checkpoint, token_mask_timeout_ms=10**6)
start_endless(draining)
busy, _ = start_engine(checkpoint)
masks = MaskQueue()


class Loader:  # whose tokenizer is without the GIL most of the time
    def __init__(self):
        path = tokenizer_directory("byte_level") / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(path))

    def get_tokenizer(self):
        return self

    def encode(self, text, add_special_tokens=True):
        return [1] if self.tokenizer.encode_batch([text]) else []  # as transformers calls it


loader = Loader()
TEXT = "a text of some length " * 200


def prepare():
    return loader.encode(TEXT), GREEDY


def read():
    for _ in busy.start_request_ids("m", None, [1, 2], {**GREEDY, "max_new_tokens": 400})[2]:
        pass


CALLS = [
    queue.Get,
    lambda: list(queue),
    lambda: queue.GetWithTimeout(10**6),
    lambda: queue.GetWithTimeout(1),
    lambda: stuck.sync_request("m", endless),
    lambda: stuck.sync_request("m", timeout_ms=1),
    lambda: stuck.start_request_ids("m", None, [1, 2], GREEDY),
    lambda: asyncio.run(stuck.start_request_ids_async("m", None, [1, 2], GREEDY)),
    lambda: stuck.score("m", None, [[1, 2, 3]]),
    lambda: stuck.find_prefix("m", [1, 2, 3]),
    lambda: draining.stop_model("m", drain=True),
    masks.take,
    read,
    lambda: busy.score("m", None, [[1, 2, 3]]),
    lambda: busy.embed("m", None, [[1, 2, 3]]),
    lambda: busy.sync_request("m"),
    lambda: busy.find_prefix("m", [1, 2, 3]),
    lambda: busy.start_request_text("m", loader, TEXT, GREEDY),
    lambda: asyncio.run(busy.start_request_text_async("m", loader, TEXT, GREEDY)),
    lambda: asyncio.run(busy.start_prepared_async("m", loader, prepare)),
    lambda: busy.start_request_ids("m", loader, [1], {**GREEDY, "bad_words": [TEXT]}),
    lambda: busy.score("m", loader, TEXT),
]
entered = threading.Semaphore(0)


def run(call):
    entered.release()
    while True:
        with contextlib.suppress(Exception):  # of a model that has been stopped
            call()


for call in itertools.islice(itertools.cycle(CALLS), num_threads):
    threading.Thread(target=run, args=[call], daemon=True).start()
for _ in range(num_threads):
    entered.acquire()
time.sleep(0.15)
if end == "exit":
    sys.exit(3)
if end == "error":
    raise SystemExit("the end")
if end == "stop":
    for engine in (stuck, busy):
        engine.stop_model("m")
    sys.exit(3)
del stuck, busy, draining, queue
sys.exit(3)
"""


@pytest.mark.parametrize("repetition", range(3))
@pytest.mark.parametrize("end", ["exit", "error", "stop", "delete"])
def test_waiting_daemon_threads_do_not_disturb_the_exit(checkpoint, end, repetition):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint), "32", end],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=300,
    )
    assert result.stderr.strip() == ("the end" if end == "error" else "")
    assert result.stdout == ""
    assert result.returncode == (1 if end == "error" else 3)


AT_EXIT = """
import atexit, sys


def start():
    config = {"response_format": {"type": "json_object"}, "max_new_tokens": 1}
    print(engine.start_request_text("m", loader, "x", config)[0].name)


atexit.register(start)  # it runs after the handlers of what is imported below
from engine_fixture import start_engine

engine, loader = start_engine(sys.argv[1])
loader.get_tokenizer()
"""


def test_a_handler_of_the_exit_may_start_a_guided_request(demo_model):
    result = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(demo_model)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=60,
    )
    assert (result.returncode, result.stderr.strip()) == (0, "")
    # Python from 3.12 on starts no thread any more, which compiling the format takes.
    assert result.stdout.strip() in ("ALLSPARK_SUCCESS", "ALLSPARK_PARAM_ERROR")
