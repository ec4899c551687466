"""Other engines beside ours in a benchmark: what they are, how they end, and what they leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import benchmarks
from support.benchmarks import BENCHMARKS, failures_of, report_of, small_run

# A peer that needs no installation and answers every token at once, or says why it cannot.
STUB = """
import os
import signal
import sys
from pathlib import Path

from peers.base import BF16, Engine, EngineError
from peers.worker import InProcess, Timeline, main


class Stub(Engine):
    name = "stub"
    precisions = {"good": BF16, "unprepared": BF16, "broken": BF16, "dying": BF16}
    packages = ()

    @property
    def python(self):
        return Path(sys.executable)

    def install(self):
        if os.environ.get("STUB_INSTALL"):
            raise EngineError(os.environ["STUB_INSTALL"])

    def prepare(self, checkpoint, precision, model):
        if precision == "unprepared":
            raise EngineError("this format is not for it")
        model.mkdir(parents=True, exist_ok=True)
        (model / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())


class Server(InProcess):
    def __init__(self, job):
        self.is_broken = job["model"].endswith("broken")
        self.remarks = ["served upside down"]
        if job["model"].endswith("dying"):
            print("about to fail", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGILL)

    def serve(self, requests):
        timelines = [Timeline() for _ in requests]
        for timeline, request in zip(timelines, requests):
            timeline.add(request["num_output"] - self.is_broken)
        return timelines


if __name__ == "__main__":
    main(Server)
"""
REGISTRY = "from peers.stub import Stub\nPEERS = (Stub,)\n"


@pytest.fixture
def with_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the scripts whose registry has one peer, the stub."""
    copy = shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    (copy / "peers" / "stub.py").write_text(STUB)
    (copy / "peers" / "registry.py").write_text(REGISTRY)
    monkeypatch.setattr(benchmarks, "BENCHMARKS", copy)


def test_peers_stand_beside_ours_and_failing_ones_are_named(tmp_path: Path, with_stub) -> None:
    result = small_run(tmp_path, "--workloads", "single,b8", "--engines", "allspark/bf16,stub")
    assert result.returncode == 1
    record = report_of(tmp_path)
    engines = ["allspark bf16", "stub good", "stub broken", "stub dying"]
    assert record["contestants"]["tiny"] == engines
    assert record["skipped"] == ["tiny, stub unprepared: this format is not for it"]
    failures = failures_of(record)
    assert len(failures) == 4
    assert failures[0].startswith("single, stub broken: python ended with 1: ")
    assert failures[0].endswith("a request gave 7 of 8 tokens")
    assert re.search(r"single, stub dying: .* was ended by SIGILL .*: about to fail$", failures[1])
    table = (tmp_path / "results" / "t.md").read_text()
    assert "(stub good) |" in table and "Left out:" in table
    # Who ran what, and why others did not.
    assert "| rounds with a value | single | b8 |" in table
    assert "| stub good | 1 | 1 |" in table and "| stub broken | failed | failed |" in table
    reasons = [line for line in table.splitlines() if line.startswith("- stub")]
    assert "- stub good, single, b8: served upside down" in reasons
    assert any(
        line.startswith("- stub dying, single (round 1), b8 (round 1):")
        and line.endswith("about to fail")
        for line in reasons
    )


def test_a_peer_that_cannot_be_installed_is_left_out(
    tmp_path: Path, with_stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_INSTALL", "no package for this Python")
    result = small_run(tmp_path, "--workloads", "single", "--engines", "stub,allspark/bf16")
    assert result.returncode == 0, result.stderr
    assert "LEFT OUT: stub: no package for this Python" in result.stderr
    record = report_of(tmp_path)
    assert record["skipped"] == ["stub: no package for this Python"]
    assert record["contestants"] == {"tiny": ["allspark bf16"]}


def test_a_machine_that_others_use_is_noticed(load) -> None:
    machine = load("machine")
    others = machine.Others()
    burn = "import time; end = time.time() + 0.5\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    end = time.monotonic() + 60
    # This process counts as one of the others; its child does not.
    while others.share() <= 0.5 / (os.cpu_count() or 1):
        assert time.monotonic() < end


SERVER_WITH_A_CHILD = """
import subprocess, sys, time
burn = "import time\\nwhile time.process_time() < 0.4: pass\\ntime.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", burn])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_what_a_server_starts_counts_and_ends_with_it() -> None:
    worker = """
import os, resource, subprocess, sys, time
from peers import process_tree
process_tree.adopt_orphans()
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child = int(server.stdout.readline())
end = time.monotonic() + 60
while process_tree.cpu_seconds(server.pid) < 0.3:
    assert time.monotonic() < end
    time.sleep(0.05)
server.kill()
server.wait()
process_tree.kill_children()
try:
    os.kill(child, 0)
except ProcessLookupError:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime > 0.25)
"""
    command = [sys.executable, "-c", worker, SERVER_WITH_A_CHILD]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_what_a_late_worker_started_is_not_of_others() -> None:
    program = """
