"""The benchmark scripts run, and report what they should; no timing is asserted."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import shared_data

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )


# Speed is not tested here, so other processes may take any share of the cores.
ON_A_BUSY_MACHINE = ("--most-others", "100")


def small_run(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    options = ("--divisor", 16, "--rounds", 1, "--no-limits", "--shapes", "tiny", "--threads", 1,
               "--engines", "allspark/bf16", "--work-dir", tmp_path / "work",
               "--output-dir", tmp_path / "results", "--name", "t",
               *ON_A_BUSY_MACHINE)  # fmt: skip
    return run(*options, *arguments)


def report_of(tmp_path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "results" / "t.json").read_text())
    return result


def values_of(record: dict[str, Any], **of: object) -> list[dict[str, float]]:
    """The values of the measurements that have these entries, by round."""
    return [
        each["values"]
        for each in record["measurements"]
        if "values" in each and of.items() <= each["of"].items()
    ]


def failures_of(record: dict[str, Any]) -> list[str]:
    return [
        f"{each['of']['workload']}, {each['of']['engine']}: {each['failed']}"
        for each in record["measurements"]
        if "failed" in each
    ]


def test_a_tiny_run_measures_everything(tmp_path: Path) -> None:
    tasks = "convert,start,single,p1024,b32,mixed,shared_late,gap,streams"
    result = small_run(tmp_path, "--workloads", tasks)
    assert result.returncode == 0, result.stderr
    record = report_of(tmp_path)
    assert failures_of(record) == [] and record["skipped"] == []
    assert record["ours"] == ["allspark bf16"]
    assert record["contestants"] == {"tiny": ["allspark bf16"], "260K": ["allspark bf16"]}
    for task, key in (("convert", "convert_s"), ("start", "start_s"), ("single", "ttft_ms"),
                      ("p1024", "prefill_tok_s"), ("b32", "output_tok_s"),
                      ("mixed", "ttft_p99_ms"), ("shared_late", "ttft_p99_ms"),
                      ("mixed", "rss_mb"), ("gap", "gap_prompt_s")):  # fmt: skip
        (values,) = values_of(record, shape="tiny", workload=task, engine="allspark bf16")
        assert values[key] > 0, key
    (streams,) = values_of(record, shape="260K", workload="streams")
    assert streams["streams_tok_s"] > 0
    about = record["machine"]
    assert re.fullmatch("reference|amx|(avx|neon)[a-z0-9_]*", about["isa"])
    assert about["kind"].endswith(f"-{about['isa']}")
    assert record["command"].startswith("python benchmarks/compare.py --divisor 16 --rounds 1")
    assert str(tmp_path) not in record["command"]
    table = (tmp_path / "results" / "t.md").read_text()
    assert "| b32: output, tokens/s |" in table and "16 times shorter" in table
    assert "limits have not been measured" not in table and "not measured" in table
    # The remaining time is printed before every row.
    assert re.search(r"round 1/1, tiny, b32 \(about \d+ (s|min) left\)", result.stderr)


def keeping(tmp_path: Path) -> list[str]:
    """The arguments that make a script save its values."""
    return ["--json", str(tmp_path / "kept.json"), *ON_A_BUSY_MACHINE]


def check_kept(tmp_path: Path, benchmark: str, of: dict[str, object], *metrics: str) -> None:
    """Checks the common form: what was measured where, by which command, and every value."""
    record = json.loads((tmp_path / "kept.json").read_text())
    assert record["benchmark"] == benchmark
    assert record["command"].startswith(f"python benchmarks/{benchmark}.py ")
    assert str(tmp_path) not in json.dumps(record)
    assert {"kind", "cpu", "cores", "memory_gib", "version", "isa"} == set(record["machine"])
    assert {"date", "commit", "modified", "settings"} <= set(record)
    found = values_of(record, **of)
    assert len(found) == record["settings"]["rounds"] == 1
    assert set(metrics) <= set(found[0]) and all(found[0][key] > 0 for key in metrics)


def test_guided_decoding_is_compared(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "guided.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--batch", "4", "--output", "8", "--rounds", "1"]
    result = subprocess.run([*script, *sizes, *keeping(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\| a schema each \| [\d.,]+ \| [\d.]+ \|", result.stdout)
    check_kept(tmp_path, "guided", {"kind": "one schema"}, "tok_s")


def test_a_stream_is_measured_beside_hostile_requests(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "hostile.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "260K", "--output", "400", "--rounds", "1"]
    result = subprocess.run([*script, *sizes, *keeping(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\| attacked \| [\d.,]+ \| [\d.,]+ \| [\d.,]+ \| \d+ \|", result.stdout)
    assert re.search(r"p99 gap under attack: x .*, at most x 2: (PASS|FAIL|nothing)", result.stdout)
    check_kept(tmp_path, "hostile", {"kind": "quiet"}, "p50", "p99", "most")


def test_the_prefix_cache_is_compared(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "prefix_cache.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--prompt", "200", "--shares", "0,0.96", "--rounds", "1"]
    result = subprocess.run([*script, *sizes, *keeping(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\| 96.0% \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", result.stdout)
    check_kept(tmp_path, "prefix_cache", {"found": 0.96}, "with_ms", "without_ms")


def test_prefill_policies_are_compared(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "prefill_policy.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--divisor", "8", "--rounds", "1"]
    result = subprocess.run([*script, *sizes, *keeping(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\| mixed \| smooth( \| [\d.,]+){5} \|", result.stdout)
    of = {"workload": "b32", "policy": "first_token"}
    # Gaps may be 0: where the reader is late, it finds several tokens at once.
    check_kept(tmp_path, "prefill_policy", of, "ttft_p99_ms", "output_tok_s")


def test_quantising_is_timed_and_its_memory_compared(tmp_path: Path, load) -> None:
    script = [sys.executable, str(BENCHMARKS / "quantizing.py"), "--work-dir", str(tmp_path)]
    (tmp_path / "text.txt").write_text("A queue has the tokens of a request. " * 40)
    sizes = ["--shape", "tiny", "--own", "--samples", "4", "--length", "64", "--rounds", "1",
             "--text", str(tmp_path / "text.txt")]  # fmt: skip
    result = subprocess.run([*script, *sizes, *keeping(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for program in ("allspark awq+gptq", "half of the layers"):
        assert re.search(rf"\| {re.escape(program)} \| \d+ \| \d+ \|", result.stdout)
    check_kept(tmp_path, "quantizing", {"program": "half of the layers"}, "s", "peak_mb")

    figures = load("verdicts").FIGURES
    programs = {"allspark awq+gptq": (60.0, 1000.0), "half of the layers": (31.0, 990.0),
                "llm-compressor GPTQ, float32": (100.0, 4000.0),
                "llm-compressor GPTQ, bfloat16": (200.0, 2500.0)}  # fmt: skip
    record = {"measurements": [
        {"round": 1, "of": {"program": name}, "values": {"s": seconds, "peak_mb": peak}}
        for name, (seconds, peak) in programs.items()
    ]}  # fmt: skip
    assert figures["s, of llm-compressor's"](record) == 0.6
    assert figures["peak memory, of llm-compressor's"](record) == 0.4
    assert figures["peak memory, of that with half of the layers"](record) == 1000 / 990


def test_quantising_has_the_threads_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load
) -> None:
    module, asked = load("quantizing"), []

    def run_command(command: list[object], timeout_s: float, env: dict[str, str]) -> str:
        asked.append([*map(str, command), env["OMP_NUM_THREADS"]])
        return '{"s": 1.0, "peak_mb": 1.0}'

    monkeypatch.setattr(module, "run_command", run_command)
    monkeypatch.setattr(module, "ensure_checkpoint", lambda shape, folder: folder)
    words = ["quantizing.py", "--own", "--threads", "1", "--work-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    module.Bench(module.parse_arguments()).own(module.OWN)
    (command,) = asked
    assert command[command.index("--threads") + 1] == "1" == command[-1]


def test_a_server_is_compared_with_its_engine(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "server_speed.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--divisor", "16", "--rounds", "1", "--precisions", "A8W8"]
    result = subprocess.run([*script, *sizes, *keeping(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for way in ("in process", "over HTTP"):
        assert re.search(rf"\| A8W8 \| {way}( \| [\d.,]+){{5}} \|", result.stdout)
    bar = r"\| A8W8: tokens/s, of the SDK's \| at least 0.97 \| [\d.]+ \|"
    assert re.search(bar, result.stdout)
    of = {"precision": "A8W8", "way": "over HTTP"}
    check_kept(tmp_path, "server_speed", of, "output_tok_s", "ttft_ms")


def test_a_batch_is_compared_with_the_sdk(tmp_path: Path, demo_model: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "batch.py"), "--model", str(demo_model)]
    sizes = ["--lines", "20", "--output", "4", "--batch", "4", "--rounds", "1"]
    result = subprocess.run([*script, *sizes, *keeping(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for kind in ("own lines", "requests"):
        assert re.search(rf"\| {kind} \| [\d.,]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", result.stdout)
    check_kept(tmp_path, "batch", {"kind": "own lines"}, "tok_s")


def test_adapters_are_compared_with_the_base_model(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "lora.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--requests", "4", "--adapters", "2", "--output", "4"]
    command = [*script, *sizes, "--rounds", "1", *keeping(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("all linear", "q and v"):
        cells = r" \| ".join([r"[\d.]+", r"[\d.]+", r"[\d.,]+", r"[\d.]+"])
        assert re.search(rf"\| {name} \| {cells} \|", result.stdout)
        check_kept(tmp_path, "lora", {"adapters": name}, "prompts_s", "output_s")


@pytest.mark.parametrize(
    "words", [["--x", "/a/b"], ["--x", "../a/b/"], ["--x=/a/b"], ["--x=b", "--json", "/a/c"]]
)
def test_a_recorded_command_names_no_folder(load, monkeypatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/lora.py", "--rounds", "5", *words])
    recorded = load("record").command()
    assert recorded.replace("=", " ") == "python benchmarks/lora.py --rounds 5 --x b"


def test_a_recorded_command_names_engines_as_they_were_asked_for(load, monkeypatch) -> None:
    words = ["--engines", "allspark/bf16,llama.cpp/Q8_0", "--resume"]
    monkeypatch.setattr(sys, "argv", ["./compare.py", *words])
    expected = "python benchmarks/compare.py --engines allspark/bf16,llama.cpp/Q8_0"
    assert load("record").command() == expected


def test_bytes_are_those_of_the_profile(load) -> None:
    profile = """model 'm', amx kernels, 2 threads: 100 forward passes, 1.276 s in operations
