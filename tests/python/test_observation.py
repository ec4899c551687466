"""The trace and the log fit their readers: valid JSON, and properly nested spans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
from allspark import AsStatus
from allspark.errors import AllSparkError
from engine_fixture import GREEDY, install_engine, read_all, start_engine

OK = AsStatus.ALLSPARK_SUCCESS


def check_nesting(spans):
    """Checks [(begin, end)], sorted by begin: any two are disjoint, or one contains the other."""
    open_ends = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        assert begin <= end
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_a_profile_of_operations(checkpoint):
    engine, _ = start_engine(checkpoint, op_profiling=True)
    read_all(engine.start_request_ids("m", None, [1, 2, 3], GREEDY)[2])
    engine.stop_model("m")
    steps = engine.get_as_engine_stat("m").num_steps
    title, head, *lines = engine.get_op_profiling_info("m").splitlines()
    assert title.startswith("model 'm', ") and f": {steps} forward passes, " in title
    assert head.split() == ["operation", "calls", "ms", "share", "GB/s", "Gop/s"]
    rows = {line[:18].strip(): line[18:].replace("%", "").split() for line in lines}
    assert int(rows["lm_head"][0]) == int(rows["sampling"][0]) == steps
    assert "-" not in rows["gate_up"] and rows["norm"][3:] == ["-", "-"]
    assert abs(sum(float(row[2]) for row in rows.values()) - 100) < 0.1 * len(rows)
    milliseconds = [float(row[1]) for row in rows.values()]
    assert milliseconds == sorted(milliseconds, reverse=True)


def test_a_profile_that_is_not_kept(checkpoint):
    engine, _ = install_engine(checkpoint)
    with pytest.raises(AllSparkError, match="op_profiling of model 'm' is off"):
        engine.get_op_profiling_info("m")
    with pytest.raises(KeyError):
        engine.get_op_profiling_info("x")


def test_the_trace_loads_and_nests(checkpoint, tmp_path):
    path = tmp_path / "trace.json"
    engine, _ = start_engine(checkpoint, trace_path=str(path), engine_max_batch=2)
    configs = [GREEDY, {"prompt_only": True}, {**GREEDY, "num_beams": 2}, GREEDY, GREEDY]
    queues = [engine.start_request_ids("m", None, [1, 2, 3], config)[2] for config in configs]
    for queue in queues:
        read_all(queue)
    assert engine.write_trace("m", str(tmp_path / "now.json")) == OK
    assert json.loads((tmp_path / "now.json").read_text())["traceEvents"]
    assert engine.write_trace("m", str(tmp_path / "missing" / "x")) != OK
    assert "missing" in engine.last_error()
    engine.stop_model("m")
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    check_nesting([(event["ts"], event["ts"] + event["dur"]) for event in steps])
    whole = [event for event in steps if event["name"] == "step"]
    assert len(whole) == engine.get_as_engine_stat("m").num_steps
    assert sum(event["args"]["prefill_tokens"] for event in whole) >= 3
    for name in ("plan", "forward", "outputs", "masks", "sample", "deliver"):
        assert sum(event["name"] == name for event in steps) == len(whole)

    open_spans = defaultdict(list)  # by request, as a viewer reads them
    seen = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] in "be"), key=lambda event: event["ts"]):
        spans = open_spans[event["id"]]
        if event["ph"] == "b":
            spans.append(event["name"])
            seen[event["id"]].append(event["name"])
        else:
            assert spans.pop() == event["name"], "spans that cross"
    assert not any(open_spans.values())
    assert len(seen) == len(configs)
    requests = [event for event in events if event["ph"] == "b" and event["name"] == "request"]
    assert {event["args"]["reason"] for event in requests} == {"length"}
    plain = seen[queues[0].request_id]
    assert sorted(plain) == ["decode", "prefill", "queue", "request"] and plain[0] == "request"


def test_json_lines_and_every_variable(checkpoint, tmp_path):
    code = """
        import sys
        sys.path[:0] = sys.argv[2:]
        from pathlib import Path
        from engine_fixture import GREEDY, read_all, start_engine
        engine, _ = start_engine(Path(sys.argv[1]))
        _, _, queue = engine.start_request_ids("m", None, [1, 2, 3], GREEDY)
        print(read_all(queue))
        engine.stop_model("m")
    """
    here = Path(__file__).parent
    variables = {
        "HIE_LOG_DIR": str(tmp_path), "HIE_LOG_LEVEL": "-1", "ALLSPARK_LOG_FORMAT": "json",
        "ALLSPARK_TIME_LOG": "1", "ALLSPARK_DUMP_OUTPUT_TOKEN": "1",
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(checkpoint), str(here), str(here.parent)],
        capture_output=True, text=True, timeout=120, env={**os.environ, **variables},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (log,) = tmp_path.glob("allspark.*.log")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_message = defaultdict(list)
    for line in lines:
        assert {"time", "level", "thread", "source", "message"} <= set(line)
        by_message[line["message"]].append(line)
    assert len(by_message["step"]) == 8 and by_message["step"][0]["prefill_tokens"] == 3
    (end,) = by_message["request ended"]
    assert (end["reason"], end["output_tokens"], end["level"]) == ("length", 8, "debug")
    (output,) = by_message["output"]
    assert json.loads(output["token_ids"]) == json.loads(result.stdout)
