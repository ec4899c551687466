"""A fork of the engine's process: calls say what is wrong, nothing waits, an engine of its own
works, and the parent goes on undisturbed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.versions import is_before

# What comes before and after the fork's own part. Threads of the parent wait in the engine, since
# the fork has their locks as they hold them.
BEFORE = """
import asyncio, gc, os, sys, threading, time
from allspark import AllSparkError, AsStatus, GenerateRequestStatus
from allspark._allspark import MaskQueue
from allspark.guided import GuidedDecoding
from engine_fixture import GREEDY, read_all, start_endless, start_engine

checkpoint, OK = sys.argv[1], AsStatus.ALLSPARK_SUCCESS
engine, loader = start_engine(checkpoint, engine_max_batch=1, token_mask_timeout_ms=10**6)
tokens = read_all(engine.start_request_ids("m", None, [1, 2, 3], GREEDY)[2])
status, *_ = asyncio.run(engine.start_request_ids_async("m", None, [1, 2, 3], GREEDY))
assert status == OK
engine.sync_request("m")
[endless] = start_endless(engine)
_, handle, queue = engine.start_request_ids("m", None, [1, 2, 3], GREEDY)
masks, guided = MaskQueue(), GuidedDecoding()
for wait in [queue.Get, masks.take, lambda: engine.sync_request("m", endless)]:
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
parent = os.getpid()


def text(noun):
    return (
        f"this {noun} was created in process {parent} and does not live in process {os.getpid()}, "
        "its fork; create one there"
    )


child = os.fork()
if child == 0:
"""
AFTER = """
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert queue.GenerateStatus() == GenerateRequestStatus.Init
_, handle, queue = engine.start_request_ids("m", None, [1, 2, 3], GREEDY)
engine.release_request("m", endless)
assert read_all(queue) == tokens
assert len(engine.drain_completions()) > 0
"""


def run(checkpoint: Path, child: str) -> None:
    indented = "\n".join("    " + line for line in child.strip().splitlines())
    # Python from 3.12 on warns of forks beside threads, which these tests are about.
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]
    result = subprocess.run(
        [*python, "-c", BEFORE + indented + AFTER, str(checkpoint)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=120,  # of what takes two seconds: the fork does not come back
    )
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")


def test_calls_that_return_a_status_are_refused(checkpoint):
    run(
        checkpoint,
        """
def refused(result):
    status = result[0] if isinstance(result, tuple) else result
    assert status == AsStatus.ALLSPARK_INVALID_CALL_ERROR, result
    assert engine.last_error() == text("engine")

refused(engine.start_request_ids("m", None, [1, 2, 3], GREEDY))
refused(engine.start_request_ids("m", None, [1, 2, 3], {**GREEDY, "do_sample": True, "n": 1}))
# For these a thread of the parent may hold locks.
engine._requests._guided_lock.acquire()
for fields in {"response_format": {"type": "json_object"}}, {"bad_words": ["a"]}:
    refused(engine.start_request_ids("m", loader, [1, 2, 3], {**GREEDY, **fields}))
refused(asyncio.run(engine.start_request_ids_async("m", None, [1, 2, 3], GREEDY)))
refused(engine.sync_request("m"))
refused(engine.sync_request("m", handle))
refused(engine.sync_request("m", [handle], timeout_ms=10**6))
refused(engine.stop_request("m", handle))
refused(engine.release_request("m", handle))
refused(engine.stop_model("m"))
refused(engine.stop_model("m", drain=True))
refused(engine.start_model("m"))
refused(engine.release_model("m"))
refused(engine.unload_device_mem("m"))
refused(engine.unload_lora("m", "a"))
""",
    )


def test_calls_that_return_a_value_raise(checkpoint):
    run(
        checkpoint,
        """
for call in [
    lambda: engine.get_model_state("m"),
    lambda: engine.list_models(),
    lambda: engine.list_loras("m"),
    lambda: engine.get_as_model_info("m"),
    lambda: engine.get_as_engine_stat("m"),
    lambda: engine.metrics_text(),
    lambda: engine.find_prefix("m", [1, 2]),
    lambda: engine.clear_prefix_cache("m"),
    lambda: engine.fileno(),
    lambda: engine.drain_completions(),
]:
    try:
        call()
    except AllSparkError as error:
        assert str(error) == text("engine")
    else:
        assert False, "no exception"
for call in [lambda: engine.score("m", None, [1, 2]), lambda: engine.embed("m", None, [1, 2])]:
    try:
        call()
    except (AllSparkError, ValueError) as error:
        assert text("engine") in str(error)
    else:
        assert False, "no exception"
""",
    )


def test_a_queue_has_ended(checkpoint):
    run(
        checkpoint,
        """
async def collect():
    return [elements async for elements in queue]

assert queue.Get() is None and queue.GetWithTimeout(10**9) is None and queue.GetNoWait() is None
assert list(queue) == [] and asyncio.run(collect()) == []
assert queue.finished and queue.finish_reason == "error"
assert queue.GenerateStatus() == GenerateRequestStatus.InternalError
assert queue.error == text("queue's engine")
""",
    )


def test_everything_can_be_deleted(checkpoint):
    run(
        checkpoint,
        """
guided.close()
del engine, queue, loader, masks, guided, wait
gc.collect()
""",
    )


def test_the_fork_has_an_engine_of_its_own(checkpoint):
    run(
        checkpoint,
        """
engine, _ = start_engine(checkpoint)
assert read_all(engine.start_request_ids("m", None, [1, 2, 3], GREEDY)[2]) == tokens
status, _, queue = asyncio.run(engine.start_request_ids_async("m", None, [1, 2, 3], GREEDY))
assert read_all(queue) == tokens
""",
    )


HELD = """
import os, sys, threading
from allspark import bad_words
from allspark.grammar_compiler import Compiler
from allspark import grammar_compiler
from allspark.model_loader import HuggingFaceModel

tokenizer = HuggingFaceModel(sys.argv[1], "m").get_tokenizer()
words = [f"word {i}" for i in range(300)]
assert len(bad_words.to_token_sequences(tokenizer, words[:2])) > 0
Compiler.of(tokenizer).prepare({"type": "regex", "regex": "a+"})
tokenizer("threads of the tokenizer", truncation=False)
# As other threads hold them while they start requests.
locks = [bad_words._turn, grammar_compiler._stack_size_lock, Compiler._of_tokenizer_lock]
locks.append(Compiler.of(tokenizer)._lock)
while Compiler._compiling.acquire(blocking=False):
    pass
for lock in locks:
    lock.acquire()
child = os.fork()
if child == 0:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in the fork either
    assert len(bad_words.to_token_sequences(tokenizer, words)) > 0
    assert Compiler.of(tokenizer).prepare({"type": "regex", "regex": "b+"}) is not None
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
"""


def test_long_word_lists_and_grammars_wait_for_no_thread_of_the_parent(demo_model):
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]
    result = subprocess.run(
        [*python, "-c", HELD, str(demo_model)], capture_output=True, text=True, timeout=120
    )
    said = result.stderr
    if is_before("tokenizers", 0, 23):  # They advise the child to set what it has set.
        said = re.sub(r"huggingface/tokenizers: .*\nTo disable .*\n(\t- .*\n)+", "", said)
    assert (result.returncode, said) == (0, "")
