"""The benchmark scripts run, and say what they claim to; no timing is asserted."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.checkpoints import shared_data

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def import_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return import_module


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )


def small_run(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    options = ("--divisor", 16, "--rounds", 1, "--no-limits", "--shapes", "tiny", "--threads", 1,
               "--engines", "allspark/bf16", "--work-dir", tmp_path / "work",
               "--output-dir", tmp_path / "results", "--name", "t")  # fmt: skip
    return run(*options, *arguments)


def report_of(tmp_path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "results" / "t.json").read_text())
    return result


def test_a_tiny_run_measures_everything(tmp_path: Path) -> None:
    tasks = "convert,start,single,p1024,b32,mixed,shared_late,gap,streams"
    result = small_run(tmp_path, "--workloads", tasks)
    assert result.returncode == 0, result.stderr
    report = report_of(tmp_path)
    assert report["failures"] == [] and report["skipped"] == []
    assert report["ours"] == ["allspark bf16"]
    shapes = report["shapes"]
    tiny, streams = shapes["tiny"]["allspark bf16"], shapes["260K"]["allspark bf16"]
    for key in ("convert.convert_s", "start.start_s", "single.ttft_ms", "p1024.prefill_tok_s",
                "b32.output_tok_s", "mixed.ttft_p99_ms", "shared_late.ttft_p99_ms", "mixed.rss_mb",
                "gap.gap_prompt_s"):  # fmt: skip
        assert tiny[key]["min"] <= tiny[key]["median"] <= tiny[key]["max"]
        assert tiny[key]["median"] > 0, key
    assert streams["streams.streams_tok_s"]["median"] > 0
    assert re.fullmatch("reference|amx|(avx|neon)[a-z0-9_]*", report["machine"]["isa"])
    table = (tmp_path / "results" / "t.md").read_text()
    assert "| b32: output, tokens/s |" in table and "16 times shorter" in table
    assert "not measured" in table  # The limits were left out.


def test_guided_decoding_is_compared(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "guided.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--batch", "4", "--output", "8", "--rounds", "1"]
    result = subprocess.run([*script, *sizes], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\| a schema each \| [\d.]+ \| [\d.]+ \|", result.stdout)


def test_the_prefix_cache_is_compared(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "prefix_cache.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--prompt", "200", "--shares", "0,0.96", "--rounds", "1"]
    result = subprocess.run([*script, *sizes], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\| 96.0% \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", result.stdout)


def test_adapters_are_compared_with_the_base_model(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "lora.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", "tiny", "--requests", "4", "--adapters", "2", "--output", "4"]
    result = subprocess.run([*script, *sizes, "--rounds", "1"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("all linear", "q and v"):
        assert re.search(rf"\| {name} \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", result.stdout)


@pytest.mark.parametrize("shape", ["tiny-moe", "tiny-latents"])
def test_what_experts_read_is_measured(tmp_path: Path, shape: str) -> None:
    script = [sys.executable, str(BENCHMARKS / "moe.py"), "--work-dir", str(tmp_path)]
    sizes = ["--shape", shape, "--prompt", "8", "--output", "8", "--rounds", "1"]
    result = subprocess.run([*script, *sizes], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for streams in (1, 4, 16):
        assert re.search(rf"\| {streams} \| [\d.]+ \| [\d.]+ \| [\d.]+ \| ", result.stdout)


def test_every_precision_of_ours_is_one_the_loaders_write(tmp_path: Path, load) -> None:
    result = small_run(tmp_path, "--workloads", "single", "--engines", "allspark")
    assert result.returncode == 0, result.stderr
    report = report_of(tmp_path)
    assert report["skipped"] == []
    labels = [f"allspark {name}" for name in load("ours").PRECISIONS]
    assert list(report["shapes"]["tiny"]) == labels


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
    report = report_of(tmp_path)
    assert len(report["failures"]) == 1 and "set ALLSPARK_SHARED_DATA" in report["failures"][0]
    assert "Failed:" in (tmp_path / "results" / "t.md").read_text()
    assert report["shapes"]["tiny"]["allspark bf16"]["single.ttft_ms"]["median"] > 0


# A peer that needs no installation and answers every token at once, or says why it does not.
STUB = """
import os
from pathlib import Path

from peers.base import BF16, Engine, EngineError
from peers.worker import InProcess, Timeline, main


class Stub(Engine):
    name = "stub"
    precisions = {"good": BF16, "unprepared": BF16, "broken": BF16}
    packages = ()

    @property
    def python(self):
        import sys
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
    report = report_of(tmp_path)
    assert set(report["shapes"]["tiny"]) == {"allspark bf16", "stub good", "stub broken"}
    assert report["skipped"] == ["tiny, stub unprepared: this format is not for it"]
    assert len(report["failures"]) == 2
    assert "single, stub broken" in report["failures"][0]
    assert "a request gave 7 of 8 tokens" in report["failures"][0]
    table = (tmp_path / "results" / "t.md").read_text()
    assert "(stub good) |" in table and "| stub good |" in table and "Left out:" in table