operation               calls           ms   share     GB/s     Gop/s
gate_up                  2400      541.500  42.4 %     38.0     175.4
route                    2400        5.690   0.4 %        -         -
down                      100        1.500  20.0 %     41.0         -
"""
    passes, read = load("moe").bytes_read(profile)
    assert passes == 100 and read == pytest.approx(541.5e6 * 38 + 1.5e6 * 41)
    assert load("moe").bytes_read("model 'm' has not run") == (0, 0)


@pytest.mark.parametrize(("shape", "counts"), [("tiny-moe", (1, 16)), ("tiny-latents", (4,))])
def test_what_experts_read_is_measured(
    tmp_path: Path, shape: str, counts: tuple[int, ...]
) -> None:
    script = [sys.executable, str(BENCHMARKS / "moe.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", shape, "--prompt", "8", "--output", "8", "--rounds", "1"]
    chosen = ["--streams", *map(str, counts)]
    result = subprocess.run(
        [*script, *sizes, *chosen, *keeping(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for streams in counts:
        assert re.search(rf"\| {streams} \| [\d.]+ \| [\d.]+ \| [\d.]+ \| ", result.stdout)
        check_kept(tmp_path, "moe", {"streams": streams}, "step_s")


def test_every_precision_of_ours_is_one_the_loaders_write(tmp_path: Path, load) -> None:
    result = small_run(tmp_path, "--workloads", "single", "--engines", "allspark,allspark/FP8")
    assert result.returncode == 0, result.stderr
    record = report_of(tmp_path)
    assert record["skipped"] == []
    labels = [*(f"allspark {name}" for name in load("ours").PRECISIONS), "allspark FP8"]
    assert record["contestants"]["tiny"] == labels
    (values,) = values_of(record, engine="allspark FP8")
    assert values["rss_of_source"] > 1  # A file as small as this.
    assert all(len(values_of(record, engine=label)) == 1 for label in labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "7B"), "--shapes has '7B'; it must be one of 0.5B"),
        (("--workloads", "single,x"), "--workloads has 'x'"),
        (("--engines", "openvino/int9"), "--engines has 'openvino/int9'"),
        (("--rounds", "0"), "--rounds is 0; it must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_workload_without_its_data_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLSPARK_SHARED_DATA", str(tmp_path / "absent"))
    result = small_run(tmp_path, "--workloads", "azure,single")
    assert result.returncode == 1
    record = report_of(tmp_path)
    (failure,) = failures_of(record)
    assert "set ALLSPARK_SHARED_DATA" in failure
    assert "| failed | 1 |" in (tmp_path / "results" / "t.md").read_text()
    (values,) = values_of(record, workload="single")
    assert values["ttft_ms"] > 0


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
    monkeypatch.setattr(sys.modules[__name__], "BENCHMARKS", copy)


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
    end = time.monotonic() + 1.0
    while time.monotonic() < end:  # This process counts as one of the others; its child does not.
        pass
    assert others.share() > 0.5 / (os.cpu_count() or 1)


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
try:
    base.run_command([sys.executable, "-c", sys.argv[1]], 4)
except base.TookTooLong:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime > 0.35)
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


def a_record(
    samples: dict[str, dict[str, list[float]]], *others: dict[str, Any], ours: str = "allspark bf16"
) -> dict[str, Any]:
    """A record of the shape `tiny`: by engine and metric "workload.figure", the values of the
    rounds. `others`: measurements without values."""
    by_row: dict[tuple[int, str, str], dict[str, float]] = {}
    for engine, metrics in samples.items():
        for metric, values in metrics.items():
            workload, _, name = metric.partition(".")
            for number, value in enumerate(values, 1):
                by_row.setdefault((number, workload, engine), {})[name] = value
    measurements = [
        {"round": number, "of": of_tiny(workload, engine), "values": values, "took_s": 1.0}
        for (number, workload, engine), values in by_row.items()
    ]
    machine = {"kind": "zen9-avx2", "cpu": "a CPU", "cores": 2, "memory_gib": 8.0,
               "version": "1/(GitSha1:01234567)", "isa": "avx2"}  # fmt: skip
    slot = {"read_gb_s": 40.0, "fma_gflop_s": 400.0, "bf16_gflop_s": None, "int8_gop_s": 900.0,
            "load_average": 1.0}  # fmt: skip
    engines = [*samples, *(each["of"]["engine"] for each in others)]
    return {
        "benchmark": "engines", "name": "recorded", "date": "2025-01-01", "machine": machine,
        "commit": "01234567", "modified": False, "complete": True,
        "command": "python benchmarks/compare.py",
        "settings": {"rounds": 2, "threads": 2, "chunk": 0, "divisor": 1, "note": "a note",
                     "workloads": ["single", "b8"]},
        "measurements": [*measurements, *others], "limits": [slot], "ours": [ours], "skipped": [],
        "contestants": {"tiny": list(dict.fromkeys(engines))},
    }  # fmt: skip


def of_tiny(workload: str, engine: str) -> dict[str, str]:
    return {"shape": "tiny", "workload": workload, "engine": engine}


RECORDED = {
    "allspark bf16": {"single.decode_tok_s": [40.0, 44.0], "single.ttft_ms": [100.0],
                      "single.decode_tok_s_limit": [0.8], "single.core_share": [0.95]},
    "fast int4": {"single.decode_tok_s": [84.0], "single.ttft_ms": [200.0],
                  "single.core_share": [0.9]},
    "slow bf16": {"single.decode_tok_s": [21.0], "single.ttft_ms": [150.0]},
}  # fmt: skip


def test_the_table_shows_fractions_and_ratios_to_the_best_peer(load) -> None:
    """One number of one peer in each row; different rows may show different peers."""
    table = load("report").markdown(a_record(RECORDED))
    cells = "42.0 [40.0..44.0] (80 %, ×0.50) | 84.0 (fast int4, 1 round)"
    assert f"| single: decode, tokens/s | {cells} |" in table
    # For a time, less is better: ours takes 100 ms and the best peer 150.
    assert "| single: TTFT p50, ms | 100 (×1.50) | 150 (slow bf16, 1 round) |" in table
    assert "b8: " not in table  # It was not measured.
    assert "| – | – | 95 | – |" in table and "Note: a note" in table  # The share of the cores.
    assert "zen9-avx2: a CPU" in table and "commit 01234567; 2025-01-01" in table


def test_what_was_disturbed_is_no_value(load) -> None:
    disturbed = {"round": 2, "of": of_tiny("single", "slow bf16"), "disturbed": 0.25, "took_s": 1.0}
    never = {"round": 1, "of": of_tiny("single", "noisy int8"), "disturbed": 0.5, "took_s": 1.0}
    record = a_record(RECORDED, disturbed, never)
    record["limits"].append({**dict.fromkeys(record["limits"][0]), "others_share": 0.3,
                             "load_average": 2.0})  # fmt: skip
    table = load("report").markdown(record)
    assert "| read bandwidth, GB/s | 40.0 (40.0..40.0), disturbed in 1 of 2 |" in table
    assert "| slow bf16 | 21.0 (1 of 2 without a value) |" in table
    assert "| noisy int8 | disturbed | disturbed |" in table
    assert "- noisy int8, single (round 1): disturbed: others took 50 % of the cores" in table
    assert "(slow bf16) |" in table and "(noisy int8) |" not in table


def test_a_limit_that_an_engine_beats_is_an_error_of_the_limit(load) -> None:
    samples = {"allspark bf16": {"single.decode_tok_s": [1.0, 1.0, 1.0],
                                 "single.decode_tok_s_limit": [0.7, 1.02, 0.9]},
               "allspark A8W8": {"single.decode_tok_s": [2.0],
                                 "single.decode_tok_s_limit": [1.3]}}  # fmt: skip
    record = a_record(samples)
    record["ours"] = list(samples)
    table = load("report").markdown(record)
    assert "1.0 [1.0..1.0] (80 %, limit too low in 1 of 3)" in table
    assert "2.0 (limit too low in 1 of 1, 1 round)" in table and "130 %" not in table


@pytest.mark.parametrize(
    ("ours", "reached", "verdict"),
    [(99.96, "0.999", "**open**"), (100.0, "1.000", "met"), (100.04, "1.000", "met")],
)
def test_a_bar_is_met_by_the_unrounded_number(
    load, ours: float, reached: str, verdict: str
) -> None:
    samples = {"allspark bf16": {"b8.output_tok_s": [ours]},
               "peer int8": {"b8.output_tok_s": [100.0]}}  # fmt: skip
    table = load("report").markdown(a_record(samples))
    assert "(×1.00)" in table  # Rounded, all three are 1.00.
    bar = "b8: output, tokens/s | best | 1 of the best peer"
    assert f"| {bar} | {reached} | {verdict} |" in table
    # A requested bar without a value is not met, too.
    assert "single: decode" not in table
    failed = {"round": 1, "of": of_tiny("single", "peer int8"), "failed": "died", "took_s": 1.0}
    samples["allspark bf16"]["single.ttft_ms"] = [5.0]
    table = load("report").markdown(a_record(samples, failed))
    assert "| single: TTFT p50, ms | best | 1 of the best peer | – | open: no value |" in table


def test_a_bar_of_a_limit_is_met_by_the_unrounded_number(load) -> None:
    report = load("report")
    for fraction, is_met in ((0.7999, False), (0.8, True)):
        samples = {"allspark bf16": {"single.decode_tok_s": [1.0],
                                     "single.decode_tok_s_limit": [fraction]}}  # fmt: skip
        lines = report.bars(report.Result(a_record(samples)), "tiny")
        (line,) = (line for line in lines if "0.8 of the limit" in line)
        assert line.endswith("| met |" if is_met else "| **open** |"), line


def test_bars_name_figures_and_precisions_that_there_are(load) -> None:
    report, workloads, bars = load("report"), load("workloads"), load("bars")
    known = {
        f"{name} {precision}"
        for name, engine in load("bench").ENGINES.items()
        for precision in engine.precisions
    }
    for bar in bars.BARS:
        workload, _, name = bar.metric.partition(".")
        assert workload in workloads.WORKLOADS and name in report.FIGURES
        assert bar.engine in known | {bars.BEST}
        assert (bar.against == bars.NOTHING) == (bar.most is not None)
        assert bar.against in known | {bars.PEER, bars.LIMIT, bars.NOTHING}


def test_a_bar_may_be_against_one_engine(load) -> None:
    report = load("report")
    for served, is_met in ((119.9, False), (120.0, True)):
        samples = {
            "vllm-serve bf16": {"b32.output_tok_s": [100.0]},
            "allspark-serve bf16": {"b32.output_tok_s": [served]},
        }
        record = {**a_record(samples), "ours": ["allspark-serve bf16"]}
        lines = report.bars(report.Result(record), "tiny")
        (line,) = (line for line in lines if "1.2 of vllm-serve bf16" in line)
        assert line.endswith("| met |" if is_met else "| **open** |"), line


def test_two_engines_are_compared_round_by_round(load) -> None:
    report = load("report")
    samples = {  # the machine is half as fast in some rounds
        "vllm-serve bf16": {"b32.output_tok_s": [100.0, 100.0, 50.0, 50.0]},
        "allspark-serve bf16": {"b32.output_tok_s": [125.0, 65.0, 64.0]},
    }
    record = {**a_record(samples), "ours": ["allspark-serve bf16"]}
    lines = report.bars(report.Result(record), "tiny")
    (line,) = (line for line in lines if "1.2 of vllm-serve bf16" in line)
    assert line.endswith("| 1.250 | met |"), line  # of 1.25, 0.65 and 1.28


@pytest.mark.parametrize(
    ("peer", "reached"),
    # Over HTTP 1.25, 0.65 and 1.28; in process 1.5, 1.3 and 1.4.
    [("vllm-serve bf16", "1.250"), ("llama.cpp BF16", "1.250"), ("openvino bf16", "1.400")],
)
def test_the_best_are_compared_round_by_round(load, peer: str, reached: str) -> None:
    """The peer's fourth round says nothing. A server is compared with ours over HTTP."""
    report = load("report")
    samples = {
        peer: {"b32.output_tok_s": [100.0, 100.0, 50.0, 50.0]},
        "slow int8": {"b32.output_tok_s": [60.0]},
        "allspark bf16": {"b32.output_tok_s": [150.0, 130.0, 70.0]},
        "allspark-serve bf16": {"b32.output_tok_s": [125.0, 65.0, 64.0]},
        "allspark-serve A8W8": {"b32.output_tok_s": [64.0]},
    }
    record = {**a_record(samples), "ours": [each for each in samples if "allspark" in each]}
    lines = report.bars(report.Result(record), "tiny")
    (line,) = (line for line in lines if "b32: output, tokens/s | best |" in line)
    assert line.endswith(f"| {reached} | met |"), line


