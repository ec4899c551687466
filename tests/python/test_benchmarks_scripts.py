"""The benchmark scripts run, and report what they should; no timing is asserted."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.benchmarks import (
    BENCHMARKS,
    Busy,
    check_kept,
    failures_of,
    quick_server,
    report_of,
    run_compare,
    run_script,
    small_run,
    values_of,
)
from support.checkpoints import shared_data


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


def test_guided_decoding_is_compared(tmp_path: Path) -> None:
    printed, _ = run_script(tmp_path, "guided", "--shape", "tiny", "--batch", 4, "--output", 8)
    assert re.search(r"\| a schema each \| [\d.,]+ \| [\d.]+ \|", printed)
    check_kept(tmp_path, "guided", {"kind": "one schema"}, "tok_s")


def test_a_stream_is_measured_beside_hostile_requests(tmp_path: Path) -> None:
    printed, _ = run_script(tmp_path, "hostile", "--shape", "260K", "--output", 400)
    assert re.search(r"\| attacked \| [\d.,]+ \| [\d.,]+ \| [\d.,]+ \| \d+ \|", printed)
    assert re.search(r"p99 gap under attack: x .*, at most x 2: (PASS|FAIL|nothing)", printed)
    check_kept(tmp_path, "hostile", {"kind": "quiet"}, "p50", "p99", "most")


def test_the_prefix_cache_is_compared(tmp_path: Path) -> None:
    sizes = ["--shape", "tiny", "--prompt", 200, "--shares", "0,0.96"]
    printed, _ = run_script(tmp_path, "prefix_cache", *sizes)
    assert re.search(r"\| 96.0% \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", printed)
    check_kept(tmp_path, "prefix_cache", {"found": 0.96}, "with_ms", "without_ms")


def test_prefill_policies_are_compared(tmp_path: Path) -> None:
    printed, _ = run_script(tmp_path, "prefill_policy", "--shape", "tiny", "--divisor", 8)
    assert re.search(r"\| mixed \| smooth( \| [\d.,]+){5} \|", printed)
    of = {"workload": "b32", "policy": "first_token"}
    # Gaps may be 0: where the reader is late, it finds several tokens at once.
    check_kept(tmp_path, "prefill_policy", of, "ttft_p99_ms", "output_tok_s")


def test_quantising_is_timed_and_its_memory_compared(tmp_path: Path, load) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A queue has the tokens of a request. " * 40)
    sizes = ["--shape", "tiny", "--own", "--samples", 4, "--length", 64, "--text", text]
    printed, _ = run_script(tmp_path, "quantizing", *sizes)
    for program in ("allspark awq+gptq", "half of the layers"):
        assert re.search(rf"\| {re.escape(program)} \| \d+ \| \d+ \|", printed)
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
    sizes = ["--shape", "tiny", "--divisor", 16, "--precisions", "A8W8"]
    printed, _ = run_script(tmp_path, "server_speed", *sizes)
    for way in ("in process", "over HTTP"):
        assert re.search(rf"\| A8W8 \| {way}( \| [\d.,]+){{5}} \|", printed)
    bar = r"\| A8W8: tokens/s, of the SDK's \| at least 0.97 \| [\d.]+ \|"
    assert re.search(bar, printed)
    of = {"precision": "A8W8", "way": "over HTTP"}
    check_kept(tmp_path, "server_speed", of, "output_tok_s", "ttft_ms")


@pytest.mark.parametrize("more", [(), ("--plain", "--sdk-lines", 8)], ids=["", "plain"])
def test_a_batch_is_compared_with_the_sdk(tmp_path: Path, demo_model: Path, more: Any) -> None:
    sizes = ["--lines", 20, "--output", 4, "--batch", 4, *more]
    printed, _ = run_script(tmp_path, "batch", "--model", demo_model, *sizes)
    for kind in ("prompt lines", "request lines"):
        assert re.search(rf"\| {kind} \| [\d.,]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", printed)
    check_kept(tmp_path, "batch", {"kind": "own lines"}, "tok_s")


def test_adapters_are_compared_with_the_base_model(tmp_path: Path) -> None:
    sizes = ["--shape", "tiny", "--requests", 4, "--adapters", 2, "--output", 4]
    printed, _ = run_script(tmp_path, "lora", *sizes)
    for name in ("all linear", "q and v"):
        cells = r" \| ".join([r"[\d.]+", r"[\d.]+", r"[\d.,]+", r"[\d.]+"])
        assert re.search(rf"\| {name} \| {cells} \|", printed)
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
def test_what_experts_read_is_measured(tmp_path: Path, shape: str, counts: tuple[int, ...]) -> None:
    sizes = ["--shape", shape, "--prompt", 8, "--output", 8, "--streams", *counts]
    printed, _ = run_script(tmp_path, "moe", *sizes)
    for streams in counts:
        assert re.search(rf"\| {streams} \| [\d.]+ \| [\d.]+ \| [\d.]+ \| ", printed)
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
    result = run_compare(*arguments)
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

    def note(requests: list[dict[str, Any]]) -> None:
        prompts.extend(tuple(request["ids"]) for request in requests)

    server = quick_server(worker, note)
    monkeypatch.setattr(load("machine"), "Others", Busy)
    monkeypatch.setattr(Busy, "shares", [0.5, 0.0], raising=False)
    monkeypatch.setattr(module, "prepared", lambda *_: tmp_path)
    arguments = ["--shape", "tiny", "--divisor", "16", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [script, *arguments, "--work-dir", str(tmp_path)])
    options = module.parse_arguments()
    if script == "server_speed":
        monkeypatch.setattr(module, "_LOADS", {"in process": server})
        bench = module.Bench(options, "bf16")
        measure = functools.partial(bench.measure, "in process")
    else:
        monkeypatch.setattr(module, "Running", server)
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
    bench.options = argparse.Namespace(output=4, adapters=1, sdk_lines=None)
    bench.engine = FailedRequests(load("measure").AsStatus.ALLSPARK_SUCCESS)
    bench.prompts, bench.loader = [[5]], None
    bench.questions, bench.alone = ["?"], 0
    if script == "batch":
        bench.begin, bench.sdk = lambda: None, lambda questions: 3
        bench.clock = bench.cpu = 0.0
    monkeypatch.setattr(load("measure").select, "select", lambda *_: None)
    with pytest.raises(RuntimeError, match="3 of 4 tokens"):
        serve(bench)


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


def test_checkpoints_are_seeded_and_written_once(tmp_path: Path, load) -> None:
    checkpoints = load("checkpoints")
    directory = checkpoints.ensure_checkpoint("tiny", tmp_path / "a")
    other = checkpoints.ensure_checkpoint("tiny", tmp_path / "b")
    weights = directory / "model.safetensors"
    for name in ("model.safetensors", "tokenizer.json"):
        assert (directory / name).read_bytes() == (other / name).read_bytes()
    os.utime(weights, (1, 1))  # the clock of files may stand still between two writes
    assert checkpoints.ensure_checkpoint("tiny", tmp_path / "a") == directory
    assert weights.stat().st_mtime == 1
    (directory / "config.json").unlink()  # As after an interrupted write.
    checkpoints.ensure_checkpoint("tiny", tmp_path / "a")
    assert weights.stat().st_mtime != 1


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
    sizes = ["--shape", "tiny", "--threads", 1, "--output", 24, "--prompts", 2, "--batches", "1,4",
             "--draft-precision", "bf16"]  # fmt: skip
    printed, _ = run_script(tmp_path, "speculative", *sizes, guesses)
    rows = [line.split(" | ") for line in printed.splitlines()[2:] if line]
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