def test_a_peer_that_cannot_be_installed_is_left_out(
    tmp_path: Path, with_stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_INSTALL", "no package for this Python")
    result = small_run(tmp_path, "--workloads", "single", "--engines", "stub,allspark/bf16")
    assert result.returncode == 0, result.stderr
    assert "LEFT OUT: stub: no package for this Python" in result.stderr
    report = report_of(tmp_path)
    assert report["skipped"] == ["stub: no package for this Python"]
    assert set(report["shapes"]["tiny"]) == {"allspark bf16"}


def test_a_machine_that_others_use_is_noticed(load) -> None:
    machine = load("machine")
    others = machine.Others()
    burn = "import time; end = time.time() + 0.5\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:  # This process is one of the others, its child is not.
        pass
    assert others.share() > 0.5 / (os.cpu_count() or 1)


def test_every_peer_is_registered_and_complete(load) -> None:
    registry, base = load("peers.registry"), load("peers.base")
    files = {path.stem for path in (BENCHMARKS / "peers").glob("*.py")}
    helpers = {"__init__", "base", "registry", "worker", "gguf_writer"}
    assert {peer.__module__.rpartition(".")[2] for peer in registry.PEERS} == files - helpers
    assert len({peer.name for peer in registry.PEERS}) == len(registry.PEERS)
    for peer in registry.PEERS:
        assert peer.packages and peer.precisions and not peer.is_ours
        assert peer.prepare is not base.Engine.prepare
        for precision in peer.precisions.values():
            assert 0 < precision.body_bits <= 16 and 0 < precision.head_bits <= 16
            assert precision.rate in load("machine").LIMITS


def test_a_command_that_fails_says_why(load) -> None:
    base = load("peers.base")
    with pytest.raises(base.EngineError, match="ended with 3: the reason"):
        base.run_command([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"])
    with pytest.raises(base.EngineError, match="took more than 0.1 s"):
        base.run_command([sys.executable, "-c", "import time; time.sleep(9)"], timeout_s=0.1)
    # A child of it ends too: the sleeper would hold the pipe.
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


# Answers as llama-server does, or ends as it has been seen to: FAKE says when and how.
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
    """At once, and not as one that was waited for in vain. --no-repack does not help these."""
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


RECORDED = {
    "name": "recorded", "date": "2025-01-01",
    "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "version": "1", "isa": "avx2"},
    "settings": {"rounds": 2, "threads": 2, "chunk": 0, "divisor": 1, "note": "a note",
                 "workloads": ["single", "b8"]},
    "limits": [{"read_gb_s": 40.0, "fma_gflop_s": 400.0, "bf16_gflop_s": None, "int8_gop_s": 900.0,
                "load_average": 1.0}],
    "ours": ["allspark bf16"],
    "skipped": [], "failures": [],
}  # fmt: skip


def recorded(load) -> dict[str, Any]:
    summarise = load("report").summarise
    samples = {
        "allspark bf16": {"single.decode_tok_s": [40.0, 44.0], "single.ttft_ms": [100.0],
                          "single.decode_tok_s_limit": [0.8], "single.output_tok_s": [1.0],
                          "single.core_share": [0.95]},
        "fast int4": {"single.decode_tok_s": [84.0], "single.ttft_ms": [200.0],
                      "single.output_tok_s": [1.0], "single.core_share": [0.9]},
        "slow bf16": {"single.decode_tok_s": [21.0], "single.ttft_ms": [150.0]},
    }  # fmt: skip
    engines = {label: summarise(metrics) for label, metrics in samples.items()}
    return {**RECORDED, "shapes": {"tiny": engines}}


def test_the_table_shows_fractions_and_ratios_to_the_best_peer(load) -> None:
    table = load("report").markdown(recorded(load))
    cells = "42.0 [40.0..44.0] (80 %, ×0.50) | 84.0 (fast int4)"
    assert f"| single: decode, tokens/s | {cells} |" in table
    # Of a time, less is better: ours takes 100 ms where the best peer takes 150.
    assert "| single: TTFT p50, ms | 100 (×1.50) | 150 (slow bf16) |" in table
    assert "b8" not in table  # Nothing was measured of it.
    assert "| – | – | 95 | – |" in table and "Note: a note" in table  # Its share of the cores.


def test_a_recorded_run_is_rendered_again(tmp_path: Path, load) -> None:
    path = tmp_path / "again.json"
    path.write_text(json.dumps(recorded(load)))
    result = run("--render", path)
    assert result.returncode == 0, result.stderr
    assert path.with_suffix(".md").read_text() == result.stdout.removesuffix("\n")
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


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
    assert values["gap_ms"] == pytest.approx(500)  # Of 500, 1,000 and 0 (two that came together).
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
    (directory / "config.json").unlink()  # As after an interrupted writing.
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
    # Of the last, four layers, and a vocabulary of 32000.
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
    # A tiny model is no Llama, and its rows are shorter than blocks of Q4_K.
    others = ("Meta .pth", "GGUF Q4_K")
    formats = [name for name in load("conversion").FORMATS if name not in others]
    command = [sys.executable, str(BENCHMARKS / "conversion.py"), "--shape", "tiny", "--work-dir",
               str(tmp_path), "--formats", *formats]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line.strip("|").split("|") for line in result.stdout.splitlines()[4:]]
    assert [row[0].strip() for row in rows] == formats
    assert all(0 < int(row[3]) < int(row[4]) for row in rows)  # megabytes
    assert not list(tmp_path.iterdir())


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
               "--draft-precision", "bf16", "--work-dir", str(tmp_path), guesses]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ") for line in result.stdout.splitlines()[3:]]
    assert [(row[0], row[1]) for row in rows] == [
        (f"| {name}", batch) for name in ("greedy", "copy", "noise") for batch in ("1", "4")
    ]
