"""One run of compare.py: prepares the engines, runs the measurements and records the results."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import record
import rules
from checkpoints import SHAPES, ensure_checkpoint
from estimate import Estimate, in_words
from metrics import fractions, from_times
from ours import Allspark, AllsparkServe
from peers.base import Engine, EngineError, Precision, TookTooLong
from peers.registry import PEERS
from plot import draw
from report import Result, markdown
from workloads import WORKLOADS, MissingData, make_workload

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (Allspark, AllsparkServe, *PEERS)
}
ENGINE_SHAPE = "260K"  # The shape of `streams`.
ENGINE_TASKS = ("convert", "start", "gap", "streams")
TASKS = (*WORKLOADS, *ENGINE_TASKS)
DEFAULT_DIR = Path(__file__).resolve().parents[1] / "build" / "benchmarks"
# Settings that a resumed run must share with the earlier one. It may add rounds, also of peers that
# were left out.
_SETTINGS = (
    "shapes", "workloads", "engines", "threads", "chunk", "divisor", "no_limits", "most_others",
    "note",
)  # fmt: skip


class Unfit(RuntimeError):
    """A run that cannot be resumed with these settings."""


class Disturbed(RuntimeError):
    """In every try, other processes took more of the cores than a measurement allows."""

    def __init__(self, share: float) -> None:
        super().__init__(f"disturbed: others took {100 * share:.0f} % of the machine")
        self.share = share


class FarOverOurTime(RuntimeError):
    """A peer's measurement that was ended because ours had taken far less."""

    def __init__(self, after_s: float, ours_s: float) -> None:
        super().__init__(f"ended after {after_s:.0f} s; ours took {ours_s:.0f} s")
        self.after_s = after_s
        self.ours_s = ours_s


class OutOfTime(RuntimeError):
    """A measurement that would end after the time limit --minutes."""


@dataclass(frozen=True)
class Contestant:
    engine: Engine
    precision_name: str

    @property
    def label(self) -> str:
        return f"{self.engine.name} {self.precision_name}"

    @property
    def precision(self) -> Precision:
        return self.engine.precisions[self.precision_name]


def checkpoint_of(shape: str, work_dir: Path) -> Path:
    return ensure_checkpoint(shape, work_dir / shape / "checkpoint")


def model_of(contestant: Contestant, shape: str, work_dir: Path) -> Path:
    """The folder of an engine's model."""
    return work_dir / shape / contestant.label.replace(" ", "-")


def prepared(contestant: Contestant, shape: str, work_dir: Path) -> Path:
    """The same, with the model in it. A peer's is converted once, as it is installed once, while
    ours may have changed since."""
    model = model_of(contestant, shape, work_dir)
    stamp = model / "prepared"
    if contestant.engine.is_ours or not stamp.is_file():
        say(f"converting {shape} for {contestant.label}")
        checkpoint = checkpoint_of(shape, work_dir)
        contestant.engine.prepare(checkpoint, contestant.precision_name, model)
        stamp.touch()
    return model


@dataclass(frozen=True)
class Row:
    """One workload on one shape, measured on all engines one after the other."""

    round_number: int
    shape: str
    task: str
    contestants: list[Contestant]

    @property
    def place(self) -> tuple[int, str, str]:
        return self.round_number, self.shape, self.task

    def of(self, contestant: Contestant) -> dict[str, str]:
        return {"shape": self.shape, "workload": self.task, "engine": contestant.label}


