"""`allspark batch`: files of lines, answered in order, resumed after any end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

pytest.importorskip("allspark._allspark")

from allspark import AsStatus, Engine, HuggingFaceModel  # noqa: E402
from allspark.batch import digests, lines, output  # noqa: E402
from allspark.batch.answer import Answer  # noqa: E402
from allspark.batch.lines import Line, LineError, LineReader, scan  # noqa: E402
from allspark.batch.off_loop import off_loop  # noqa: E402
from allspark.batch.origin import Origin, line_seed  # noqa: E402
from allspark.batch.window import Window  # noqa: E402
from allspark.cli import main  # noqa: E402
from allspark.pipeline import GenerationConfig, pipeline  # noqa: E402
from allspark.whole_file import write_whole  # noqa: E402
from support.checkpoints import CONFIG, llama_tensors  # noqa: E402
from support.gguf_files import metadata, renamed, write_gguf  # noqa: E402

CHAT = "/v1/chat/completions"


def write_lines(path, values):
    """A file of JSON values; bytes are written as they are."""
    data = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in values]
    path.write_bytes(b"".join(each + b"\n" for each in data))
    return path


def read_lines(path):
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def request(custom_id, text="What is 12+35?", url=CHAT, **body):
    content = {"messages": [{"role": "user", "content": text}]} if url == CHAT else {}
    body = {"model": "demo_model", **content, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def batch(demo_model, tmp_path):
    """Runs the command on values; returns its exit status and the output's lines."""

    def run(values, *flags):
        source = write_lines(tmp_path / "in.jsonl", values)
        target = tmp_path / "out.jsonl"
        status = main(["batch", str(demo_model), str(source), str(target), *flags])
        return status, read_lines(target)

    return run


# What lines give.


def test_own_lines_are_answered_by_the_pipeline(batch, demo_model, capsys):
    question = [{"role": "user", "content": "What is 3+4?"}]
    sampled = {"do_sample": True, "temperature": 1.5, "random_seed": 5}
    values = [
        {"prompt": "What is 12+35?"},
        "What is 12+35?",
        {"messages": question, "custom_id": "x"},
        {"prompt": "What is a ResultQueue?", "max_new_tokens": 7},
        {"prompt": [1, 2, 3], "max_new_tokens": 2},
        {"prompt": "3+4", "do_preprocess": False, "max_new_tokens": 5},
        {"prompt": "What is 5+5?", "logprobs": 2, **sampled},
    ]
    status, found = batch(values)
    assert status == 0 and [line["line"] for line in found] == [1, 2, 3, 4, 5, 6, 7]
    with pipeline(str(demo_model)) as pipe:
        expected = [
            pipe("What is 12+35?"),
            pipe("What is 12+35?"),
            pipe([question])[0],
            pipe("What is a ResultQueue?", GenerationConfig(max_new_tokens=7)),
            pipe([[1, 2, 3]], GenerationConfig(max_new_tokens=2))[0],
            pipe("3+4", GenerationConfig(max_new_tokens=5), do_preprocess=False),
            pipe("What is 5+5?", GenerationConfig(logprobs=2, **sampled)),
        ]
    for line, response in zip(found, expected, strict=True):
        assert line["text"] == response.text and line["finish_reason"] == response.finish_reason
        assert line["input_token_len"] == response.input_token_len
        assert line["generate_token_len"] == response.generate_token_len
    assert found[2]["custom_id"] == "x" and "custom_id" not in found[0]
    last = expected[-1]
    assert found[-1]["token_ids"] == last.token_ids
    rows = [{int(key): value for key, value in row.items()} for row in found[-1]["logprobs"]]
    assert rows == last.logprobs
    tokens = sum(response.generate_token_len for response in expected)
    err = capsys.readouterr().err
    assert f"7 lines, 0 errors, {sum(r.input_token_len for r in expected)} prompt tokens" in err
    assert f" {tokens} output tokens, " in err


