"""Measures allspark on this machine beside other engines and the machine's own limits.

usage: compare.py [--quick] [--engines allspark,openvino/int8,...] [--rounds N] [--name NAME] ...

Rounds are interleaved: every workload is served by one engine after the other, limits measured
between the workloads, and all again. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from checkpoints import SHAPES, ensure_checkpoint
from metrics import fractions, from_times
from ours import Allspark
from peers.base import Engine, EngineError, Precision
from peers.registry import PEERS
from plot import draw
from report import Samples, markdown, summarise
from workloads import WORKLOADS, MissingData, make_workload

HERE = Path(__file__).resolve().parent
ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Allspark, *PEERS)}
ENGINE_SHAPE = "260K"  # Of `streams`.
ENGINE_TASKS = ("convert", "start", "gap", "streams")
TASKS = (*WORKLOADS, *ENGINE_TASKS)
# A measurement during which others took more of the machine's cores than this is repeated.
MOST_OTHERS = 0.08
QUICK = {
    "rounds": 1,
    "shapes": "0.5B",
    "workloads": "single,p1024,b32,mixed",
    "engines": "allspark,openvino,llama.cpp",
}


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


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are shown")
    parser.add_argument("--quick", action="store_true", help=f"defaults become {QUICK}")
    parser.add_argument("--shapes", default="0.5B,1B", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--workloads", default=",".join(TASKS), help="which measurements")
    parser.add_argument("--engines", default=",".join(ENGINES), help="ENGINE or ENGINE/PRECISION")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chunk", type=int, default=0, help="our prefill chunk, 0: the default")
    parser.add_argument("--divisor", type=int, default=1, help="shortens requests, for a try")
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/allspark-bench"))
    parser.add_argument("--output-dir", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="latest", help="of the result files")
    parser.add_argument("--note", default="", help="a remark for the report")
    parser.add_argument("--no-limits", action="store_true", help="leave the machine's limits out")
    parser.add_argument("--lock", type=Path, help="a file to lock alone for every measurement")
    parser.add_argument("--retries", type=int, default=2, help="of a measurement others disturbed")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one measurement")
    parser.add_argument("--render", type=Path, help="only make table and plot of this JSON again")
    if "--quick" in (sys.argv[1:] if arguments is None else arguments):
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    for name, known in (("shapes", SHAPES), ("workloads", TASKS), ("engines", ENGINES)):
        values = getattr(options, name).split(",")
        for value in values:
            engine, _, precision = value.partition("/")
            if value not in known and not (
                name == "engines" and engine in known and precision in ENGINES[engine].precisions
            ):
                parser.error(f"--{name} has {value!r}; it must be one of {', '.join(known)}")
        setattr(options, name, values)
    for name in ("rounds", "threads", "divisor"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    for name in ("chunk", "retries"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 0")
    return options


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One run: starts the processes and keeps what they say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.samples: dict[str, dict[str, Samples]] = {}
        self.limits: list[dict[str, float | None]] = []
        self.skipped: list[str] = []
        self.failures: list[str] = []
        self.machine = machine.describe()
        self._limits_program: Path | None = None
        if not options.no_limits:
            self._limits_program = machine.compile_limits(options.work_dir)

    # Before the first round.

    def prepare(self) -> dict[str, list[Contestant]]:
        """Who takes part, by shape. What cannot be installed or converted is left out, loudly."""
        contestants = self._install()
        ready: dict[str, list[Contestant]] = {}
        for shape in self._round_shapes():
            ready[shape] = []
            self.samples[shape] = {}
            for contestant in contestants:
                is_wanted = shape in self.options.shapes or contestant.engine.is_ours
                if is_wanted and self._convert(shape, contestant):
                    ready[shape].append(contestant)
                    self.samples[shape][contestant.label] = {}
        self._describe_engine(ready)
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
            for each in [precision] if precision else engine.precisions:
                contestants.append(Contestant(engine, each))
        return contestants

    def _convert(self, shape: str, contestant: Contestant) -> bool:
        model = self._model_dir(shape, contestant)
        stamp = model / "prepared"
        # Ours may have changed since; others' versions are pinned by what is installed.
        if stamp.is_file() and not contestant.engine.is_ours:
            return True
        say(f"converting {shape} for {contestant.label}")
        try:
            contestant.engine.prepare(self._checkpoint(shape), contestant.precision_name, model)
        except EngineError as error:
            self._skip(f"{shape}, {contestant.label}: {error}")
            return False
        stamp.touch()
        return True

    def _skip(self, reason: str) -> None:
        say(f"LEFT OUT: {reason}")
        self.skipped.append(reason)

    def _checkpoint(self, shape: str) -> Path:
        return ensure_checkpoint(shape, self.options.work_dir / shape / "checkpoint")

    def _model_dir(self, shape: str, contestant: Contestant) -> Path:
        directory: Path = self.options.work_dir / shape
        return directory / contestant.label.replace(" ", "-")

    def _describe_engine(self, ready: dict[str, list[Contestant]]) -> None:
        self.machine.update(version="not measured", isa="none")
        for shape, contestants in ready.items():
            for contestant in contestants:
                if contestant.engine.is_ours:
                    job = self._job(shape, contestant, "version", {})
                    self.machine.update(self._ask(contestant, job))
                    return

    # Rounds.

    def run(self) -> None:
        ready = self.prepare()
        for round_id in range(self.options.rounds):
            before = self._measure_limits()
            for shape, contestants in ready.items():
                for task in self._tasks(shape):
                    say(f"round {round_id + 1}/{self.options.rounds}, {shape}, {task}")
                    # Each begins once: whoever comes after a busy engine finds another machine.
                    shift = round_id % max(1, len(contestants))
                    order = contestants[shift:] + contestants[:shift]
                    taken = [(each, self._measure_or_note(shape, task, each)) for each in order]
                    after = self._measure_limits()
                    for contestant, values in taken:
                        self._keep(shape, task, contestant, values, machine.between(before, after))
                    before = after
                    self.write()  # What is there stays if the rest is interrupted.

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

    def _measure_limits(self) -> dict[str, float | None]:
        with machine.exclusive(self.options.lock):
            slot = machine.measure_limits(self._limits_program, self.options.threads)
        self.limits.append(slot)
        return slot

    def _measure_or_note(
        self, shape: str, task: str, contestant: Contestant
    ) -> dict[str, Any] | None:
        if task in ENGINE_TASKS and not contestant.engine.is_ours:
            return None
        try:
            say(f"  {contestant.label}")
            return self._measure(shape, task, contestant)
        except (EngineError, MissingData) as error:
            say(f"  {contestant.label}: {error}")
            self.failures.append(f"{shape}, {task}, {contestant.label}: {error}")
            return None

    def _measure(self, shape: str, task: str, contestant: Contestant) -> dict[str, Any]:
        if task == "convert":
            engine, model = contestant.engine, self._model_dir(shape, contestant)
            assert isinstance(engine, Allspark)
            job = engine.convert_job(self._checkpoint(shape), contestant.precision_name, model)
            return self._ask(contestant, job)
        if task == "start":
            job = self._job(shape, contestant, "start", {})
            cold = self._ask(contestant, job, warm_up=False)
            warm_s = self._ask(contestant, job)["start_s"]
            return {**cold, "warm_up_s": max(0.0, warm_s - cold["start_s"])}
        work = make_workload(task, SHAPES[shape].vocab_size, self.options.divisor)
        waves = [[vars(request) for request in wave] for wave in work.waves]
        sizes = {"max_batch": work.max_batch, "max_length": max(64, work.max_length)}
        if task in ENGINE_TASKS:
            sizes["max_batch"] = len(work.requests)
            return self._ask(contestant, self._job(shape, contestant, task, sizes, waves))
        measured = self._ask(contestant, self._job(shape, contestant, "requests", sizes, waves))
        return from_times(work, measured)

    def _job(
        self,
        shape: str,
        contestant: Contestant,
        task: str,
        sizes: dict[str, int],
        waves: list[list[dict[str, Any]]] | None = None,
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
            "waves": waves,
        }

    def _ask(
        self, contestant: Contestant, job: dict[str, Any], warm_up: bool = True
    ) -> dict[str, Any]:
        os.environ["ALLSPARK_DISABLE_WARMUP"] = "0" if warm_up else "1"
        for left in reversed(range(self.options.retries + 1)):
            with machine.exclusive(self.options.lock):
                others = machine.Others()
                output = contestant.engine.run_worker(json.dumps(job), self.options.timeout)
                share = others.share()
            if share <= MOST_OTHERS or not left:
                break
            say(f"  {contestant.label}: others took {100 * share:.0f} % of the machine; again")
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        if job["task"] == "requests":
            result["others_share"] = share
        return result

    def _keep(
        self,
        shape: str,
        task: str,
        contestant: Contestant,
        values: dict[str, Any] | None,
        limits: machine.Limits,
    ) -> None:
        if values is None:
            return
        if task in WORKLOADS:
            size = SHAPES[shape]
            work = make_workload(task, size.vocab_size, self.options.divisor)
            values = {**values, **fractions(size, contestant.precision, work, values, limits)}
        metrics = self.samples[shape][contestant.label]
        for key, value in values.items():
            metrics.setdefault(f"{task}.{key}", []).append(value)
        shown = {key: round(value, 3) for key, value in values.items()}
        say(f"  {contestant.label}: {shown}")

    # Results.

    def result(self) -> dict[str, Any]:
        options = self.options
        labels = {label for engines in self.samples.values() for label in engines}
        return {
            "name": options.name,
            "date": datetime.date.today().isoformat(),
            "machine": self.machine,
            "settings": {
                key: getattr(options, key)
                for key in ("rounds", "threads", "chunk", "divisor", "workloads", "note")
            },
            "limits": self.limits,
            "ours": sorted(label for label in labels if label.startswith(f"{Allspark.name} ")),
            "shapes": {
                shape: {label: summarise(samples) for label, samples in engines.items()}
                for shape, engines in self.samples.items()
            },
            "skipped": self.skipped,
            "failures": self.failures,
        }

    def write(self) -> None:
        directory: Path = self.options.output_dir
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.result(), indent=1, ensure_ascii=False) + "\n"
        (directory / f"{self.options.name}.json").write_text(text)
        render(directory / f"{self.options.name}.json")


def render(path: Path) -> str:
    """Writes table and plot beside the JSON of a run; returns the table."""
    result = json.loads(path.read_text())
    text = markdown(result)
    path.with_suffix(".md").write_text(text)
    try:
        draw(result, path.with_suffix(".png"))
    except ImportError:
        say("there is no matplotlib: no plot")
    return text


def main() -> int:
    options = parse_arguments()
    if options.render is not None:
        print(render(options.render))
        return 0
    # Ended from outside, it unwinds, and run_command takes what is running with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bench = Bench(options)
    bench.run()
    print(markdown(bench.result()))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