def test_a_server_without_ours_over_http_is_compared_with_the_engine(load) -> None:
    report = load("report")
    samples = {"llama.cpp BF16": {"b32.output_tok_s": [100.0]},
               "allspark bf16": {"b32.output_tok_s": [150.0]}}  # fmt: skip
    lines = report.bars(report.Result(a_record(samples)), "tiny")
    assert any(line.endswith("| 1 of the best peer | 1.500 | met |") for line in lines)


def test_documents_quote_the_comparison(tmp_path: Path, load) -> None:
    record, figures = load("record"), load("figures")
    record.write(tmp_path / "results" / "zen9-avx2" / "engines.json", a_record(RECORDED))
    results = figures.Results(tmp_path / "results")
    blocks = {
        name: "\n".join(figures.BLOCKS[name](results, tmp_path / "docs"))
        for name in ("headline", "engines", "expected")
    }
    row = "| single: decode, tokens/s | 42.0 (80 %, ×0.50) | 84.0 (fast int4, 1 round) |"
    assert row in blocks["headline"] and row in blocks["engines"]
    assert "| single: decode, tokens/s | 42.0 |" in blocks["expected"]
    assert all("commit 01234567" in text for text in blocks.values())
    assert "[Report](../results/zen9-avx2/engines.md)" in blocks["engines"]
    # Of the round that both have.
    missed = "single.decode_tok_s of best: 0.476 of the best peer (1 wanted)"
    assert f"2 of these are met. Open: {missed}." in blocks["engines"]


def test_documents_say_what_a_column_is_and_who_took_part(tmp_path: Path, load) -> None:
    record, figures = load("record"), load("figures")
    speeds = {"b32.output_tok_s": [100.0]}
    ours = ["allspark bf16", "allspark-serve bf16"]
    late = {"round": 1, "of": of_tiny("b32", "late-serve bf16"), "took_s": 1.0,
            "stopped": {"after_s": 60.0, "ours_s": 20.0}}  # fmt: skip
    served = a_record({label: speeds for label in (*ours, "fast int4")}, late)
    served["ours"], served["settings"]["workloads"] = ours, ["b32"]
    record.write(tmp_path / "results" / "zen9-avx2" / "engines.json", served)
    results = figures.Results(tmp_path / "results")
    expected = "\n".join(figures.BLOCKS["expected"](results, tmp_path / "docs"))
    assert "on zen9-avx2 | bf16 | bf16, over HTTP |" in expected
    for name in ("headline", "engines"):
        text = "\n".join(figures.BLOCKS[name](results, tmp_path / "docs"))
        assert "Beside: fast int4, late-serve bf16 (b32 over 3 × our time)." in text


def test_a_recorded_run_is_rendered_again(tmp_path: Path, load) -> None:
    path = tmp_path / "again.json"
    path.write_text(json.dumps(a_record(RECORDED)))
    result = run("--render", path)
    assert result.returncode == 0, result.stderr
    assert path.with_suffix(".md").read_text() == result.stdout.removesuffix("\n")
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


# Runs in this process; the test makes up the engines' answers.


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load):
    """Makes runs of tiny workloads by bf16 and A8W8; workers answer `answer(label, job)`."""
    module = load("bench")
    monkeypatch.setattr(module, "draw", lambda record, path: None)
    monkeypatch.setattr(module.machine, "wait_until_quiet", lambda most_others: None)
    monkeypatch.setattr(module.Allspark, "prepare", lambda self, checkpoint, precision, model:
                        model.mkdir(parents=True, exist_ok=True))  # fmt: skip

    # An answer takes no time, of which others may seem to take any part.
    def make(*arguments: object, answer: Any = None) -> Any:
        def worker(contestant: Any, job: str, timeout_s: float) -> dict[str, Any]:
            parsed = {**json.loads(job), "timeout_s": timeout_s}
            if parsed["task"] == "version":
                return {"version": "1/(GitSha1:01234567)", "isa": "avx2"}
            return (answer or served)(contestant.label, parsed)

        monkeypatch.setattr(module.Bench, "_answer", staticmethod(worker))
        options = ["--divisor", "16", "--no-limits", "--shapes", "tiny", "--threads", "1",
                   "--engines", "allspark/bf16,allspark/A8W8", "--workloads", "single,b8",
                   "--rounds", "2", "--most-others", "1e9", "--work-dir", tmp_path / "work",
                   "--output-dir", tmp_path, *arguments]  # fmt: skip
        return module.Bench(load("compare").parse_arguments(list(map(str, options))))

    return make


def served(
    label: str, job: dict[str, Any], ttft_s: float = 0.01, step_s: float = 0.01
) -> dict[str, Any]:
    """The answer of a worker that needs 10 ms per token."""
    requests = [
        {
            "begin": 0.0,
            "times": [ttft_s + step_s * i for i in range(request["num_output"])],
            "counts": [1] * request["num_output"],
        }
        for wave in job["waves"]
        for request in wave
    ]
    about = {"load_s": 1.0, "rss_mb": 2.0, "core_share": 0.9, "remarks": []}
    return {**about, "requests": requests}


def rows_of(record: dict[str, Any]) -> list[tuple[int, str, str]]:
    return [
        (each["round"], each["of"]["workload"], each["of"]["engine"])
        for each in record["measurements"]
    ]


class Busy:
    """A machine on which others take the next of `shares` in each measurement."""

    shares: list[float]

    def __init__(self, in_process: bool = False) -> None:
        self.in_process = in_process

    def share(self) -> float:
        return self.shares.pop(0)


def test_a_disturbed_measurement_is_repeated_and_never_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, bench
) -> None:
    monkeypatch.setattr(load("machine"), "Others", Busy)
    monkeypatch.setattr(Busy, "shares", [0.5, 0.07, 0.5, 0.09, 0.2], raising=False)
    arguments = ("--rounds", 1, "--workloads", "b8", "--most-others", 0.08, "--retries", 2)
    bench(*arguments).run()
    first, second = json.loads((tmp_path / "engines.json").read_text())["measurements"]
    assert first["values"]["others_share"] == 0.07
    assert second["disturbed"] == 0.2 and "values" not in second
    assert Busy.shares == []
    assert "| allspark A8W8 | disturbed |" in (tmp_path / "engines.md").read_text()
    # A later run may find the machine quiet.
    monkeypatch.setattr(Busy, "shares", [0.01])
    bench(*arguments, "--resume").run()
    again, other = json.loads((tmp_path / "engines.json").read_text())["measurements"]
    assert again == first and other["values"]["others_share"] == 0.01


def test_a_measurement_begins_when_others_are_quiet(
    monkeypatch: pytest.MonkeyPatch, load, bench
) -> None:
    machine, asked = load("machine"), []
    monkeypatch.setattr(machine, "Others", Busy)
    monkeypatch.setattr(machine, "wait_until_quiet", asked.append)
    monkeypatch.setattr(Busy, "shares", [0.5, 0.0], raising=False)
    arguments = ("--rounds", 1, "--workloads", "b8", "--engines", "allspark/bf16")
    bench(*arguments, "--most-others", 0.08).run()
    assert asked == [0.08, 0.08]  # Before every try.


def test_others_are_waited_for(monkeypatch: pytest.MonkeyPatch, load) -> None:
    machine, clock = load("machine"), Clock()
    monkeypatch.setattr(machine, "time", clock)
    monkeypatch.setattr(machine, "Others", Busy)
    monkeypatch.setattr(Busy, "shares", [0.5, 0.021, 0.02, *[0.5] * 20], raising=False)
    machine.wait_until_quiet(0.08)
    assert clock.now == 3
    machine.wait_until_quiet(0.08)
    assert clock.now == 23 and Busy.shares == []  # They stay.
    machine.wait_until_quiet(1)
    assert clock.now == 23