def test_requests_are_answered_by_the_server(batch, repo_root):
    values = [
        request("a", temperature=0),
        request("b", "What is 2+2?", temperature=0, model="threes"),
        request("c", url="/v1/completions", prompt="1+1", temperature=0, echo=True),
        request("d", url="/v1/embeddings", input=["one", "two"]),
        request("e", model="nothing"),
        request("f", temperature=9),
        request("g", stream=True),
        request("h", url="/v1/files"),
        request(7),
        {"custom_id": "i", "body": {}},
        request("j", text="word " * 3000),
    ]
    status, found = batch(values, "--adapters", f"threes={repo_root}/examples/demo_adapter")
    assert status == 0 and [line["custom_id"] for line in found] == [*"abcdefgh", None, *"ij"]
    first = found[0]["response"]
    assert first["status_code"] == 200 and first["request_id"].startswith("req_")
    assert first["body"]["choices"][0]["message"]["content"] == "12 + 35 = 47"
    assert found[1]["response"]["body"]["model"] == "threes"
    assert found[1]["response"]["body"]["choices"][0]["message"]["content"].endswith("6")
    assert found[2]["response"]["body"]["choices"][0]["text"].startswith("1+1")
    assert len(found[3]["response"]["body"]["data"]) == 2
    statuses = [line["response"]["status_code"] for line in found[4:7]]
    assert statuses == [404, 400, 400] and found[10]["response"]["status_code"] == 400
    codes = [line["error"]["code"] for line in found[7:10]]
    assert codes == ["invalid_url", "invalid_request", "missing_required_parameter"]
    assert len({line["id"] for line in found}) == len(found)


def test_an_adapter_that_is_not_there_is_refused_at_once(demo_model, tmp_path, capsys):
    source, target = write_lines(tmp_path / "in.jsonl", ["x"]), tmp_path / "out.jsonl"
    command = ["batch", str(demo_model), str(source), str(target), "--adapter-name", "nothing"]
    for flags, names in (([], "of which there are none"), (["--adapters", "a=x", "b=y"], "a, b")):
        assert main([*command, *flags]) == 1
        message = f"--adapter-name is 'nothing'; it must be one of --adapters, {names}"
        assert message in capsys.readouterr().err
    assert not target.exists()


def test_errors_are_lines(batch, capsys):
    values = [
        b"{",
        b"\xff",
        b"",
        b"[" * 100_000,
        b'{"prompt": NaN}',
        b"7",
        b"null",
        {"prompt": "x", "messages": []},
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": 7},
        {"messages": "x"},
        {"messages": []},
        {"prompt": "x", "temperature": 9},
        {"prompt": "x", "max_new_tokens": "7"},
        {"prompt": "x", "max_tokens": 7},
        {"prompt": "x", "output_logits": "all"},
        {"prompt": "x", "custom_id": 7},
        {"prompt": "x", "adapter_name": "nothing"},
        {"prompt": "x", "do_preprocess": "yes"},
        {"prompt": "x", "response_format": {"type": "nothing"}},
        {"prompt": "word " * 3000},
        b'"\\ud800"',
        "What is 3+4?",
        {"messages": ""},
        {"messages": [1, 2]},
    ]
    status, found = batch(values)
    assert status == 0
    numbers = [line["line"] for line in found]
    assert numbers == [number for number in range(1, len(values) + 1) if number != 3]
    by_number = {line["line"]: line for line in found}
    assert by_number.pop(25)["text"] == "3 + 4 = 7"
    by_number.pop(10)  # an empty text is a question as any other
    codes = {number: line["error"]["code"] for number, line in by_number.items()}
    assert {codes[number] for number in (1, 2, 4, 5, 24)} == {"invalid_json"}
    assert codes[17] == "unknown_field" and "'max_tokens'" in by_number[17]["error"]["message"]
    assert "prompt is a int" in by_number[12]["error"]["message"]
    assert "messages is empty" in by_number[14]["error"]["message"]
    assert "must be a list of objects" in by_number[27]["error"]["message"]
    assert codes[20] == "model_not_found" and codes[23] == "context_length_exceeded"
    others = set(codes) - {1, 2, 4, 5, 17, 18, 20, 23, 24}
    assert {codes[number] for number in others} == {"invalid_request"}
    assert f"26 lines, {len(codes)} errors" in capsys.readouterr().err


