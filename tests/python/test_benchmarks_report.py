"""Tables, bars and documents of benchmarks, made of records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARKS, RECORDED, a_record, of_tiny, run_compare


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
    assert "commit 01234567" in blocks["engines"]
    page = os.path.relpath(BENCHMARKS / "README.md", tmp_path / "docs")
    for name in ("headline", "expected"):  # one table each
        assert blocks[name].count("| machine | shape | figure | ") == 1
        assert f"[all rows]({page}#figures)." in blocks[name]
    assert "[Report](../results/zen9-avx2/engines.md)" in blocks["engines"]
    # Of the round that both have.
    missed = "single.decode_tok_s of best: 0.476 of the best peer (1 wanted)"
    assert f"2 of these are met. Open: {missed}." in blocks["engines"]


def test_machines_share_a_table(tmp_path: Path, load) -> None:
    record, figures = load("record"), load("figures")
    for kind, label, speed in (("zen8-avx2", "A8W8", 90.0), ("zen9-avx2", "bf16", 50.0)):
        samples = {f"allspark {label}": {"b32.output_tok_s": [speed]},
                   "fast int4": {"b32.output_tok_s": [100.0]}}  # fmt: skip
        one = a_record(samples, ours=f"allspark {label}")
        one["machine"] = {**one["machine"], "kind": kind}
        record.write(tmp_path / "results" / kind / "engines.json", one)
    results = figures.Results(tmp_path / "results")
    headline, expected = (
        figures.BLOCKS[name](results, tmp_path) for name in ("headline", "expected")
    )
    row = f"2 cores | {load('checkpoints').SHAPES['tiny'].title} | b32: output, tokens/s"
    assert headline[0].endswith("| allspark bf16 | allspark A8W8 | best peer |")
    assert f"| zen8-avx2, {row} | – | 90.0 (×0.90) | 100.0 (fast int4) |" in headline
    assert f"| zen9-avx2, {row} | 50.0 (×0.50) | – | 100.0 (fast int4) |" in headline
    assert f"| zen9-avx2, {row} | – | 50.0 |" in expected


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
    assert "| machine | shape | figure | bf16 | bf16, over HTTP |" in expected
    text = "\n".join(figures.BLOCKS["engines"](results, tmp_path / "docs"))
    assert "Beside: fast int4, late-serve bf16 (b32 over 3 × our time)." in text


def test_a_recorded_run_is_rendered_again(tmp_path: Path, load) -> None:
    path = tmp_path / "again.json"
    path.write_text(json.dumps(a_record(RECORDED)))
    result = run_compare("--render", path)
    assert result.returncode == 0, result.stderr
    assert path.with_suffix(".md").read_text() == result.stdout.removesuffix("\n")
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


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