@pytest.mark.parametrize("count", range(1, 13))
def test_an_engine_comes_after_others_in_turn(load, count: int) -> None:
    module = load("bench")
    engines = [
        module.ENGINES["llama.cpp" if number < count // 2 else "allspark"](Path())
        for number in range(count)
    ]
    group = [module.Contestant(engine, "bf16") for engine in engines]
    found = module.orders(group, count)
    assert all(len(set(order)) == len(order) == count for order in found)
    is_ours = [each.engine.is_ours for each in found[0]]
    assert is_ours == sorted(is_ours, reverse=True)
    assert [order[0] for order in found[1:]] == group[1:]
    pairs = [pair for order in found for pair in itertools.pairwise(order)]
    assert max(map(pairs.count, pairs), default=0) <= 2
    # A resumed run has the same, also with more rounds.
    assert module.orders(group, count + 2)[:count] == found


@pytest.mark.parametrize(("shares", "key"), [
    ([0.5, 0.09, 0.4], "disturbed"), ([0.5, 0.08], "late"), ([0.0], "late"),
])  # fmt: skip
@pytest.mark.parametrize(("arguments", "late"), [
    ((), "stopped"), (("--times-ours", 0), "took_too_long"),
])  # fmt: skip
def test_what_others_made_late_is_repeated(
    monkeypatch: pytest.MonkeyPatch, load, beside_peers,
    shares: list[float], key: str, arguments: tuple[object, ...], late: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(load("machine"), "Others", Busy)
    monkeypatch.setattr(Busy, "shares", [0.0, *shares], raising=False)

    def answer(label: str, job: dict[str, Any]) -> dict[str, Any]:
        if label == "peer far":
            raise load("peers.base").TookTooLong("it took more than that")
        return served(label, job)

    options = ("--engines", "allspark/bf16,peer/far", "--rounds", 1, "--retries", 2)
    run = beside_peers(*options, "--most-others", 0.08, *arguments, answer=answer)
    run.run()
    _, measurement = run.record["measurements"]
    assert {"disturbed", "stopped", "took_too_long"} & set(measurement) == {
        late if key == "late" else key
    }
    assert Busy.shares == []


def test_a_script_of_its_own_repeats_what_was_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load
) -> None:
    monkeypatch.setattr(load("machine"), "Others", Busy)
    monkeypatch.setattr(Busy, "shares", [0.9, 0.5, 0.07, 0.5, 0.09], raising=False)
    module = load("bench_engine")
    parser = module.make_parser("test", rounds=1)
    options = parser.parse_args(["--json", str(tmp_path / "r.json"), "--retries", "1"])
    recorder = module.Recorder("lora", options, {"version": "1", "isa": "avx2"})
    for number in (0, 1, 2):  # Round 0 warms up, and is not repeated.
        recorder.measure(number, {"adapters": "none"}, lambda: {"prompts_s": 1.0, "output_s": 1.0})
    record = json.loads((tmp_path / "r.json").read_text())
    one, other = record["measurements"]
    assert one["values"] and other["disturbed"] == 0.09 and "values" not in other
    assert "| none | 1.000 |" in "\n".join(load("tables").lora({**record, "measurements": [one],
        "settings": {**record["settings"], "precision": "bf16", "requests": 1, "prompt": 1,
                     "output": 1, "adapters": 1, "rank": 1}}))  # fmt: skip


@pytest.mark.parametrize("script", ["server_speed", "prefill_policy"])
def test_a_repeated_turn_has_other_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, script: str
) -> None:
    """The prefix cache knows those of the try that others disturbed."""
    worker, module = load("peers.worker"), load(script)
    prompts: list[tuple[int, ...]] = []

    class Server(worker.InProcess):
        def __init__(self, job: dict[str, Any]) -> None:
            pass

        def serve(self, requests: list[dict[str, Any]]) -> list[Any]:
            prompts.extend(tuple(request["ids"]) for request in requests)
            timelines = [worker.Timeline() for _ in requests]
            for timeline, request in zip(timelines, requests, strict=True):
                timeline.add(request["num_output"])
            return timelines

    monkeypatch.setattr(load("machine"), "Others", Busy)
    monkeypatch.setattr(Busy, "shares", [0.5, 0.0], raising=False)
    monkeypatch.setattr(module, "prepared", lambda *_: tmp_path)
    arguments = ["--shape", "tiny", "--divisor", "16", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [script, *arguments, "--work-dir", str(tmp_path)])
    options = module.parse_arguments()
    if script == "server_speed":
        monkeypatch.setattr(module, "_LOADS", {"in process": Server})
        bench = module.Bench(options, "bf16")
        measure = functools.partial(bench.measure, "in process")
    else:
        monkeypatch.setattr(module, "Running", Server)
        bench = module.Bench(options)
        measure = functools.partial(bench.measure, "balanced", bench.workloads[0])
    monkeypatch.setattr(worker.InProcess, "later_s", lambda *_: None)
    bench._job = {**bench._job, "warm_up": []}
    prompts.clear()
    recorder = load("bench_engine").Recorder(script, options, {"version": "1", "isa": "avx2"})
    recorder.measure(1, {}, measure)
    assert Busy.shares == [] and "values" in recorder.record["measurements"][0]
    assert len({*prompts}) == len(prompts) == 2 * 32


class FailedRequests:
    """An engine, and the queue of all its requests: each gives three tokens, and then fails."""

    error = "no room"
    finished = True
    id = 1
    ids_from_generate = [7, 7, 7]

    def __init__(self, success: Any) -> None:
        self._success = success

    def start_request_ids(self, *_: object) -> tuple[Any, Any, Any]:
        return self._success, self, self

    def sync_request(self, *_: object) -> Any:
        return self._success

    def get_op_profiling_info(self, name: str) -> str:
        return ""

    def drain_completions(self) -> list[Any]:
        return [self]

    def Get(self) -> Any:
        return self

    GetNoWait = Get

    def GeneratedLength(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("script", "serve"),
    [
        ("lora", lambda bench: bench.measure("none")),
        ("moe", lambda bench: bench.step(1)),
        ("guided", lambda bench: bench.measure([None])),
        ("speculative", lambda bench: bench.measure([[5]], 1, {})),
        ("measure", lambda running: running.serve([{"ids": [5], "num_output": 4}])),
        ("batch", lambda bench: bench.measure("sdk", 1)),
    ],
)
def test_requests_that_fail_are_no_fast_ones(
    monkeypatch: pytest.MonkeyPatch, load, script: str, serve: Any
) -> None:
    module = load(script)
    bench = object.__new__(module.Running if script == "measure" else module.Bench)
    bench.options = argparse.Namespace(output=4, adapters=1)
    bench.engine = FailedRequests(load("measure").AsStatus.ALLSPARK_SUCCESS)
    bench.prompts, bench.loader = [[5]], None
    bench.questions, bench.alone = ["?"], 0
    if script == "batch":
        bench.begin, bench.sdk = lambda: None, lambda questions: 3
        bench.clock = bench.cpu = 0.0
    monkeypatch.setattr(load("measure").select, "select", lambda *_: None)
    with pytest.raises(RuntimeError, match="3 of 4 tokens"):
        serve(bench)


def test_limits_that_an_engine_beats_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, bench
) -> None:
    size = load("checkpoints").SHAPES["tiny"].bytes_per_decoded_token() / 1e9
    rates = dict.fromkeys(load("machine").LIMITS, 1e6)
    # Ours decodes 100 tokens/s and reads that much; other figures are far below their limits.
    reads = [100 * size * factor for factor in (0.5, 0.6, 0.8, 1.25, 2.5)]
    slots = [{**rates, "read_gb_s": read, "load_average": 0.0} for read in reads]
    monkeypatch.setattr(load("machine"), "measure_limits", lambda *_: slots.pop(0))
    run = bench("--rounds", 1, "--workloads", "single", "--engines", "allspark/bf16")
    run.run()
    (one,) = run.record["measurements"]
    # Before and after: 0.5 and 0.6. Measured again: 0.8, then 1.25, which makes the value possible.
    assert one["values"]["decode_tok_s_limit"] == pytest.approx(0.8)
    assert one["limits"]["read_gb_s"] == reads[3] and len(run.record["limits"]) == 4
    # If the limit stays too low, the value stays, and the cell says that the limit is too low.
    slots[:] = [{**rates, "read_gb_s": 100 * size * 0.5, "load_average": 0.0}] * 4
    run = bench("--rounds", 1, "--workloads", "single", "--engines", "allspark/bf16")
    run.run()
    assert "(limit too low in 1 of 1)" in (tmp_path / "engines.md").read_text()


def test_a_run_that_was_cut_off_is_resumed(tmp_path: Path, load, bench) -> None:
    asked: list[str] = []

    def cut_off(label: str, job: dict[str, Any]) -> dict[str, Any]:
        asked.append(label)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return served(label, job)

    first = bench(answer=cut_off)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    record = json.loads((tmp_path / "engines.json").read_text())
    kept = rows_of(record)
    assert len(kept) == 3 and not record["complete"]
    assert "1 of 2 round(s)" in load("report").origin(record)
    again = bench("--resume")
    again.run()
    every = rows_of(json.loads((tmp_path / "engines.json").read_text()))
    assert every[:3] == kept
    assert sorted(every) == sorted(
        (number, workload, engine)
        for number in (1, 2)
        for workload in ("single", "b8")
        for engine in ("allspark bf16", "allspark A8W8")
    )
    # Nothing is left to do, but another round may be added.
    asked.clear()
    bench("--resume", answer=cut_off).run()
    assert asked == []
    bench("--resume", "--rounds", 3).run()
    assert len(rows_of(json.loads((tmp_path / "engines.json").read_text()))) == 12


@pytest.mark.parametrize(
    ("key", "value", "arguments", "message"),
    [
        ("commit", "89abcdef", (), "has commit 89abcdef, this run 01234567"),
        ("machine.kind", "zen9-avx512", (), "has kind zen9-avx512, this run"),
        ("machine.cores", 64, (), "has cores 64, this run"),
        ("settings.threads", 2, (), "has --threads 2, this run 1"),
        ("settings.most_others", 0.5, (), "has --most-others 0.5, this run 1000000000.0"),
        (None, None, ("--rounds", 1), "--rounds is 1; .* has 2, which may only grow"),
        (None, None, ("--workloads", "b8"), r"--workloads \['single', 'b8'\], this run \['b8'\]"),
    ],
)
def test_another_run_is_not_resumed(
    tmp_path: Path, load, bench, key: str | None, value: object, arguments: tuple[object, ...],
    message: str,
) -> None:  # fmt: skip
    """Its values would stand beside others that they cannot be compared with."""
    run = bench()
    run.run()
    record = json.loads(run.path.read_text())
    if key is not None:
        folder, _, name = key.rpartition(".")
        (record[folder] if folder else record)[name] = value
        run.path.write_text(json.dumps(record))
    before = run.path.read_text()
    with pytest.raises(load("bench").Unfit, match=message):
        bench("--resume", *arguments)
    assert run.path.read_text() == before


@pytest.mark.parametrize(("before", "now", "kept"), [
    (True, False, True), (False, True, True), (False, None, None), (False, False, False),
])  # fmt: skip
def test_a_resumed_run_has_the_changes_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, bench,
    before: bool | None, now: bool | None, kept: bool | None,
) -> None:  # fmt: skip
    for modified in (before, now):
        monkeypatch.setattr(load("record"), "is_modified", lambda commit, of=modified: of)
        bench("--resume").run()
    assert load("record").read(tmp_path / "engines.json")["modified"] is kept


def test_a_peer_that_cannot_be_installed_any_more_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, beside_peers
) -> None:
    """With what was measured of it."""

    def install(self: Any) -> None:
        raise load("peers.base").EngineError("no package for this Python")

    beside_peers("--rounds", 1, answer=by_steps).run()
    monkeypatch.setattr(load("bench").ENGINES["peer"], "install", install)
    beside_peers("--resume", "--rounds", 2, answer=by_steps).run()
    record = load("record").read(tmp_path / "engines.json")
    assert record["contestants"] == {"tiny": list(STEPS)} and record["ours"] == ["allspark bf16"]
    assert record["skipped"] == ["peer: no package for this Python"]
    assert "| 800.0 (peer best, 1 round) |" in (tmp_path / "engines.md").read_text()