def test_flags_are_defaults_of_lines(batch, demo_model):
    flags = ("--max-new-tokens", "3", "--no-preprocess", "--no-skip-special-tokens",
             "--stop-words", "a", "b", "--do-sample", "--temperature", "0.5")  # fmt: skip
    _, found = batch(["1+1", {"prompt": "1+1", "max_new_tokens": 5}], *flags)
    config = {"skip_special_tokens": False, "stop_words": ["a", "b"], "do_sample": True,
              "temperature": 0.5}  # fmt: skip
    with pipeline(str(demo_model)) as pipe:
        for line, count in zip(found, (3, 5), strict=True):
            seed = line_seed(0, line["line"])
            own = GenerationConfig(max_new_tokens=count, random_seed=seed, **config)
            assert line["text"] == pipe("1+1", own, do_preprocess=False).text


def test_lines_have_seeds_of_their_own(batch):
    values = [{"prompt": "x", "do_sample": True, "temperature": 2, "top_k": 0}] * 4
    values.append(request("a", "x", temperature=2, n=2))
    texts = {}
    for seed in ("0", "1"):
        _, found = batch(values, "--seed", seed, "--max-new-tokens", "20", "--overwrite")
        *own, last = found
        choices = last["response"]["body"]["choices"]
        texts[seed] = [line["text"] for line in own] + [c["message"]["content"] for c in choices]
        assert len(set(texts[seed])) == 6
    assert not set(texts["0"]) & set(texts["1"])
    seeds = {line_seed(seed, number) for seed in range(100) for number in range(100)}
    assert len(seeds) == 10_000 and max(seeds) < 1 << 62


def test_ids_follow_from_the_run_and_the_line():
    ids = [[Origin("r", number, 0).random_bytes(16) for number in range(50)] for _ in range(2)]
    assert ids[0] == ids[1] and len(set(ids[0])) == 50
    origin = Origin("r", 1, 0)
    assert origin.random_bytes(16) != origin.random_bytes(16)
    assert Origin("s", 1, 0).random_bytes(16) != Origin("r", 1, 0).random_bytes(16)


# Lines of a file.