def _joined(earlier: record.Record, new: record.Record) -> record.Record:
    """What a resumed record has of both. An engine that was measured stays in it, also where it
    cannot be installed any more."""
    found = (earlier["modified"], new["modified"])
    return {
        "command": new["command"],
        "skipped": new["skipped"],
        "modified": next(worst for worst in (True, None, False) if worst in found),
        "ours": sorted({*earlier["ours"], *new["ours"]}),
        "contestants": {
            shape: list(dict.fromkeys([*earlier["contestants"].get(shape, ()), *labels]))
            for shape, labels in new["contestants"].items()
        },
        "versions": {**earlier.get("versions", {}), **new["versions"]},
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def orders(group: list[Contestant], rounds: int) -> list[list[Contestant]]:
    """The engines of each round. All are first in turn, and each comes after the one that it came
    after least, since the state of the machine depends on the engine before. In the first round
    ours are first, since their time bounds that of peers."""
    found: list[list[Contestant]] = []
    came_after: Counter[tuple[Contestant, Contestant]] = Counter()
    for number in range(rounds):
        shift = number % max(1, len(group))
        left = group[shift:] + group[:shift]
        order = left[:1] if number else sorted(group, key=lambda each: not each.engine.is_ours)
        while len(order) < len(group):
            left.remove(order[-1])
            order.append(min(left, key=lambda each: came_after[order[-1], each]))
        came_after.update(itertools.pairwise(order))
        found.append(order)
    return found


class Bench:
    """One run, prepared when constructed; raises Unfit if it cannot resume."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._skipped: list[str] = []
        self._limits_program: Path | None = None
        if not options.no_limits:
            self._limits_program = machine.compile_limits(options.work_dir)
        self._ready = self._prepare()
        self.path = (options.output_dir or DEFAULT_DIR) / f"{options.name}.json"
        self.record = self._begin()
        self._estimate = Estimate(options.divisor, self.record["measurements"])
        self._slot: machine.Slot | None = None  # The limits measured just before the next row.
        self._end = float("inf")

    # Before the first round.

    def _prepare(self) -> dict[str, list[Contestant]]:
        """The engines that take part, by shape; prints those that cannot be installed or
        converted."""
        contestants = self._install()
        ready: dict[str, list[Contestant]] = {}
        for shape in self._round_shapes():
            ready[shape] = []
            for contestant in contestants:
                is_wanted = shape in self.options.shapes or contestant.engine.is_ours
                if is_wanted and self._convert(shape, contestant):
                    ready[shape].append(contestant)
        return ready

    def _install(self) -> list[Contestant]:
        contestants: list[Contestant] = []
        for wanted in self.options.engines:
            name, _, precision = wanted.partition("/")
            engine = ENGINES[name](self.options.work_dir / "peers" / name)
            say(f"installing {name}")
            try:
                engine.install()
            except EngineError as error:
                self._skip(f"{wanted}: {error}")
                continue
            usual = [name for name, each in engine.precisions.items() if not each.only_by_name]
            for each in [precision] if precision else usual:
                contestants.append(Contestant(engine, each))
        return contestants

    def _convert(self, shape: str, contestant: Contestant) -> bool:
        try:
            prepared(contestant, shape, self.options.work_dir)
        except EngineError as error:
            self._skip(f"{shape}, {contestant.label}: {error}")
            return False
        return True

    def _skip(self, reason: str) -> None:
        say(f"LEFT OUT: {reason}")
        self._skipped.append(reason)

    def _model_dir(self, shape: str, contestant: Contestant) -> Path:
        return model_of(contestant, shape, self.options.work_dir)

    def _begin(self) -> record.Record:
        """The record to write to: a new one, or the one to resume."""
        may_change = {
            "rounds": self.options.rounds,
            "far_behind": None if self.options.all_peers else rules.FAR_BEHIND,
            "times_ours": self.options.times_ours,
        }
        settings = {**may_change, **{key: getattr(self.options, key) for key in _SETTINGS}}
        new = record.begin("engines", **self._describe_engine(), settings=settings)
        new.update(name=self.options.name, limits=[], skipped=self._skipped, **self._who_is_ready())
        if self.options.resume and self.path.is_file():
            earlier = record.read(self.path)
            self._check_same(earlier, new)
            earlier["settings"].update(may_change)
            # Measurements that were disturbed in an earlier run may be repeated in this one.
            kept = [each for each in earlier["measurements"] if "disturbed" not in each]
            new = {**earlier, **_joined(earlier, new), "measurements": kept}
        return new

    def _who_is_ready(self) -> dict[str, Any]:
        everybody = [each for group in self._ready.values() for each in group]
        peers = [each.engine for each in everybody if not each.engine.is_ours]
        return {
            "ours": sorted({each.label for each in everybody if each.engine.is_ours}),
            "contestants": {
                shape: [each.label for each in group] for shape, group in self._ready.items()
            },
            "versions": {peer.name: peer.versions() for peer in peers},
        }

    def _describe_engine(self) -> dict[str, str]:
        for shape, contestants in self._ready.items():
            for contestant in contestants:
                if contestant.engine.is_ours:
                    job = json.dumps(self._job(shape, contestant, "version", {}))
                    found: dict[str, str] = self._answer(contestant, job, 600)
                    return found
        return {"version": "not measured", "isa": "none"}

    def _check_same(self, earlier: record.Record, new: record.Record) -> None:
        """Figures must come from one commit on one machine, and rows from one set of requests."""
        pairs = [("commit", earlier["commit"], new["commit"])]
        pairs += [(key, earlier["machine"][key], new["machine"][key]) for key in ("kind", "cores")]
        pairs += [
            (f"--{key.replace('_', '-')}", earlier["settings"][key], new["settings"][key])
            for key in _SETTINGS
        ]
        for peer, now in new["versions"].items():
            before = earlier.get("versions", {}).get(peer, now)  # Old records do not have it.
            pairs.append((peer, sorted({*before} - {*now}), sorted({*now} - {*before})))
        for name, before, now in pairs:
            if before != now:
                raise Unfit(f"--resume: {self.path} has {name} {before}, this run {now}")
        if self.options.rounds < earlier["settings"]["rounds"]:
            wanted = f"--rounds is {self.options.rounds}"
            had = earlier["settings"]["rounds"]
            raise Unfit(f"--resume: {wanted}; {self.path} has {had}, which may only grow")

    # Rounds.

    def run(self) -> None:
        if self.options.minutes is not None:
            self._end = time.monotonic() + 60 * self.options.minutes
        tried: set[tuple[int, str, str]] = set()
        # What is measured decides who takes part in the rows to come.
        while rows := [row for row in self._rows() if row.place not in tried]:
            row = rows[0]
            tried.add(row.place)
            title = f"round {row.round_number}/{self.options.rounds}, {row.shape}, {row.task}"
            # A row without its peers says little, so a row that does not fit in time is left out
            # entirely.
            if self._expected_s([row]) > self._left_s():
                self._skip(f"{title}: no time for it")
                continue
            left_s = min(self._expected_s(rows), self._left_s())
            how = "at most" if self._may_be_left_out(rows) else "about"
            say(f"{title} ({how} {in_words(left_s)} left)")
            self._measure_row(row)
        self.record["complete"] = not any(self._rows())
        self.write()

    def _rows(self) -> Iterator[Row]:
        """All rows that are not measured yet, with who takes part by what is known now."""
        done = {(each["round"], *each["of"].values()) for each in self.record["measurements"]}
        result, far_behind = Result(self.record), self.record["settings"]["far_behind"]
        out = {
            (shape, task): rules.left_out(result, shape, task, far_behind)
            for shape in self._ready
            for task in self._tasks(shape)
        }
        in_turn = {
            shape: orders(group, self.options.rounds) for shape, group in self._ready.items()
        }
        for round_number in range(1, self.options.rounds + 1):
            for shape in self._ready:
                for task in self._tasks(shape):
                    order = [
                        each
                        for each in in_turn[shape][round_number - 1]
                        if (each.engine.is_ours or task not in ENGINE_TASKS)
                        and (round_number, shape, task, each.label) not in done
                        and each.label not in out[shape, task]
                    ]
                    if order:
                        yield Row(round_number, shape, task, order)

    def _may_be_left_out(self, rows: list[Row]) -> bool:
        """Whether the first round of these rows can still decide that a later one has fewer."""
        has_peers = any(not each.engine.is_ours for row in rows for each in row.contestants)
        is_decided = rows[0].round_number > 1 or self.options.rounds == 1
        return has_peers and not is_decided and self.record["settings"]["far_behind"] is not None

    def _expected_s(self, rows: list[Row]) -> float:
        """Retries are included, since the estimate learns from measurements with retries."""
        keys = [(row.shape, row.task, each.label) for row in rows for each in row.contestants]
        return sum(map(self._estimate.seconds, keys))

    def _round_shapes(self) -> list[str]:
        shapes = list(self.options.shapes) if set(self.options.workloads) - {"streams"} else []
        if "streams" in self.options.workloads and ENGINE_SHAPE not in shapes:
            shapes.append(ENGINE_SHAPE)
        return shapes

    def _tasks(self, shape: str) -> list[str]:
        chosen = self.options.workloads
        if shape not in self.options.shapes:
            return ["streams"]
        return [task for task in chosen if task != "streams" or shape == ENGINE_SHAPE]

    def _measure_row(self, row: Row) -> None:
        """Every measurement is saved at once, so that little is lost if the run is cut off."""
        slots = [self._slot or self._measure_limits()]
        taken: list[tuple[Contestant, record.Measurement]] = []
        for contestant in row.contestants:
            measurement = self._measure_or_note(row, contestant)
            if measurement is None:
                continue
            self.record["measurements"].append(measurement)
            self._compare_with_limits(row, [(contestant, measurement)], slots)
            taken.append((contestant, measurement))
            record.write(self.path, self.record)
        slots.append(self._measure_limits())
        self._slot = slots[-1]
        # A result above the limit shows that the limit was measured too low.
        for left in reversed(range(self.options.retries + 1)):
            is_possible = self._compare_with_limits(row, taken, slots)
            if is_possible or not left:
                break
            say("  faster than the machine's limit: the limits again")
            slots.append(self._measure_limits())
        self.write()

    def _compare_with_limits(
        self,
        row: Row,
        taken: list[tuple[Contestant, record.Measurement]],
        slots: list[machine.Slot],
    ) -> bool:
        """Adds the fractions; False if one is above 1. Limits are the mean of before and after, or
        the maximum of all if they had to be measured again."""
        if row.task not in WORKLOADS:
            return True
        limits = machine.combine(slots, statistics.fmean if len(slots) <= 2 else max)
        is_possible = True
        size = SHAPES[row.shape]
        for contestant, measurement in taken:
            values = measurement.get("values")
            if values is None:
                continue
            work = make_workload(row.task, size.vocab_size, self.options.divisor)
            found = fractions(size, contestant.precision, work, values, limits)
            values.update(found)
            measurement["limits"] = limits
            is_possible &= all(fraction <= 1 for fraction in found.values())
        return is_possible

    def _measure_limits(self) -> machine.Slot:
        with machine.exclusive(self.options.lock):
            slot = machine.measure_limits(
                self._limits_program,
                self.options.threads,
                self.options.retries,
                self.options.most_others,
            )
        self.record["limits"].append(slot)
        return slot

    def _measure_or_note(self, row: Row, contestant: Contestant) -> record.Measurement | None:
        """Values, or why there are none. None if time is over; a later run may measure it then."""
        of, begin = row.of(contestant), time.monotonic()
        measurement: record.Measurement = {"round": row.round_number, "of": of}
        say(f"  {contestant.label}")
        try:
            measurement.update(self._measure(row, contestant))
        except OutOfTime:
            self._skip(f"{row.shape}, {row.task}, {contestant.label}: no time for it")
            return None
        except Disturbed as error:
            measurement["disturbed"] = error.share
        except FarOverOurTime as error:
            say(f"  {contestant.label}: {error}")
            measurement["stopped"] = {"after_s": error.after_s, "ours_s": error.ours_s}
        except (EngineError, MissingData) as error:
            measurement["failed"] = str(error)
            measurement["took_too_long"] = isinstance(error, TookTooLong)
        measurement["took_s"] = time.monotonic() - begin
        self._estimate.add((row.shape, row.task, contestant.label), measurement["took_s"])
        values = measurement.get("values", {})
        shown = {key: round(value, 3) for key, value in values.items()}
        for key in ("remarks", "disturbed", "failed"):
            if measurement.get(key):
                say(f"  {contestant.label}: {key}: {measurement[key]}")
        if shown:
            say(f"  {contestant.label}: {shown}")
        return measurement

    def _left_s(self) -> float:
        return self._end - time.monotonic()

    def _measure(self, row: Row, contestant: Contestant) -> dict[str, Any]:
        """`values`; of what peers serve, too, `wall_s`, and `remarks` if there are any."""
        shape, task = row.shape, row.task
        if task == "convert":
            engine, model = contestant.engine, self._model_dir(shape, contestant)
            assert isinstance(engine, Allspark)
            job = engine.convert_job(
                checkpoint_of(shape, self.options.work_dir), contestant.precision_name, model
            )
            return {"values": self._ask(contestant, job)}
        if task == "start":
            job = self._job(shape, contestant, "start", {})
            cold = self._ask(contestant, job, warm_up=False)
            warm_s = self._ask(contestant, job)["start_s"]
            return {"values": {**cold, "warm_up_s": max(0.0, warm_s - cold["start_s"])}}
        work = make_workload(task, SHAPES[shape].vocab_size, self.options.divisor)
        requests = {
            "waves": [[vars(request) for request in wave] for wave in work.waves],
            "warm_up": [vars(request) for request in work.warm_up()],
        }
        sizes = {"max_batch": work.max_batch, "max_length": max(64, work.max_length)}
        if task in ENGINE_TASKS:
            sizes["max_batch"] = len(work.requests)
            job = self._job(shape, contestant, task, sizes, requests)
            return {"values": self._ask(contestant, job)}
        ours_s = None
        if not contestant.engine.is_ours and self.options.times_ours:
            ours_s = rules.fastest_of_ours_s(Result(self.record), shape, task)
        job = self._job(shape, contestant, "requests", sizes, requests)
        measured = self._ask(contestant, job, ours_s=ours_s)
        remarks = {"remarks": measured["remarks"]} if measured["remarks"] else {}
        values = from_times(work, measured)
        model = self._model_dir(shape, contestant)
        source_bytes = contestant.engine.source_bytes(contestant.precision_name, model)
        if source_bytes:
            values["rss_of_source"] = 1e6 * values["rss_mb"] / source_bytes
        return {"values": values, "wall_s": measured["wall_s"], **remarks}

    def _job(
        self,
        shape: str,
        contestant: Contestant,
        task: str,
        sizes: dict[str, int],
        requests: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "task": task,
            "model": str(self._model_dir(shape, contestant)),
            "threads": self.options.threads,
            "chunk": self.options.chunk,
            "cache_mode": contestant.precision.cache_mode,
            "max_batch": 32,
            "max_length": 2048,
            **sizes,
            **(requests or {}),
        }

    def _ask(
        self,
        contestant: Contestant,
        job: dict[str, Any],
        warm_up: bool = True,
        ours_s: float | None = None,
    ) -> dict[str, Any]:
        """A worker's answer to a job, measured while no other process disturbed it. Ended early if
        it takes far longer than `ours_s`."""
        os.environ["ALLSPARK_DISABLE_WARMUP"] = "0" if warm_up else "1"
        text, limit_s = json.dumps(job), self.options.timeout
        if ours_s is not None:
            limit_s = min(limit_s, rules.longest_s(ours_s, self.options.times_ours))
        for left in reversed(range(self.options.retries + 1)):
            if self._left_s() <= 0:
                raise OutOfTime
            late: TookTooLong | None = None
            with machine.exclusive(self.options.lock):
                machine.wait_until_quiet(self.options.most_others)
                timeout_s = min(limit_s, self._left_s())
                others, begin = machine.Others(), time.monotonic()
                try:
                    result = self._answer(contestant, text, timeout_s)
                except TookTooLong as error:
                    if timeout_s < limit_s:
                        raise OutOfTime from None
                    late = error  # Others may be why.
                wall_s = time.monotonic() - begin
                share = others.share()
            if share <= self.options.most_others:
                break
            if not left:
                raise Disturbed(share)
            say(f"  {contestant.label}: others took {100 * share:.0f} % of the machine; again")
        if late is not None:
            if ours_s is not None and limit_s < self.options.timeout:
                raise FarOverOurTime(limit_s, ours_s)
            raise late
        if job["task"] == "requests":
            result.update(others_share=share, wall_s=wall_s)
        return result

    @staticmethod
    def _answer(contestant: Contestant, job: str, timeout_s: float) -> dict[str, Any]:
        output = contestant.engine.run_worker(job, timeout_s)
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result

    # Results.

    @property
    def has_failures(self) -> bool:
        return any("failed" in each for each in self.record["measurements"])

    def write(self) -> None:
        record.write(self.path, self.record)
        render(self.path)


def render(path: Path) -> str:
    """Writes table and plot beside the JSON of a run; returns the table."""
    result = record.read(path)
    text = markdown(result)
    path.with_suffix(".md").write_text(text)
    try:
        draw(result, path.with_suffix(".png"))
    except ImportError:
        say("there is no matplotlib: no plot")
    return text