def test_other_versions_of_a_peer_are_not_resumed(
    monkeypatch: pytest.MonkeyPatch, load, beside_peers
) -> None:
    def installed(*versions: str) -> None:
        peer = load("bench").ENGINES["peer"]
        monkeypatch.setattr(peer, "versions", lambda self: list(versions))

    installed("numpy-2.0", "torch-2.1")
    run = beside_peers(answer=by_steps)
    run.run()
    assert run.record["versions"] == {"peer": ["numpy-2.0", "torch-2.1"]}
    beside_peers("--resume", answer=by_steps)
    installed("numpy-2.0", "torch-2.2")
    message = r"has peer \['torch-2.1'\], this run \['torch-2.2'\]"
    with pytest.raises(load("bench").Unfit, match=message):
        beside_peers("--resume", answer=by_steps)
    # A record that does not say which they were.
    del run.record["versions"]
    load("record").write(run.path, run.record)
    again = beside_peers("--resume", answer=by_steps)
    assert again.record["versions"] == {"peer": ["numpy-2.0", "torch-2.2"]}


def test_versions_are_those_that_are_installed(tmp_path: Path, load) -> None:
    packages = tmp_path / "llama.cpp" / "venv" / "lib" / "python3.12" / "site-packages"
    for name in ("numpy-2.4.1.dist-info", "gguf-0.19.0.dist-info", "numpy"):
        (packages / name).mkdir(parents=True)
    (tmp_path / "llama.cpp" / "llama_cpp_python-0.3.36.tar.gz").write_bytes(b"")
    engine = load("bench").ENGINES["llama.cpp"](tmp_path / "llama.cpp")
    assert engine.versions() == ["gguf-0.19.0", "numpy-2.4.1", "llama_cpp_python-0.3.36.tar.gz"]
    assert load("bench").ENGINES["vllm"](tmp_path / "vllm").versions() == []


def test_a_run_ends_after_its_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, bench
) -> None:
    """A row that does not fit is left out entirely; a resumed run measures it."""
    seconds = {"single": 3.0, "b8": 300.0}
    monkeypatch.setattr(load("estimate").Estimate, "seconds", lambda self, key: seconds[key[1]])
    bench("--rounds", 1, "--minutes", 0.2).run()
    record = json.loads((tmp_path / "engines.json").read_text())
    assert [workload for _, workload, _ in rows_of(record)] == ["single"] * 2
    assert record["skipped"] == ["round 1/1, tiny, b8: no time for it"]
    assert not record["complete"]
    bench("--rounds", 1, "--resume").run()
    record = json.loads((tmp_path / "engines.json").read_text())
    assert len(rows_of(record)) == 4 and record["complete"] and record["skipped"] == []


def test_a_measurement_is_ended_when_the_minutes_are_over(
    monkeypatch: pytest.MonkeyPatch, load, bench
) -> None:
    def overdue(label: str, job: dict[str, Any]) -> dict[str, Any]:
        raise load("peers.base").TookTooLong("python took more than 1 s")

    monkeypatch.setattr(load("estimate").Estimate, "seconds", lambda self, key: 0.0)
    run = bench("--rounds", 1, "--minutes", 1, "--workloads", "b8", answer=overdue)
    run.run()
    # The run's time was over, not the measurement's own, so a later run may try again.
    assert run.record["measurements"] == []
    assert run.record["skipped"] == [
        f"tiny, b8, {label}: no time for it" for label in ("allspark bf16", "allspark A8W8")
    ]


# Peers far behind, and peers that fail.


@pytest.fixture
def beside_peers(monkeypatch: pytest.MonkeyPatch, load, bench):
    """Makes runs of one workload by bf16 beside `peer` in three precisions."""
    module = load("bench")

    class Peer(load("peers.base").Engine):
        name = "peer"
        precisions = dict.fromkeys(("best", "near", "far"), load("peers.base").BF16)

        def install(self) -> None:
            """There is nothing to install, and an empty environment takes seconds."""

        def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
            model.mkdir(parents=True, exist_ok=True)

    monkeypatch.setitem(module.ENGINES, Peer.name, Peer)

    def make(*arguments: object, answer: Any) -> Any:
        engines = ("--engines", "allspark/bf16,peer", "--workloads", "b8", "--rounds", 3)
        return bench(*engines, *arguments, answer=answer)

    return make


STEPS = {"allspark bf16": 9.0, "peer best": 1.0, "peer near": 1.49, "peer far": 1.51}


def by_steps(label: str, job: dict[str, Any]) -> dict[str, Any]:
    return served(label, job, STEPS[label] / 100, STEPS[label] / 100)


def rounds_of(record: dict[str, Any]) -> dict[str, list[int]]:
    """The rounds of each engine."""
    found: dict[str, list[int]] = {}
    for number, _, engine in sorted(rows_of(record)):
        found.setdefault(engine, []).append(number)
    return found


def test_a_peer_far_behind_is_measured_in_one_round(
    tmp_path: Path, load, beside_peers, capsys
) -> None:
    """Ours stays, however slow it is."""
    run = beside_peers(answer=by_steps)
    run.run()
    every = [1, 2, 3]
    assert rounds_of(run.record) == {
        "allspark bf16": every, "peer best": every, "peer near": every, "peer far": [1],
    }  # fmt: skip
    record = load("record").read(tmp_path / "engines.json")
    assert record["complete"] and record["settings"]["far_behind"] == 1.5
    titles = re.findall(r"(round ./3), tiny, b8 \((at most|about) ", capsys.readouterr().err)
    assert titles == [("round 1/3", "at most"), ("round 2/3", "about"), ("round 3/3", "about")]
    table = (tmp_path / "engines.md").read_text()
    assert "A peer more than 1.5 times behind the best peer is measured in that row no" in table
    assert re.search(r"\| peer far \| 529.8 \(1 round\) \|", table)
    assert re.search(r"\| peer near \| 536.9 \[536.9..536.9\] \|", table)
    assert "| 800.0 (peer best) |" in table and "| peer far | 1 |" in table
    # What is left out is not to be resumed, and takes no time.
    again = beside_peers("--resume", answer=by_steps)
    assert list(again._rows()) == []
    again.run()
    assert again.record["measurements"] == record["measurements"]
    more = beside_peers("--resume", "--rounds", 4, answer=by_steps)
    (row,) = more._rows()
    assert {each.label for each in row.contestants} == set(STEPS) - {"peer far"}
    assert more._expected_s([row]) == pytest.approx(
        sum(more._estimate.seconds(("tiny", "b8", each.label)) for each in row.contestants)
    )


def test_all_peers_may_be_measured_in_all_rounds(tmp_path: Path, beside_peers) -> None:
    """Also afterwards."""
    beside_peers(answer=by_steps).run()
    run = beside_peers("--resume", "--all-peers", answer=by_steps)
    run.run()
    assert rounds_of(run.record) == dict.fromkeys(STEPS, [1, 2, 3])
    table = (tmp_path / "engines.md").read_text()
    assert "1 round" not in table and "times behind" not in table and run.record["complete"]


def of_peers(**metrics: tuple[float, ...]) -> dict[str, dict[str, list[float]]]:
    """Values of `b8` of the peers p0, p1 ..., in one round."""
    count = len(next(iter(metrics.values())))
    return {
        f"p{i}": {f"b8.{name}": [values[i]] for name, values in metrics.items()}
        for i in range(count)
    }


@pytest.mark.parametrize(
    ("samples", "out"),
    [
        (of_peers(output_tok_s=(150.0, 100.0, 99.9)), {"p2"}),
        (of_peers(ttft_ms=(100.0, 150.0, 150.1)), {"p2"}),
        # Near the best in one of the figures; those that are not in the summary do not count.
        (of_peers(output_tok_s=(150.0, 10.0), ttft_ms=(100.0, 149.0)), set()),
        (of_peers(output_tok_s=(150.0, 10.0), ttft_ms=(100.0, 1.0)), set()),
        (of_peers(output_tok_s=(150.0, 10.0), rss_mb=(100.0, 1.0)), {"p1"}),
        (of_peers(output_tok_s=(150.0, 10.0), gap_p99_ms=(0.0, 0.0)), set()),
        # The first value counts, and how fast ours is does not.
        ({"p0": {"b8.output_tok_s": [100.0, 900.0]}, "p1": {"b8.output_tok_s": [90.0]}}, set()),
        ({"allspark bf16": {"b8.output_tok_s": [900.0]}, "p": {"b8.output_tok_s": [1.0]}}, set()),
        ({"allspark bf16": {"b8.output_tok_s": [1.0]}, "p": {"b8.output_tok_s": [900.0]}}, set()),
    ],
)
def test_who_is_far_behind(load, samples: dict[str, dict[str, list[float]]], out: set[str]) -> None:
    result = load("report").Result(a_record(samples))
    assert load("rules").left_out(result, "tiny", "b8", 1.5) == out
    assert load("rules").left_out(result, "tiny", "single", 1.5) == set()
    assert load("rules").left_out(result, "tiny", "b8", None) == set()


@pytest.mark.parametrize(("values", "failures", "is_out"), [(1, 2, False), (0, 1, False),
                                                            (0, 2, True)])  # fmt: skip
def test_a_peer_with_a_value_may_fail(load, values: int, failures: int, is_out: bool) -> None:
    samples = {"best": {"b8.output_tok_s": [1.0]}, "p": {"b8.output_tok_s": [1.0] * values}}
    failed = {"of": of_tiny("b8", "p"), "failed": "died"}
    others = [{**failed, "round": values + number} for number in range(1, failures + 1)]
    result = load("report").Result(a_record(samples, *others))
    assert load("rules").left_out(result, "tiny", "b8", 1.5) == ({"p"} if is_out else set())


def test_a_peer_is_judged_when_it_has_a_value(
    monkeypatch: pytest.MonkeyPatch, load, beside_peers
) -> None:
    """In the first round it was disturbed, so that it is measured again until it was not."""
    monkeypatch.setattr(load("machine"), "Others", Busy)
    monkeypatch.setattr(Busy, "shares", [], raising=False)
    asked: list[str] = []

    def disturbed_twice(label: str, job: dict[str, Any]) -> dict[str, Any]:
        asked.append(label)
        is_disturbed = label == "peer far" and asked.count(label) <= 2
        Busy.shares.append(0.5 if is_disturbed else 0.0)
        return by_steps(label, job)

    arguments = ("--rounds", 4, "--most-others", 0.08, "--retries", 0)
    run = beside_peers(*arguments, answer=disturbed_twice)
    run.run()
    found = rounds_of(run.record)
    assert found["peer far"] == [1, 2, 3]
    assert {len(rounds) for label, rounds in found.items() if label != "peer far"} == {4}
    (values,) = values_of(run.record, engine="peer far")
    assert values["output_tok_s"] == pytest.approx(800 / 1.51)


def test_a_peer_that_fails_is_tried_once_more(tmp_path: Path, load, beside_peers) -> None:
    """Ours is tried in every round."""
    asked: list[str] = []

    def failing(label: str, job: dict[str, Any]) -> dict[str, Any]:
        asked.append(label)
        if label in ("allspark bf16", "peer far") or asked.count(label) == 1 and "near" in label:
            raise load("peers.base").EngineError("it ended")
        return by_steps(label, job)

    run = beside_peers("--rounds", 4, answer=failing)
    run.run()
    assert {label: asked.count(label) for label in STEPS} == {
        "allspark bf16": 4, "peer best": 4, "peer near": 4, "peer far": 2,
    }  # fmt: skip
    assert run.record["complete"]
    assert "- peer far, b8 (round 1), b8 (round 2): it ended" in (
        (tmp_path / "engines.md").read_text()
    )