def test_lines_are_read_lazily_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in"
    path.write_bytes(
        b"\xef\xbb\xbf1\r\n\n \t\n" + b"x" * 10 + b"\n" + b"x" * 11 + b"\n" + b"y" * 40 + b"\n2"
    )
    reader = LineReader(path)
    found = reader.take(100)
    assert [(line.number, line.data) for line in found] == [
        (1, b"1"), (4, b"x" * 10), (5, None), (6, None), (7, b"2")
    ]  # fmt: skip
    assert found[0].parse() == 1
    with pytest.raises(LineError, match="more than 10 bytes"):
        found[2].parse()
    facts = scan(path)
    assert (facts.num_lines, facts.num_bytes) == (5, path.stat().st_size)
    assert facts.sha256 == reader.digest
    again = LineReader(path)
    again.skip(3)
    assert [line.number for line in again.take(1)] == [6]
    assert len(LineReader(path).take(100, max_bytes=2)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "-0", "-0.0", "1e2", "1e-999", "1e308", "1e309", "-1e999", "18446744073709551615",
        "18446744073709551616", "-9223372036854775808", "-9223372036854775809", "1" + "0" * 308,
        "1" + "0" * 309, "9" * 5000, "01", "NaN", "Infinity",
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_server(text):
    orjson = pytest.importorskip("orjson")
    line = Line(1, b"[%s]" % text.encode())
    try:
        (expected,) = orjson.loads(line.data)
    except ValueError:
        with pytest.raises(LineError, match="the line is no JSON"):
            line.parse()
        return
    (found,) = line.parse()
    assert repr(found) == repr(expected)


# The window.


class Numbers:
    """Lines without end, or so many."""

    def __init__(self, count=1 << 60):
        self.left = count
        self.taken = 0

    def take(self, max_lines):
        count = min(self.left, max_lines)
        self.left -= count
        self.taken += count
        return [Line(self.taken - count + i + 1, b"x") for i in range(count)]


def run_window(answer, count, room, written, **bounds):
    asyncio.run(Window(answer, written.extend, room, **bounds).run(Numbers(count)))


def test_answers_are_written_in_order_and_as_they_come():
    running = most = 0

    async def answer(line):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(random.Random(line.number).randrange(20)):
            await asyncio.sleep(0)
        running -= 1
        return Answer(b"%d\n" % line.number)

    written = []
    run_window(answer, 500, 16, written)
    assert [int(each.data) for each in written] == list(range(1, 501)) and most == 16


def test_a_long_line_holds_up_no_other_until_too_much_waits():
    # An answer counts with some bytes of its own; lines that run may exceed the bound by theirs.
    least, most = 90, 110

    async def answer(line):
        if line.number == 1:
            end = time.monotonic() + 60
            while len(started) < least and time.monotonic() < end:
                await asyncio.sleep(0.001)
            for _ in range(50):  # without a bound all others would begin meanwhile
                await asyncio.sleep(0.001)
            held.append(len(started))
        started.append(line.number)
        return Answer(b"x" * 1000)

    held, started, written = [], [], []
    run_window(answer, 1000, 8, written, max_held_bytes=150_000)
    assert least <= held[0] <= most and len(written) == 1000


def test_a_call_off_the_loop_ends_before_its_caller():
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def call():
        begun.set()
        may_end.wait(30)
        ended.append(True)

    async def run():
        task = asyncio.ensure_future(off_loop(call))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        assert await off_loop(lambda: 7) == 7

    asyncio.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_no_number_of_cancels_leaves_a_call_off_the_loop_running(fails, caplog):
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def call():
        begun.set()
        may_end.wait(30)
        ended.append(True)
        if fails:
            raise OSError("nobody asks for it")

    async def run():
        task = asyncio.ensure_future(off_loop(call))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        for other in asyncio.all_tasks() - {task, asyncio.current_task()}:
            other.cancel()  # as a loop that ends does
        await asyncio.sleep(0.01)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    gc.collect()  # what other tests left may be logged when it goes
    caplog.clear()
    asyncio.run(run())
    gc.collect()
    assert not caplog.records, "asyncio logs exceptions that nobody has seen"


@pytest.mark.parametrize("fails", ["answer", "write"])
def test_a_failure_ends_the_run_and_all_lines(fails):
    ended = []

    async def answer(line):
        try:
            if line.number == 5 and fails == "answer":
                raise OSError("broken")
            if line.number > 5:
                await asyncio.sleep(3600)
            return Answer(b"x")
        finally:
            ended.append(line.number)

    def write(answers):
        if fails == "write":
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        asyncio.run(Window(answer, write, 8).run(Numbers()))
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= set(ended)


def test_memory_does_not_grow_with_the_lines(tmp_path):
    """25 MB in, 25 MB out, and the first line is answered late."""
    source = tmp_path / "in"
    with source.open("wb") as file:
        for _ in range(6250):
            file.write(b'"' + b"x" * 4000 + b'"\n')
    first = asyncio.Event()
    count = 0

    async def answer(line):
        nonlocal count
        count += 1
        if line.number == 1:
            await first.wait()
        if count == 375:
            first.set()
        return Answer(line.data + b"\n")

    target = output.OutputFile(tmp_path / "out")
    reader = LineReader(source)
    tracemalloc.start()
    try:
        window = Window(
            answer, lambda done: target.write(b"".join(each.data for each in done)), 64, 2 << 20
        )
        asyncio.run(window.run(reader))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        target.finish()
    assert (tmp_path / "out").read_bytes() == source.read_bytes()
    assert peak < 10 << 20


# Resuming.

# Kills itself once so many bytes of output are written, in the middle of a line, too.
KILLED = """
import os, signal, sys
from allspark.batch import output
from allspark.cli import main
left = int(sys.argv.pop(1))
write = output.OutputFile.write
def write_some(self, data):
    global left
    write(self, data[:left])
    left -= len(data)
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
output.OutputFile.write = write_some
sys.exit(main(sys.argv[1:]))
"""


def mixed(count):
    """Lines of all forms, most of them sampled."""
    rng = random.Random(3)
    values = []
    for i in range(count):
        # Some begin alike, so that the prefix cache has a part of them, or has not.
        begin = rng.choice(("", "", "The same beginning. " * 10))
        text = f"{begin}What is {rng.randrange(50)}+{rng.randrange(50)}?"
        length = rng.choice((2, 10, 60))
        values.append(
            rng.choice([
                text,
                {"prompt": text, "do_sample": True, "temperature": 1.2, "max_new_tokens": length},
                request(f"r{i}", text, temperature=1.5, max_tokens=length, n=rng.choice((1, 2))),
                request(f"c{i}", url="/v1/completions", prompt=text, max_tokens=length, logprobs=1),
                request(f"e{i}", url="/v1/embeddings", input=text, pooling=rng.choice("ml")),
                request(f"e{i}", url="/v1/embeddings", input=text),
                {"prompt": text, "temperature": 9},
                b"{bad",
                b"",
            ])
        )  # fmt: skip
    return values


@pytest.fixture(scope="module")
def undisturbed(demo_model, tmp_path_factory):
    """An input, and what the command makes of it when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = write_lines(folder / "in.jsonl", mixed(300))
    target = folder / "out.jsonl"
    assert main(["batch", str(demo_model), str(source), str(target)]) == 0
    return source, target.read_bytes()


def test_a_run_that_is_killed_again_and_again_writes_the_same_bytes(
    undisturbed, demo_model, tmp_path
):
    source, expected = undisturbed
    target = tmp_path / "out.jsonl"
    arguments = ["batch", str(demo_model), str(source), str(target)]
    rng = random.Random(11)
    moments = sorted(rng.randrange(1, len(expected)) for _ in range(5))
    for index, moment in enumerate([1, *moments]):
        size = target.stat().st_size if target.exists() else 0
        whole = target.read_bytes()[:size].rfind(b"\n") + 1 if size else 0
        # Threads and batches differ as well: no byte depends on them.
        flags = ["--max-batch-size", str(1 + 5 * index), "--threads", str(1 + index % 2)]
        command = [sys.executable, "-c", KILLED, str(moment - whole), *arguments, *flags]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == -signal.SIGKILL, result.stderr
        assert target.read_bytes() == expected[:moment]
    assert main(arguments) == 0
    assert target.read_bytes() == expected


def test_a_run_that_is_killed_at_any_time_goes_on(undisturbed, demo_model, tmp_path, capsys):
    """From outside, and at moments that nothing in the command knows of."""
    source, expected = undisturbed
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "allspark.cli", "batch", str(demo_model), str(source)]
    for share in (0, 0.3, 0.6):
        process = subprocess.Popen([*command, str(target)], stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if target.exists() and target.stat().st_size >= share * len(expected):
                process.kill()
                break
            time.sleep(0.0005)
        process.wait(60)
        assert expected.startswith(target.read_bytes())
    assert main(["batch", str(demo_model), str(source), str(target)]) == 0
    assert target.read_bytes() == expected
    assert main(["batch", str(demo_model), str(source), str(target)]) == 0
    assert "out.jsonl is complete: " in capsys.readouterr().err


# The lines after the 20th do not end, so that the run goes on until it is told to end.
ENDLESS = """
import asyncio, sys
from allspark.batch.window import Window
from allspark.cli import main
make = Window.__init__
def make_endless(self, answer, *arguments):
    async def answer_some(line):
        if line.number > 20:
            await asyncio.Event().wait()
        return await answer(line)
    make(self, answer_some, *arguments)
Window.__init__ = make_endless
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_cleanly(number, demo_model, tmp_path, capsys):
    values = [{"prompt": "x", "ignore_eos": True, "max_new_tokens": 10 * i} for i in range(1, 40)]
    source = write_lines(tmp_path / "in.jsonl", values)
    target = tmp_path / "out.jsonl"
    command = ["batch", str(demo_model), str(source), str(target)]
    flags = ["--max-batch-size", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *command, *flags], stderr=subprocess.PIPE, text=True
    )
    while not (target.exists() and target.stat().st_size):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)
    process.send_signal(number)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert "stopped; the same command goes on from here" in err and "Traceback" not in err
    count = len(read_lines(target))
    assert 0 < count <= 20
    assert main(command) == 0
    assert f"{39 - count} lines and {count} from before" in capsys.readouterr().err
    assert [line["line"] for line in read_lines(target)] == list(range(1, 40))


