"""Runs of compare.py in this process, with made-up answers of the engines: what is measured, when,
and how often."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.benchmarks import Busy, quick_server, values_of


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

    server = quick_server(worker, served_waves.append)(jobs[0])
    measured = worker.measure(server, jobs[0])
    assert served_waves == [jobs[0]["warm_up"], *jobs[0]["waves"]]
    assert len(measured["requests"]) == 8  # Warm-up requests do not count.