class Clock:
    """Time that passes only when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("ours_s", "arguments", "limits", "cell"),
    [
        (100.0, (), [300.0], "over 3 × our time"),
        (100.0, ("--times-ours", 2.5), [250.0], "over 2.5 × our time"),
        (7.0, (), [180.0], "over 25.7 × our time"),  # Ours counts as a minute.
        # These are the time limit of all measurements.
        (700.0, (), [1800.0], "failed"),
        (100.0, ("--times-ours", 0), [1800.0], "failed"),
    ],
)
def test_a_peer_is_ended_after_a_few_times_our_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load, beside_peers,
    ours_s: float, arguments: tuple[object, ...], limits: list[float], cell: str,
) -> None:  # fmt: skip
    clock, given = Clock(), []
    monkeypatch.setattr(load("bench"), "time", clock)

    def timed(label: str, job: dict[str, Any]) -> dict[str, Any]:
        clock.now += ours_s if label == "allspark bf16" else min(job["timeout_s"], 10.0)
        if label == "allspark bf16":
            assert job["timeout_s"] == 1800
        if label == "peer far":
            given.append(job["timeout_s"])
            raise load("peers.base").TookTooLong(f"it took more than {job['timeout_s']:g} s")
        return by_steps(label, job)

    engines = ("--engines", "peer/far,peer/best,allspark/bf16", "--timeout", 1800)
    run = beside_peers(*engines, *arguments, answer=timed)
    run.run()
    assert [label for _, _, label in rows_of(run.record)][0] == "allspark bf16"
    assert given == limits  # Once, with this limit.
    assert rounds_of(run.record)["peer far"] == [1] and run.record["complete"]
    table = (tmp_path / "engines.md").read_text()
    assert f"| peer far | {cell} | {cell} |" in table
    is_ended_by_ours = cell != "failed"
    assert run.has_failures != is_ended_by_ours
    assert (f"b8 (round 1): ended after {limits[0]:.0f} s, {cell}" in table) == is_ended_by_ours


def test_without_ours_a_peer_has_all_its_time(monkeypatch, load, beside_peers) -> None:
    given = []

    def timed(label: str, job: dict[str, Any]) -> dict[str, Any]:
        given.append(job["timeout_s"])
        return by_steps(label, job)

    beside_peers("--engines", "peer/best", "--rounds", 1, answer=timed).run()
    assert given == [300]


def test_the_fastest_of_ours_counts(load) -> None:
    samples = {f"allspark {name}": {"b8.output_tok_s": [1.0, 1.0]} for name in ("bf16", "A8W8")}
    record = a_record({**samples, "peer": {"b8.output_tok_s": [1.0, 1.0]}})
    record["ours"] = list(samples)
    for measurement, wall_s in zip(record["measurements"], (50, 60, 30, 40, 5, 5), strict=True):
        measurement["wall_s"] = wall_s
    rules, result = load("rules"), load("report").Result(record)
    assert rules.fastest_of_ours_s(result, "tiny", "b8") == 30
    assert rules.fastest_of_ours_s(result, "tiny", "single") is None
    assert rules.longest_s(30, 3) == 180 and rules.longest_s(61, 3) == 183


def test_a_best_peer_with_fewer_rounds_says_so(load) -> None:
    samples = {"allspark bf16": {"b8.output_tok_s": [1.0, 1.0, 1.0]},
               "fast": {"b8.output_tok_s": [9.0, 9.0]},
               "slow": {"b8.output_tok_s": [2.0, 2.0]},
               "late": {"b8.output_tok_s": [1.0]}}  # fmt: skip
    lost = [{"round": number, "of": of_tiny("b8", name), "failed": "died", "took_s": 1.0}
            for number, name in ((3, "slow"), (2, "late"))]  # fmt: skip
    table = load("report").markdown(a_record(samples, *lost))
    assert "| late | 1.0 (1 round) |" in table
    assert "| 9.0 (fast, 2 rounds) |" in table
    assert "| slow | 2.0 [2.0..2.0] (1 of 3 without a value) |" in table


def test_what_takes_too_long_is_not_tried_in_every_round(load, bench) -> None:
    asked: list[str] = []

    def late(label: str, job: dict[str, Any]) -> dict[str, Any]:
        asked.append(label)
        if label == "allspark A8W8":
            raise load("peers.base").TookTooLong("python took more than 300 s")
        return served(label, job)

    run = bench("--workloads", "b8", answer=late)
    run.run()
    assert asked.count("allspark A8W8") == 1 and asked.count("allspark bf16") == 2
    failed = [each for each in run.record["measurements"] if "failed" in each]
    assert [each["round"] for each in failed] == [1] and run.record["complete"]


def test_the_time_that_is_left_is_learnt(load) -> None:
    estimate = load("estimate").Estimate(1, [])
    assert estimate.seconds(("0.5B", "b32", "x")) > estimate.seconds(("0.5B", "b8", "x"))
    measured = {"of": {"shape": "0.5B", "workload": "b8", "engine": "x"}, "took_s": 30.0}
    estimate = load("estimate").Estimate(1, [measured, {**measured, "took_s": 50.0}])
    assert estimate.seconds(("0.5B", "b8", "x")) == 40.0
    # The ratio of real time to guess is taken to be the same for what is not measured yet.
    guess = load("estimate").weight
    ratio = guess("1B", "b32", 1) / guess("0.5B", "b8", 1)
    assert estimate.seconds(("1B", "b32", "y")) == pytest.approx(40.0 * ratio)
    assert load("estimate").in_words(59 * 60 + 50) == "1 h 0 min"


def test_the_full_run_asks_for_what_there_is(load) -> None:
    full = load("full")
    steps = full.steps(full.parse_arguments([]))
    for shape in ("0.5B", "1B"):
        load("compare").parse_arguments(steps[f"engines-{shape}"][1:])
    assert "streams" in steps["engines-0.5B"][8] and "streams" not in steps["engines-1B"][8]
    assert {command[0].removesuffix(".py") for command in steps.values()} == {
        *load("tables").TABLES, "compare",
    }  # fmt: skip


def test_the_full_run_says_its_commands() -> None:
    script = [sys.executable, str(BENCHMARKS / "full.py"), "--list", "--rounds", "3"]
    result = subprocess.run(script, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "lora-A8W8: python benchmarks/lora.py --rounds 3 --precision A8W8\n" in result.stdout
    assert "engines-1B: python benchmarks/compare.py --rounds 3 --shapes 1B " in result.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_changed_checkout_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load
) -> None:
    """Files that a run writes do not count."""
    record = load("record")
    monkeypatch.setattr(record, "HERE", tmp_path / "benchmarks")
    paths = ["benchmarks/results/k/a.json", "README.md", "csrc/a.cc"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("before")

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "--short=8", "HEAD")
    assert record.is_modified(commit) is False
    for path in paths[:2]:
        (tmp_path / path).write_text("after")
    git("commit", "-qam", "results")
    assert record.is_modified(commit) is False
    (tmp_path / paths[2]).write_text("after")
    assert record.is_modified(commit) is True
    git("commit", "-qam", "another engine")
    assert record.is_modified(commit) is True
    assert record.is_modified(None) is None and record.is_modified("0" * 40) is None


def test_results_of_another_commit_are_removed_when_asked(tmp_path: Path, load) -> None:
    for name, commit in (("a", "01234567"), ("engines", "89abcdef")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": commit}))
    (tmp_path / "engines.md").write_text("")
    full = load("full")
    assert full.of_others(tmp_path, "01234567") == [tmp_path / "engines.json"]
    full.remove(full.of_others(tmp_path, "01234567"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("name", "changes", "is_done"),
    [
        ("lora", {}, True),
        ("engines-0.5B", {}, False),  # compare.py resumes by itself.
        ("lora", {"complete": False}, False),
        ("lora", {"command": "python benchmarks/lora.py --rounds 3 --tokenizer qwen"}, False),
        ("lora", {"measurements": [{"values": {}}, {"disturbed": 0.2}]}, False),
    ],
)
def test_what_is_measured_already_is_not_measured_again(
    tmp_path: Path, load, name: str, changes: dict[str, Any], is_done: bool
) -> None:
    step = ["lora.py", "--rounds", "5", "--tokenizer", "/data/qwen"]
    path = tmp_path / f"{name}.json"
    assert not load("full").is_done(path, step)
    command = "python benchmarks/lora.py --rounds 5 --tokenizer qwen"
    found = {"complete": True, "command": command, "measurements": [{"values": {}}], **changes}
    path.write_text(json.dumps(found))
    assert load("full").is_done(path, step) is is_done


def test_quick_has_a_time_to_end(load) -> None:
    options = load("compare").parse_arguments(["--quick"])
    assert options.minutes < 10 and options.rounds == 1


def test_every_size_class_is_served_before_the_clock_starts(load, bench) -> None:
    """For all engines alike, because the requests are part of the job."""
    workloads, worker = load("workloads"), load("peers.worker")
    for name in ("single", "p1024", "b32", "mixed", "shared_late", "long", "gap", "streams"):
        work = workloads.make_workload(name, 512, 4)
        classes = {len(request.ids).bit_length() for request in work.requests}
        warm_up = work.warm_up()
        of_sizes, fillers = warm_up[: len(classes)], warm_up[len(classes) :]
        assert {len(request.ids).bit_length() for request in of_sizes} == classes, name
        longest = max(len(request.ids) for request in work.requests)
        assert max(len(request.ids) for request in warm_up) == longest
        # As many at once as in the largest wave, which the short ones wait for.
        assert len(warm_up) == max(work.max_batch, len(classes))
        assert all(len(request.ids) <= 8 for request in fillers)
        assert {request.num_output for request in fillers} <= {8}
        assert len({request.ids[0] for request in warm_up}) == len(warm_up)
        for request in warm_up:
            assert len(request.ids) + request.num_output <= work.max_length
            # A prefix cache can have nothing for the workload.
            assert all(len(os.path.commonprefix([request.ids, other.ids])) <= 2
                       for other in work.requests)  # fmt: skip

    jobs: list[dict[str, Any]] = []

    def note(label: str, job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        return served(label, job)

    bench("--workloads", "b8", "--rounds", 1, answer=note).run()
    work = workloads.make_workload("b8", 512, 16)
    assert [job["warm_up"] for job in jobs] == [[vars(each) for each in work.warm_up()]] * 2

    served_waves: list[list[dict[str, Any]]] = []

    class Server(worker.InProcess):
        def serve(self, requests: list[dict[str, Any]]) -> list[Any]:
            served_waves.append(requests)
            timelines = [worker.Timeline() for _ in requests]
            for timeline, request in zip(timelines, requests, strict=True):
                timeline.add(request["num_output"])
            return timelines

    measured = worker.measure(Server(), jobs[0])
    assert served_waves == [jobs[0]["warm_up"], *jobs[0]["waves"]]
    assert len(measured["requests"]) == 8  # Warm-up requests do not count.


def test_kinds_of_machines(load) -> None:
    machine = load("machine")
    amd = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "1", "model name": "AMD EPYC"}
    assert machine._processor(amd) == "zen3"
    assert machine._processor({**amd, "cpu family": "26", "model": "2"}) == "zen5"
    assert machine._processor({**amd, "cpu family": "99"}) == "amd_epyc"
    assert machine._processor({"model name": "Some CPU (R) @ 2 GHz"}) == "some_cpu_r_2_ghz"
    assert machine.kind("avx2").endswith("-avx2")


def test_times_become_throughput_and_percentiles(load) -> None:
    metrics, workloads = load("metrics"), load("workloads")
    two = [workloads.Request([1] * 10, 3), workloads.Request([1] * 20, 2)]
    measured = {
        "load_s": 1.0, "rss_mb": 2.0, "core_share": 0.5, "others_share": 0.0,
        "requests": [
            {"begin": 0.0, "times": [1.0, 1.5, 2.5], "counts": [1, 1, 1]},
            {"begin": 0.5, "times": [2.5], "counts": [2]},
        ],
    }  # fmt: skip
    values = metrics.from_times(workloads.Workload("b8", [two]), measured)
    assert values["output_tok_s"] == pytest.approx(5 / 2.5)
    assert values["ttft_ms"] == pytest.approx(1500)
    assert values["gap_ms"] == pytest.approx(500)  # Gaps 500, 1,000, 0 (two came together).
    assert "decode_tok_s" not in values
    alone = {**measured, "requests": measured["requests"][:1]}
    values = metrics.from_times(workloads.Workload("single", [two[:1]]), alone)
    assert values["decode_tok_s"] == pytest.approx(2 / 1.5)
    assert values["prefill_tok_s"] == pytest.approx(10)


def test_checkpoints_are_seeded_and_written_once(tmp_path: Path, load) -> None:
    checkpoints = load("checkpoints")
    directory = checkpoints.ensure_checkpoint("tiny", tmp_path / "a")
    other = checkpoints.ensure_checkpoint("tiny", tmp_path / "b")
    weights = directory / "model.safetensors"
    for name in ("model.safetensors", "tokenizer.json"):
        assert (directory / name).read_bytes() == (other / name).read_bytes()
    stamp = weights.stat().st_mtime_ns
    assert checkpoints.ensure_checkpoint("tiny", tmp_path / "a") == directory
    assert weights.stat().st_mtime_ns == stamp
    (directory / "config.json").unlink()  # As after an interrupted write.
    checkpoints.ensure_checkpoint("tiny", tmp_path / "a")
    assert weights.stat().st_mtime_ns != stamp


def test_a_checkpoint_is_valid_safetensors(tmp_path: Path, load) -> None:
    safetensors = pytest.importorskip("safetensors")
    checkpoints = load("checkpoints")
    shape = checkpoints.SHAPES["tiny"]
    path = checkpoints.ensure_checkpoint("tiny", tmp_path) / "model.safetensors"
    with safetensors.safe_open(str(path), "numpy") as file:
        sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert sizes == shape.tensors()


def test_sizes_of_the_real_shapes(load) -> None:
    shapes = load("checkpoints").SHAPES
    counts = {
        name: sum(int(np.prod(size)) for size in shapes[name].tensors().values())
        for name in ("0.5B", "1B", "A2.7B")
    }
    # The last shape has four layers, and a vocabulary of 32000.
    experts = 4 * 570560512 + 32000 * 2048 + 2048
    assert counts == {"0.5B": 494032768, "1B": 1235814400, "A2.7B": experts}
    assert round(shapes["0.5B"].bytes_per_decoded_token() / 1e9, 2) == 0.99


def test_the_tokenizer_knows_every_id_and_every_byte(tmp_path: Path, load) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    checkpoints = load("checkpoints")
    path = checkpoints.ensure_checkpoint("tiny", tmp_path) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == checkpoints.SHAPES["tiny"].vocab_size
    text = "Grün zz\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_workloads_are_the_same_every_time(load) -> None:
    workloads = load("workloads")
    for name in (*workloads.WORKLOADS, "gap", "streams"):
        if name == "azure":
            continue
        work = workloads.make_workload(name, 512)
        assert work == workloads.make_workload(name, 512)
        assert all(3 <= token < 512 for request in work.requests for token in request.ids)
    assert workloads.make_workload("b32", 512).num_output == 32 * 128
    assert workloads.make_workload("p1024", 512).num_prompt == 1024
    mixed = workloads.make_workload("mixed", 512)
    assert (len(mixed.requests), mixed.num_prompt, mixed.num_output) == (32, 6083, 3373)
    late = workloads.make_workload("shared_late", 512)
    assert [len(wave) for wave in late.waves] == [1, 15]
    prompts = [request.ids for request in late.requests]
    assert os.path.commonprefix(prompts) == prompts[0][:512]
    assert workloads.make_workload("long", 512, 16).num_prompt == 512
    with pytest.raises(ValueError, match="workload is 'x'"):
        workloads.make_workload("x", 512)


def test_lengths_of_the_azure_trace(load) -> None:
    shared_data()
    work = load("workloads").make_workload("azure", 512)
    assert len(work.requests) == 64
    # The first line of the trace: 374 and 44 tokens.
    assert (len(work.requests[0].ids), work.requests[0].num_output) == (94, 11)


def test_fractions_come_from_the_limits(load) -> None:
    metrics, workloads = load("metrics"), load("workloads")
    shape, bf16 = load("checkpoints").SHAPES["0.5B"], load("peers.base").BF16
    limits = {"read_gb_s": 2 * shape.bytes_per_decoded_token() / 1e8, "bf16_gflop_s": 100.0}
    single = workloads.make_workload("single", 512)
    values = {"decode_tok_s": 10.0, "output_tok_s": 9.0}
    found = metrics.fractions(shape, bf16, single, values, limits)
    assert found["decode_tok_s_limit"] == pytest.approx(0.5)
    p1024 = workloads.make_workload("p1024", 512)
    rate = 50e9 / shape.prefill_flops(1024)
    values = {"prefill_tok_s": 1024 * rate, "output_tok_s": rate}
    found = metrics.fractions(shape, bf16, p1024, values, limits)
    assert found["prefill_tok_s_limit"] == pytest.approx(0.5)
    assert found["output_tok_s_limit"] == pytest.approx(0.5)
    assert metrics.fractions(shape, bf16, single, {"output_tok_s": 1.0}, {}) == {}
    # Weights of half the size can be read twice as often.
    int8 = load("peers.base").Precision(8, 8, "bf16_gflop_s")
    values = {"decode_tok_s": 10.0, "output_tok_s": 9.0}
    found = metrics.fractions(shape, int8, single, values, limits)
    assert found["decode_tok_s_limit"] == pytest.approx(0.25)


@pytest.mark.parametrize(("dots", "rate"), [(None, 350.0), (170.0, 350.0), (400.0, 400.0)])
def test_multiply_adds_are_the_limit_where_they_are_faster_than_a_dot_product(
    load, dots, rate
) -> None:
    slot = {"read_gb_s": 30.0, "fma_gflop_s": 350.0, "bf16_gflop_s": dots, "int8_gop_s": 1300.0}
    found = load("machine").combine([slot], max)
    assert (found["bf16_gflop_s"], found["int8_gop_s"]) == (rate, 1300.0)
    assert load("machine").combine([], max)["bf16_gflop_s"] is None


def test_a_common_beginning_is_work_once(load) -> None:
    metrics, workloads = load("metrics"), load("workloads")
    shape = load("checkpoints").SHAPES["0.5B"]
    one = workloads.Request([5] * 100, 1)
    once = metrics.work_flops(shape, workloads.Workload("shared", [[one]]))
    other = workloads.Request([5] * 50 + [6] * 50, 1)
    both = metrics.work_flops(shape, workloads.Workload("shared", [[one], [other]]))
    assert once == pytest.approx(shape.prefill_flops(100))
    assert 1.5 < both / once < 1.6 + 2 * shape.head_weights / once


@pytest.mark.torch
def test_conversion_is_watched(tmp_path: Path, load) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    # A tiny model is not a Llama, and its rows are shorter than blocks of Q4_K.
    others = ("Meta .pth", "GGUF Q4_K")
    formats = [name for name in load("conversion").FORMATS if name not in others]
    work = tmp_path / "work"
    work.mkdir()
    memory = tmp_path / "memory"
    memory.mkdir()
    command = [sys.executable, str(BENCHMARKS / "conversion.py"), "--shape", "tiny", "--work-dir",
               str(work), "--memory-dir", str(memory), *keeping(tmp_path),
               "--formats", *formats]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("|")][2:]
    rows = [line.strip("|").replace(",", "").split("|") for line in lines]
    assert [row[0].strip() for row in rows] == formats
    assert all(0 < int(row[3]) < int(row[4]) for row in rows)  # megabytes
    of = {"format": "safetensors", "files": "in memory"}
    check_kept(tmp_path, "conversion", of, "resident_mb", "convert_s")
    assert [path.name for path in work.iterdir()] == ["tiny"]  # Its kernel table is recorded.
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "needs"),
    [("safetensors", "numpy"), ("GPTQ int4", "numpy"), ("AWQ", "numpy"), ("FP8", "numpy"),
     ("compressed-tensors int8", "numpy"), (".bin", "torch"), ("Meta .pth", "torch"),
     ("GGUF Q8_0", "gguf"), ("GGUF Q4_0", "gguf"), ("GGUF Q4_K", "gguf")],
)  # fmt: skip
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(
    tmp_path: Path, load, name: str, needs: str
) -> None:
    pytest.importorskip(needs)
    conversion = load("conversion")
    tiny = load("checkpoints").SHAPES["tiny"]
    # Rows of whole blocks of every kind.
    shape = dataclasses.replace(tiny, hidden_size=256, inner_size=512, q_heads=16, kv_heads=16)
    form = conversion.FORMATS[name]
    form.write(tmp_path, shape)
    headers = conversion.size_of(tmp_path) - form.weight_bytes(shape)
    assert 0 < headers < 20_000


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load):
    """Runs conversion.py with a conversion that only writes a file: `convert(free, watch)`. `free`:
    the memory of the machine in bytes. Returns the record; `convert.events` is what was done."""
    conversion = load("conversion")
    events: list[Any] = []
    plain = conversion.FORMATS["safetensors"]

    class Quiet:
        def __init__(self, in_process: bool) -> None:
            events.append(f"measure, {in_process}")

        def share(self) -> float:
            return 0.0

    def write(directory: Path, shape: Any) -> None:
        events.append("write")
        plain.write(directory, shape)

    def converted(command: list[str]) -> tuple[float, int, int]:
        source, target = map(Path, command[3:5])
        assert (source / "model.safetensors").is_file() and not target.exists()
        target.mkdir()
        (target / "m.asparam").write_bytes(bytes(1000))
        events.append(target.parent.parent.name)
        return 1.0, 2_000_000, 3_000_000

    def run_main(free: int = 1 << 40, watch: Any = None) -> dict[str, Any]:
        monkeypatch.setattr(load("machine"), "available_bytes", lambda: free)
        monkeypatch.setattr(conversion, "watch", watch or converted)
        conversion.main()
        return load("record").read(tmp_path / "kept.json")

    monkeypatch.setattr(load("machine"), "Others", Quiet)
    monkeypatch.setattr(conversion, "about_engine", lambda work: {"version": "1", "isa": "avx2"})
    monkeypatch.setitem(conversion.FORMATS, "safetensors", dataclasses.replace(plain, write=write))
    for name in ("memory", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "argv", [
        "conversion.py", "--shape", "tiny", "--formats", "safetensors",
        "--memory-dir", str(tmp_path / "memory"), "--work-dir", str(tmp_path / "work"),
        "--json", str(tmp_path / "kept.json"),
    ])  # fmt: skip
    handler = signal.getsignal(signal.SIGTERM)
    run_main.events = events  # type: ignore[attr-defined]
    yield run_main
    signal.signal(signal.SIGTERM, handler)


def left_in(tmp_path: Path) -> list[Path]:
    return [path for name in ("memory", "work") for path in (tmp_path / name).iterdir()]


def test_conversions_are_measured_in_memory(tmp_path: Path, convert, capsys) -> None:
    """Writing the checkpoint is no part of the measurement: it would count as others' work."""
    record = convert()
    assert convert.events == ["write", "measure, True", "memory"]
    (measurement,) = record["measurements"]
    assert measurement["of"] == {"format": "safetensors", "files": "in memory"}
    assert measurement["values"]["anonymous_mb"] == 2.0 and left_in(tmp_path) == []
    assert str(tmp_path) not in json.dumps(record) and "memory" not in record["command"]
    assert "| safetensors | " in capsys.readouterr().out