def test_a_run_goes_on_with_its_length_whatever_memory_there_is(
    demo_model, tmp_path, monkeypatch, capsys
):
    install, free = Engine.install_model, [3 << 20]

    def refuses_long_ones(self, config):
        if config.engine_max_length > 1024:
            return self._statuses.fail(AsStatus.ALLSPARK_MEMORY_ERROR, "too long")
        return install(self, config)

    monkeypatch.setattr(Engine, "install_model", refuses_long_ones)
    monkeypatch.setattr("allspark.pipeline.served_model.free_memory", lambda: free[0])
    values = [{"prompt": f"What is {i}+{i}?", "max_new_tokens": None} for i in range(3)]
    source = write_lines(tmp_path / "in.jsonl", values)
    target = tmp_path / "out.jsonl"
    command = ["batch", str(demo_model), str(source), str(target)]
    assert main(command) == 0
    expected = target.read_bytes()
    begun = json.loads((tmp_path / "out.jsonl.run").read_text())
    assert begun["settings"]["session_len"] == 1024
    free[0] = 2  # room for no length
    for content in (expected[: expected.index(b"\n") + 1], expected[:5], expected):
        target.write_bytes(content)
        assert main(command) == 0, capsys.readouterr().err
        assert target.read_bytes() == expected
    assert main([*command, "--session-len", "512"]) == 1
    assert "session_len was 1024, is 512" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0  # another run, of the memory that there is
    begun = json.loads((tmp_path / "out.jsonl.run").read_text())
    assert begun["settings"]["session_len"] == 2


