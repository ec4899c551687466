"""What is done to a process that serves: requests, limits, signals, fork and exit."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice
from allspark.model_loader import ModelSerializerException
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.vocabularies import tokenizer_directory
from values import expression, hostile

OK = AsStatus.ALLSPARK_SUCCESS
HONEST = {"do_sample": False, "max_new_tokens": 8}
PROMPT = [5, 6, 7]
_place: list[Path] = []
_honest: list[list[int]] = []
_loader: list[Any] = []


def prepare(folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    config = {**CONFIG, "max_position_embeddings": 256, "vocab_size": 512}
    write_checkpoint(checkpoint, llama_tensors(config), config)
    for path in tokenizer_directory("byte_level").glob("tokenizer*"):
        (checkpoint / path.name).write_bytes(path.read_bytes())
    loader = HuggingFaceModel(str(checkpoint), "m", user_set_data_type="float32")
    loader.load_model().read_model_config().serialize_to_path(None, str(folder / "model"))
    loader.get_tokenizer().encode("warm")
    _place[:] = [folder]
    _loader[:] = [loader]
    # What an honest request gives, computed in a process of its own: an engine has threads.
    reader, writer = os.pipe()
    if os.fork() == 0:
        engine = _start()
        ids = _ids(engine.start_request_ids("m", None, PROMPT, HONEST)[2])
        os.write(writer, json.dumps(ids).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        _honest[:] = [json.load(file)]
    assert os.wait()[1] == 0 and len(_honest[0]) == 8


def _ids(queue: Any) -> list[int]:
    return [token for elements in queue for token in elements.ids_from_generate]


def _start(**settings: Any) -> Engine:
    engine = Engine()
    config = _loader[0].create_reference_runtime_config_builder("m", TargetDevice.CPU, max_batch=8)
    config.update_from_dict({"num_threads": 1, **settings})
    fields = config.build()
    fields.model_path = str(_place[0] / "model" / "m.asgraph")
    fields.weights_path = str(_place[0] / "model" / "m.asparam")
    if engine.install_model(fields) != OK or engine.start_model("m") != OK:
        raise MemoryError(engine.last_error())
    return engine


# -- requests ----------------------------------------------------------------------------------

_FIELDS = [
    "do_sample", "temperature", "top_k", "top_p", "min_p", "seed", "max_length", "max_new_tokens",
    "num_generated_in_prompt", "min_length", "min_new_tokens", "early_stopping", "ignore_eos",
    "eos_token_id", "stop_token_ids", "stop_words_ids", "bad_words_ids", "logit_bias",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
    "repetition_ngram_size", "repetition_ngram_threshold", "prompt_lookup_num_tokens", "logprobs",
    "top_logprobs", "logprobs_mode", "prompt_logprobs", "prompt_logprobs_start", "prompt_only",
    "output_logits",
    "output_last_hidden_state", "pooling", "normalize", "num_beams", "best_of", "n",
    "num_return_sequences", "length_penalty", "lora_name", "priority", "timeout_ms", "stop_words",
    "bad_words", "response_format", "skip_special_tokens", "nothing",
]  # fmt: skip


def _request(rng: Random) -> dict[str, Any]:
    config: dict[str, Any] = {"max_new_tokens": 12, "timeout_ms": 3000}
    for name in rng.sample(_FIELDS, rng.choice([1, 2, 3, 6])):
        config[name] = hostile(rng)
    kind = rng.randrange(8)
    if kind == 0:
        config["bad_words"] = [f"w{i}" for i in range(rng.choice([10, 20_000]))]
    elif kind == 1:
        config["stop_words"] = [f"w{i}" for i in range(rng.choice([10, 10_000]))]
    elif kind == 2:
        config["bad_words_ids"] = [[i % 512, i % 77] for i in range(rng.choice([10, 20_000]))]
    elif kind == 3:
        config["response_format"] = {"type": "regex", "regex": expression(rng)}
    elif kind == 4:
        config["logit_bias"] = {i: rng.choice([-100, 1e30, float("nan")]) for i in range(400)}
    return config


def _hostile_ids(rng: Random) -> Any:
    return rng.choice([
        PROMPT, [], [1] * 255, [1] * 300, [1] * 100_000, [-1], [512], [2**31], [2**63], [2**70],
        [[1, 2]], [[1], [2]], [1.5], ["a"], "abc", b"abc", None, {}, object(), hostile(rng),
    ])  # fmt: skip


def requests(rng: Random, _: Path) -> str:
    """Thirty of them beside each other, and beside one that must not notice."""
    engine = _start(max_output_tensor_bytes=1 << 24) if rng.random() < 0.5 else _start()
    outcomes = set()
    handles = []
    for index in range(30):
        if index == 10:
            honest = engine.start_request_ids("m", None, PROMPT, HONEST)
            assert honest[0] == OK, engine.last_error()
        loader = rng.choice([_loader[0], _loader[0], None])
        try:
            ids = PROMPT if rng.random() < 0.8 else _hostile_ids(rng)
            status, handle, queue = engine.start_request_ids("m", loader, ids, _request(rng))
        except (TypeError, ValueError, OverflowError) as error:
            assert str(error)
            outcomes.add("refused")
            continue
        assert status == OK or engine.last_error()
        outcomes.add("taken" if status == OK else "refused")
        if status == OK:
            handles.append(handle)
        kind = rng.randrange(12)
        try:
            if kind == 0:
                engine.stop_request("m", handle)
            elif kind == 1:
                engine.release_request(rng.choice(["m", "x"]), rng.choice([handle, [handle], "a"]))
            elif kind == 2:
                engine.sync_request("m", handle, timeout_ms=1)
        except (TypeError, ValueError):
            outcomes.add("refused")
    assert _ids(honest[2]) == _honest[0]
    engine.stop_model("m")
    return "taken" if "taken" in outcomes else "refused"


# -- limits ------------------------------------------------------------------------------------

def limits(rng: Random, folder: Path) -> str:
    """Converting and serving where the system gives little: done or refused."""
    kind = rng.choice(["AS", "AS", "AS", "FSIZE", "NOFILE", "DATA"])
    if kind in ("AS", "DATA"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        value = used + (rng.choice([1, 8, 30, 100, 400, 600, 1000, 2000]) << 20)
    elif kind == "FSIZE":
        value = rng.choice([0, 1, 1000, 20_000, 100_000, 200_000])
    else:
        value = len(os.listdir("/proc/self/fd")) + rng.randrange(16)
    limit = getattr(resource, f"RLIMIT_{kind}")
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    loader = HuggingFaceModel(str(_place[0] / "checkpoint"), "m", user_set_data_type="float32")
    try:
        loader.load_model().read_model_config().serialize_to_path(None, str(folder / "out"))
        engine = _start()
        status, _, queue = engine.start_request_ids("m", None, PROMPT, HONEST)
        if status != OK:
            assert engine.last_error()
            return "refused"
        ids = _ids(queue)
        assert ids == _honest[0][: len(ids)]
        return "taken" if ids == _honest[0] else "ended"
    except (MemoryError, OSError, ModelSerializerException, RuntimeError) as error:
        assert not isinstance(error, ModelSerializerException) or str(error)
        return "refused"


# -- signals -----------------------------------------------------------------------------------

def signals(rng: Random, folder: Path) -> str:
    """A conversion is killed; the next one makes the same files and leaves nothing else."""
    out = folder / "out"
    loader = HuggingFaceModel(str(_place[0] / "checkpoint"), "m", user_set_data_type="float32")
    loader.load_model().read_model_config()
    for _ in range(rng.choice([1, 1, 3])):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            while True:
                loader.serialize_to_path(None, str(out))
        time.sleep(rng.random() ** 3 * 0.2)
        os.kill(pid, rng.choice([signal.SIGKILL, signal.SIGTERM]))
        os.waitpid(pid, 0)
    loader.serialize_to_path(None, str(out))
    names = {path.name for path in out.iterdir()}
    golden = {path.name: path.read_bytes() for path in (_place[0] / "model").iterdir()}
    assert names == set(golden), names ^ set(golden)
    for name, data in golden.items():
        assert (out / name).read_bytes() == data, name
    return "taken"


# -- fork and exit -----------------------------------------------------------------------------

def _busy(engine: Engine, rng: Random) -> list[Any]:
    config = {"max_new_tokens": 200, "do_sample": False}
    return [engine.start_request_ids("m", None, PROMPT, config) for _ in range(rng.randrange(1, 9))]


def _calls(engine: Engine, started: list[Any], rng: Random) -> list[Any]:
    _, handle, queue = started[0]
    calls = [
        lambda: engine.start_request_ids("m", None, PROMPT, HONEST)[0] != OK or "started",
        lambda: engine.stop_request("m", handle),
        lambda: engine.release_request("m", handle),
        lambda: engine.sync_request("m", handle, timeout_ms=10),
        lambda: engine.sync_request("m"),
        lambda: engine.stop_model("m"),
        lambda: engine.get_as_engine_stat("m"),
        lambda: queue.GetNoWait(),
        lambda: queue.Get(),
        lambda: queue.GetWithTimeout(10),
        lambda: _ids(queue),
        lambda: queue.GenerateStatus(),
    ]
    return rng.sample(calls, rng.randrange(1, len(calls)))


def fork(rng: Random, _: Path) -> str:
    """The child of a process that serves may call everything: nothing is done, nothing hangs."""
    engine = _start()
    started = _busy(engine, rng)
    time.sleep(rng.random() * 0.01)
    pid = os.fork()
    if pid == 0:
        for call in _calls(engine, started, rng):
            try:
                assert call() != "started"
            except (RuntimeError, ValueError) as error:
                assert str(error)
        del engine, started, call
        os._exit(0)
    for _, handle, queue in started:
        assert len(_ids(queue)) == 200
        engine.release_request("m", handle)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"the child ended by {code}"
    assert _ids(engine.start_request_ids("m", None, PROMPT, HONEST)[2]) == _honest[0]
    return "taken"


_left: list[Any] = []  # what is alive when the process ends


def exit(rng: Random, _: Path) -> str:
    """The process ends while threads wait for the engine."""
    engine = _start()
    started = _busy(engine, rng)
    form = {"type": "regex", "regex": "[a-f0-9]{40}"}

    def guided() -> None:
        config = {"response_format": form}
        status, _, queue = engine.start_request_ids("m", _loader[0], PROMPT, config)
        if status == OK:  # There may be no address space left for the compiler's stack.
            _ids(queue)

    async def stream(queue: Any) -> None:
        async for _ in queue:
            pass

    def wait_for(handle: Any, queue: Any) -> None:
        kind = rng.randrange(7)
        if kind == 0:
            queue.Get()
        elif kind == 1:
            queue.GetWithTimeout(10_000)
        elif kind == 2:
            _ids(queue)
        elif kind == 3:
            guided()
        elif kind == 4:
            asyncio.run(stream(queue))
        else:
            engine.sync_request("m", handle if kind == 5 else None)

    def wait() -> None:
        for _, handle, queue in started:
            wait_for(handle, queue)

    for _ in range(rng.randrange(1, 6)):
        threading.Thread(target=wait, daemon=True).start()
    time.sleep(rng.random() * 0.03)
    if rng.random() < 0.7:
        _left.extend([engine, started])
    return "taken"