import resource, sys
from peers import base, process_tree
process_tree.adopt_orphans()
def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
for seconds in (4, 16, 60):  # on a busy machine it takes long to use that much
    before = used()
    try:
        base.run_command([sys.executable, "-c", sys.argv[1]], seconds)
    except base.TookTooLong:
        if used() - before > 0.35:
            print(True)
            break
"""
    command = [sys.executable, "-c", program, SERVER_WITH_A_CHILD]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


TALKATIVE_SERVER = """
import sys, time
print("listens on http://127.0.0.1:123", file=sys.stderr, flush=True)
print("x" * (1 << 20), file=sys.stderr, flush=True)  # more than a pipe holds
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_server_may_say_much_and_ends_with_a_killed_benchmark(tmp_path: Path) -> None:
    benchmark = """
import sys
from servers import process
with process([sys.executable, "-c", *sys.argv[1:]]) as (pid, port):
    print(pid, port, flush=True)
    sys.stdin.read()
"""
    said = tmp_path / "said"
    command = [sys.executable, "-c", benchmark, TALKATIVE_SERVER, str(said)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=BENCHMARKS, **pipes) as running:
        pid, port = map(int, running.stdout.readline().split())
        assert port == 123
        end = time.monotonic() + 60
        while not said.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        running.kill()
    while not has_ended(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_server_that_ends_at_its_start_says_its_last_words(load) -> None:
    server = "import sys; print('no room', file=sys.stderr); sys.exit(3)"
    process = load("servers").process([sys.executable, "-c", server])
    with pytest.raises(RuntimeError, match="status 3:\\nno room"), process:
        pass


def test_every_peer_is_registered_and_complete(load) -> None:
    registry, base = load("peers.registry"), load("peers.base")
    files = {path.stem for path in (BENCHMARKS / "peers").glob("*.py")}
    helpers = {"__init__", "base", "registry", "gguf_writer"}
    helpers |= {"worker", "http_worker", "process_tree"}
    assert {peer.__module__.rpartition(".")[2] for peer in registry.PEERS} == files - helpers
    assert len({peer.name for peer in registry.PEERS}) == len(registry.PEERS)
    for peer in registry.PEERS:
        assert peer.packages and peer.precisions and not peer.is_ours
        assert peer.prepare is not base.Engine.prepare
        for precision in peer.precisions.values():
            assert 0 < precision.body_bits <= 16 and 0 < precision.head_bits <= 16
            assert precision.rate in load("machine").LIMITS


@pytest.mark.parametrize("name", ["vllm", "vllm-serve"])
def test_vllm_has_the_threads_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, name: str
) -> None:
    """It binds one to each of the cores that it is given."""
    bound: list[str] = []

    def run_command(*_: object, env: dict[str, str], cwd: Path) -> str:
        bound.append(env["VLLM_CPU_OMP_THREADS_BIND"])
        return ""

    monkeypatch.setattr(load("peers.base"), "run_command", run_command)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3, 7})
    engine = load("bench").ENGINES[name](tmp_path)
    for threads in (1, 2, 3):
        engine.run_worker(json.dumps({"threads": threads}), 1)
    assert bound == ["3", "3,5", "3,5,7"]