def test_other_settings_are_refused_by_name(batch, demo_model, repo_root, tmp_path, capsys):
    values = ["What is 3+4?", "What is 5+5?"]
    _, whole = batch(values)
    target = tmp_path / "out.jsonl"
    expected = target.read_bytes()
    partial = expected[: expected.index(b"\n") + 5]
    source = tmp_path / "in.jsonl"
    adapter = f"threes={repo_root}/examples/demo_adapter"
    for flags, name in (
        (("--temperature", "0.1"), "temperature was 0.8, is 0.1"),
        (("--seed", "1"), "seed was 0, is 1"),
        (("--session-len", "512"), "session_len was 2048, is 512"),
        (("--precision", "A8W8"), "precision was None, is 'A8W8'"),
        (("--adapters", adapter), "adapters was {}, is {'threes'"),
        (("--chat-template", "llama2"), "chat_template was None, is 'llama2'"),
        (("--model-name", "other"), "model_name was 'demo_model', is 'other'"),
    ):
        for content in (partial, expected):
            target.write_bytes(content)
            capsys.readouterr()
            status = main(["batch", str(demo_model), str(source), str(target), *flags])
            assert status == 1 and name in (err := capsys.readouterr().err), err
            assert target.read_bytes() == content
    write_lines(tmp_path / "in.jsonl", [*values, "another"])
    assert main(["batch", str(demo_model), str(tmp_path / "in.jsonl"), str(target)]) == 1
    assert "input was " in capsys.readouterr().err
    status, found = batch(values, "--overwrite", "--max-new-tokens", "3")
    assert status == 0 and [line["finish_reason"] for line in found] == ["length"] * 2
    assert whole != found


def test_the_time_of_answers_is_that_of_the_input(demo_model, tmp_path):
    values = [request(str(i), temperature=0) for i in range(2)]
    source = write_lines(tmp_path / "in.jsonl", values)
    os.utime(source, (1_700_000_000, 1_700_000_000.5))
    target = tmp_path / "out.jsonl"
    arguments = ["batch", str(demo_model), str(source), str(target)]
    assert main(arguments) == 0
    expected = target.read_bytes()
    assert read_lines(target)[1]["response"]["body"]["created"] == 1_700_000_000
    os.utime(source)  # the same input; the run keeps its time
    target.write_bytes(expected[: expected.index(b"\n") + 1])
    assert main(arguments) == 0
    assert target.read_bytes() == expected