def test_conversions_without_room_in_memory_are_on_disk(tmp_path: Path, convert, capsys) -> None:
    for free, has_folder in ((1 << 30, True), (1 << 40, False)):
        if not has_folder:
            (tmp_path / "memory").rmdir()
        (measurement,) = convert(free)["measurements"]
        assert measurement["of"]["files"] == "on disk" and convert.events[-1] == "work"
        assert "| safetensors, on disk | " in capsys.readouterr().out
        assert list((tmp_path / "work").iterdir()) == []


def test_room_is_for_the_files_and_for_the_rest(tmp_path: Path, monkeypatch, load) -> None:
    conversion, machine = load("conversion"), load("machine")
    shape, form = load("checkpoints").SHAPES["1B"], conversion.FORMATS["GGUF Q4_0"]
    checkpoint, model = form.weight_bytes(shape), 2 * 1235814400
    assert checkpoint == pytest.approx(695e6, rel=0.01)
    files = checkpoint + model + (1 << 26)
    for free, available, is_enough in (
        (files, files + checkpoint + (1 << 30), True),
        (files - 1, 1 << 40, False),
        (files, files + checkpoint + (1 << 30) - 1, False),
    ):
        usage = shutil._ntuple_diskusage(free, 0, free)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        monkeypatch.setattr(machine, "available_bytes", lambda available=available: available)
        assert conversion.has_room(tmp_path, form, shape) == is_enough
    assert not conversion.has_room(tmp_path / "absent", form, shape)