def test_a_command_that_fails_says_why(load) -> None:
    base = load("peers.base")
    with pytest.raises(base.EngineError, match="ended with 3: the reason"):
        base.run_command([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"])
    with pytest.raises(base.EngineError, match="took more than 0.1 s"):
        base.run_command([sys.executable, "-c", "import time; time.sleep(9)"], timeout_s=0.1)
    # Children of the process are ended too: the sleeper would hold the pipe.
    with pytest.raises(base.EngineError, match="took more than 0.1 s"):
        base.run_command(["sh", "-c", "sleep 9 & wait"], timeout_s=0.1)
    assert base.run_command(["cat"], text="a job") == "a job"
    with pytest.raises(base.EngineError, match="No such file"):
        base.run_command(["/nonexistent/program"])


def test_a_command_that_is_killed_names_the_signal_and_its_last_words(load) -> None:
    base = load("peers.base")
    with pytest.raises(base.ProgramEnded, match=r"SIGILL \(.*\): b \| c \| d$") as caught:
        base.run_command(["sh", "-c", "printf 'a\nb\nc\nd\n' >&2; kill -ILL $$"])
    assert caught.value.signal == 4


# Answers like llama-server, or ends in ways that were seen with it: FAKE says when and how.
FAKE_SERVER = """#!{python}
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

when, _, how = os.environ["FAKE"].partition(":")
if how.startswith("repack-") and "--no-repack" in sys.argv:
    when = "never"


def end(now):
    if now == when:
        print("loading the model\\nggml: something is wrong", flush=True)
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), getattr(signal, how.removeprefix("repack-")))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        end("request")
        self.send_response(200)
        self.end_headers()
        for token in range(body["n_predict"]):
            self.wfile.write(b"data: " + json.dumps({{"tokens": [token]}}).encode() + b"\\n")

    def log_message(self, *_):
        pass


end("start")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def fake_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load):
    """Starts a llama.cpp peer whose server is FAKE_SERVER."""
    program = tmp_path / "server"
    program.write_text(FAKE_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER", str(program))

    def start(how: str) -> Any:
        monkeypatch.setenv("FAKE", how)
        job = {"model": "m", "threads": 1, "max_batch": 2, "max_length": 64}
        return load("peers.llama_cpp").Server(job)

    return start


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("start:exit", "llama-server ended with 3"),
        ("start:SIGKILL", r"llama-server was ended by SIGKILL \(Killed\)"),
        ("start:SIGSEGV", r"llama-server was ended by SIGSEGV \(Segmentation fault\)"),
        ("request:SIGSEGV", r"llama-server was ended by SIGSEGV \(Segmentation fault\)"),
    ],
)
def test_a_peer_that_ends_at_its_start_says_how(fake_llama, load, how: str, message: str) -> None:
    """It says so at once, not after waiting for a start. --no-repack does not help these."""
    said = ": loading the model \\| ggml: something is wrong$"
    with pytest.raises(load("peers.base").ProgramEnded, match=message + said):
        fake_llama(how)


@pytest.mark.parametrize("when", ["start", "request"])
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL"])
def test_llama_cpp_is_tried_without_repacking_where_that_dies(
    fake_llama, when: str, name: str
) -> None:
    server = fake_llama(f"{when}:repack-{name}")
    try:
        (timeline,) = server.serve([{"ids": [1], "num_output": 3}])
        assert timeline.counts == [1, 1, 1]
        (remark,) = server.remarks
        assert remark.startswith("served with --no-repack; without it, llama-server was ended by")
        assert name in remark and "ggml: something is wrong" in remark
    finally:
        server.close()


def test_a_peer_that_serves_has_nothing_to_say(fake_llama) -> None:
    server = fake_llama("never")
    try:
        assert server.remarks == []
    finally:
        server.close()


def test_versions_are_those_that_are_installed(tmp_path: Path, load) -> None:
    packages = tmp_path / "llama.cpp" / "venv" / "lib" / "python3.12" / "site-packages"
    for name in ("numpy-2.4.1.dist-info", "gguf-0.19.0.dist-info", "numpy"):
        (packages / name).mkdir(parents=True)
    (tmp_path / "llama.cpp" / "llama_cpp_python-0.3.36.tar.gz").write_bytes(b"")
    engine = load("bench").ENGINES["llama.cpp"](tmp_path / "llama.cpp")
    assert engine.versions() == ["gguf-0.19.0", "numpy-2.4.1", "llama_cpp_python-0.3.36.tar.gz"]
    assert load("bench").ENGINES["vllm"](tmp_path / "vllm").versions() == []