def test_the_end_of_a_line_that_is_torn_is_cut_off(tmp_path):
    path = tmp_path / "out"
    for content, count in ((b"", 0), (b"ab", 0), (b"a\nb", 1), (b"a\nb\n", 2), (b"\n" * 3, 3)):
        path.write_bytes(content)
        file = output.OutputFile(path)
        assert file.cut() == count
        assert path.read_bytes() == content[: content.rfind(b"\n") + 1]
        file.write(b"x\n")
        file.finish()
        assert path.read_bytes().endswith(b"x\n")
    block = output._BLOCK
    path.write_bytes(b"x" * (block - 1) + b"\n" + b"y" * (2 * block))
    file = output.OutputFile(path)
    assert file.cut() == 1 and file.num_bytes() == block
    with pytest.raises(OSError, match="another process writes it"):
        output.OutputFile(path)
    file.close()


def test_links_and_pipes_stay_what_they_are(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    reader, writer = os.pipe()
    write_whole(tmp_path / f"/dev/fd/{writer}", b"all of it")
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"all of it"


def test_a_system_that_takes_a_few_bytes_at_a_time(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    file = output.OutputFile(tmp_path / "out")
    file.write(b"a line that is longer\n" * 3)
    file.finish()
    assert (tmp_path / "out").read_bytes() == b"a line that is longer\n" * 3


def test_files_that_make_no_sense(demo_model, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", ["x"])
    other = tmp_path / "other"
    other.write_text("not ours\n")
    damaged = tmp_path / "damaged"
    damaged.write_text("x\n")
    (tmp_path / "damaged.run").write_text("{")

    def error_of(*arguments):
        assert main(["batch", str(demo_model), *map(str, arguments)]) == 1
        return capsys.readouterr().err

    assert "input is '-'" in error_of("-", "out")
    assert "output is '-'" in error_of(source, "-")
    assert "no such file" in error_of(tmp_path / "nothing", other)
    assert "is no file" in error_of(source, tmp_path)
    assert "is the input, too" in error_of(source, source)
    assert "--seed is -1" in error_of(source, tmp_path / "out", "--seed", "-1")
    assert main(["batch", "/no/model", str(source), str(tmp_path / "new")]) == 1
    assert "/no/model" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert "other is there, but not other.run" in error_of(source, other)
    assert "damaged.run cannot be read" in error_of(source, damaged)
    assert other.read_text() == "not ours\n"
    assert main(["batch", str(demo_model), str(source), str(other), "--overwrite"]) == 0
    assert len(read_lines(other)) == 1


def test_an_input_without_lines(batch, capsys):
    assert batch([b"", b"  "]) == (0, [])
    assert "is complete: 0 lines" in capsys.readouterr().err


def test_models_are_known_by_their_files(demo_model, tmp_path):
    digest = digests.folder_digest(demo_model)
    copy = tmp_path / "model"
    copy.mkdir()
    for path in demo_model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "notes.md").write_text("no part of the model")
    assert digests.folder_digest(copy) == digest
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert digests.folder_digest(copy) != digest
    shutil.rmtree(copy / "additional_chat_templates")
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert digests.folder_digest(copy) != digest


def test_all_files_of_a_gguf_model_count(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    tensors = renamed("llama", llama_tensors(), CONFIG, pairs=True)
    write_gguf(path, "llama", tensors, metadata(CONFIG), shard_tensors=8)
    first, *others = sorted(tmp_path.glob("model-*.gguf"))
    assert others and not path.exists()
    loader = HuggingFaceModel(str(first), "m")
    assert digests.model_files(loader) == [first, *others]
    digest = digests.model_digest(loader)
    data = bytearray(others[-1].read_bytes())
    data[-1] ^= 1
    others[-1].write_bytes(data)
    assert digests.model_digest(loader) != digest


# Without the extra `serve`.

BLOCKED = """
import sys
for name in ("fastapi", "orjson", "pydantic", "uvicorn", "starlette", "uvloop"):
    sys.modules[name] = None
from allspark.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_own_lines_need_no_server(demo_model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ["What is 3+4?", request("a")])
    target = tmp_path / "out.jsonl"
    arguments = ["batch", str(demo_model), str(source), str(target), "--max-batch-size", "1"]
    command = [sys.executable, "-c", BLOCKED, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "a line in OpenAI's form needs the extra 'serve' (docs/" in result.stderr
    assert main(arguments) == 0  # with the extra it goes on
    assert read_lines(target)[0]["text"] == "3 + 4 = 7" and len(read_lines(target)) == 2