@pytest.mark.parametrize("how", ["failure", "SIGTERM"])
def test_a_conversion_that_ends_early_leaves_nothing(tmp_path: Path, convert, how: str) -> None:
    def end(command: list[str]) -> tuple[float, int, int]:
        assert len(left_in(tmp_path)) == 1
        if how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it went on")
        sys.exit("the conversion failed")

    with pytest.raises(SystemExit):
        convert(watch=end)
    assert left_in(tmp_path) == []


def test_what_a_killed_run_left_in_memory_is_removed(tmp_path: Path, load, convert) -> None:
    old, other = tmp_path / "memory" / "allspark-conversion-old", tmp_path / "memory" / "of-others"
    for folder in (old, other):
        (folder / "in").mkdir(parents=True)
    with load("conversion").new_folder(tmp_path / "memory") as of_a_run_that_goes_on:
        convert()
        assert set(left_in(tmp_path)) == {other, of_a_run_that_goes_on}
    assert left_in(tmp_path) == [other]


def test_a_watched_process_ends_with_its_watcher(tmp_path: Path, monkeypatch, load) -> None:
    conversion, pid = load("conversion"), tmp_path / "pid"

    def interrupted(seconds: float) -> None:
        if pid.is_file() and pid.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(conversion.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        conversion.watch(["sh", "-c", f"echo $$ > {pid}; exec sleep 60"])
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_files_in_memory_are_not_anonymous_memory(tmp_path: Path, load) -> None:
    """Mapped pages of a tmpfs count as those of any file do: resident, and not anonymous."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 1 << 28:
        pytest.skip("there is no tmpfs with room")
    conversion = load("conversion")
    reads = (
        "import mmap, sys, time\nwith open(sys.argv[1], 'rb') as file:\n"
        " pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "sum(pages[::4096])\ntime.sleep(0.2)\nprint(1.0)"
    )
    with conversion.new_folder(memory) as folder:
        (folder / "file").write_bytes(bytes(1 << 26))
        command = [sys.executable, "-c", reads, str(folder / "file")]
        _, anonymous, resident = conversion.watch(command)
    assert anonymous < 1 << 25 and resident > 1 << 26


COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_limits_compile_and_print_rates(tmp_path: Path) -> None:
    program = tmp_path / "limits"
    flags = ["-std=c++17", "-O3", "-march=native", "-pthread", "-Wall", "-Wextra", "-Werror"]
    command = [str(COMPILER), *flags, str(BENCHMARKS / "limits.cc"), "-o", str(program)]
    subprocess.run(command, check=True)
    output = subprocess.run([program, "2", "4"], capture_output=True, text=True, check=True).stdout
    rows = json.loads(output)["threads"]
    assert [row["threads"] for row in rows] == [1, 2]
    assert all(row["read_gb_s"] > 0 and row["fma_gflop_s"] > 0 for row in rows)
    assert subprocess.run([program, "0"], capture_output=True).returncode == 2


@pytest.mark.parametrize("guesses", ["--lookup=8", "--draft-layers=1"])
def test_speculative_decoding_gives_the_same_tokens(tmp_path: Path, guesses: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "speculative.py"), "--shape", "tiny", "--threads",
               "1", "--output", "24", "--prompts", "2", "--batches", "1,4", "--rounds", "1",
               "--draft-precision", "bf16", "--work-dir", str(tmp_path), guesses,
               *keeping(tmp_path)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ") for line in result.stdout.splitlines()[2:] if line]
    check_kept(tmp_path, "speculative", {"set": "copy", "batch": 4}, "plain_tok_s", "fast_tok_s")
    assert [(row[0], row[1]) for row in rows] == [
        (f"| {name}", batch) for name in ("greedy", "copy", "noise") for batch in ("1", "4")
    ]


def test_a_batch_takes_as_long_as_its_last_stream(load) -> None:
    module = load("speculative")

    def queue(first: int, last: int) -> Any:
        info = {"first_token_time": first, "last_token_time": last, "generated_token_length": 11,
                "draft_token_length": 4, "accepted_draft_token_length": 2}  # fmt: skip
        output = argparse.Namespace(ids_from_generate=[7] * 11)
        return argparse.Namespace(RequestStatInfo=lambda: info, Get=lambda: output)

    bench = object.__new__(module.Bench)
    bench.options = argparse.Namespace(output=11)
    bench.run = lambda prompts, config: [queue(1000, 2000), queue(1500, 3000)]
    decoded = bench.measure([[5], [6]], 2, {})
    assert decoded.tok_s == 20 / 2.0 and (decoded.drafted, decoded.accepted) == (8, 4)


def test_what_a_batch_has_kept_is_part_of_its_memory(monkeypatch: pytest.MonkeyPatch, load) -> None:
    """In every round, not only in the one that took it."""
    module = load("batch")
    bench = object.__new__(module.Bench)
    bench.options = argparse.Namespace(output=1)
    engine = argparse.Namespace(clear_prefix_cache=lambda name: None)
    bench.pipe = argparse.Namespace(model=argparse.Namespace(engine=engine, name="demo"))
    bench.questions, kept = ["?"], []

    def batch(kind: str, questions: list[str]) -> int:
        bench.begin()
        if not kept:
            kept.append(b"x" * (1 << 26))
        return 1

    monkeypatch.setattr(bench, "batch", batch)
    bench.alone = module.resident("VmRSS")
    for _ in range(2):
        above_mb = bench.measure("own lines", 1)["above_engine_mb"]
        assert above_mb == pytest.approx((1 << 26) / 1e6, rel=0.2)


# --- versions.py


@pytest.mark.parametrize(
    ("count", "ranks"), [(5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))]
)
def test_intervals_of_a_median_are_exact(load, count: int, ranks: tuple[int, int] | None) -> None:
    """Ranks as in tables of the sign test."""
    values = [float(each) for each in range(count, 0, -1)]
    assert load("versions").median_interval(values) == ranks
    assert ("[" in load("versions").shown(values)) == (ranks is not None)


def test_a_start_of_two_versions_has_one_value(load) -> None:
    seconds = {"before": [9.0, 2.0, 3.0, 8.0], "after": [1.0, 1.0, 1.0, 1.0]}  # by turn

    def worker(name: str) -> Any:
        return argparse.Namespace(seconds=lambda workload, turn: seconds[name][turn])

    compare = load("versions").compare
    assert compare(worker("before"), worker("after"), 3, ["b32"]) == {"b32": 3.0}


# --- promises.py


def test_the_promises_are_those_that_are_measured(load):
    document = (BENCHMARKS.parent / "docs" / "promises.md").read_text()
    rows = re.findall(r"^\|.*\|$", document, re.M)[2:]
    assert "\n".join(rows) == load("promises").table()


@pytest.mark.parametrize(("value", "verdict"), [(1.0, "PASS"), (1.001, "FAIL")])
def test_a_promise_that_is_broken_fails(load, monkeypatch, tmp_path, capsys, value, verdict):
    promises = load("promises")
    measured = [promises.Measured(0.5, 1.0), promises.Measured(value, 1.0, "s")]
    row = promises.Promise("this", "that", lambda work: measured, ("size", "time"))
    monkeypatch.setattr(promises, "PROMISES", (row,))
    arguments = ["promises.py", "--shape", "tiny", "--work-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert promises.main() == (verdict == "FAIL")
    assert f"{verdict}  this: time: {value:.3f} of at most 1.000 s" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
