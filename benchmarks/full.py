"""Measures everything that the documents quote, and writes it there. Takes hours; when started
again, it resumes where it was cut off.

usage: full.py [--rounds N] [--shapes ...] [--engines ...] [--list]

Results go to results/KIND, where KIND is the processor and its kernel table. All results in a
folder are from one commit: if there are some from another commit, --replace removes them first.
What another command measured, or others disturbed, is measured again.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import figures
import machine
from bench import TASKS
from bench_engine import about_engine
from checkpoints import WORK_DIR
from record import RESULTS, command_of, commit_of, is_modified, read
from workloads import shared_data

HERE = Path(__file__).resolve().parent
TOKENIZER = shared_data() / "tokenizers" / "qwen2.5"


def steps(options: argparse.Namespace) -> dict[str, list[str]]:
    """Commands by the names of their results. Short ones come first."""
    rounds = ["--rounds", str(options.rounds)]
    draft = ["--draft-layers", "4", "--draft-precision", "A8W8", "--sets", "greedy"]
    tokenizer = ["--tokenizer", str(TOKENIZER)] if TOKENIZER.is_dir() else []
    alone = {
        "step_loop": ["step_loop.py", *rounds],
        "http_streams": ["http_streams.py", *rounds],
        "server_start": ["server_start.py", *rounds],
        "server_speed": ["server_speed.py", "--rounds", str(4 * options.rounds)],
        "batch": ["batch.py", *rounds],
        # Few tokens a line, since a line's own cost counts most then; and they take an hour.
        "batch-100000": [
            "batch.py", "--rounds", "1", "--lines", "100000", "--sdk-lines", "10000", "--plain",
            "--output", "4", "--kinds", "sdk,own lines",
        ],
        "long_prompt": ["long_prompt.py", *tokenizer],
        "conversion": ["conversion.py"],
        "quantizing": ["quantizing.py"],
        "choices": ["choices.py", *rounds],
        "moe": ["moe.py", *rounds],
        "guided": ["guided.py", *rounds, *tokenizer],
        "lora": ["lora.py", *rounds],
        "lora-A8W8": ["lora.py", *rounds, "--precision", "A8W8"],
        "speculative": ["speculative.py", *rounds],
        "speculative-draft": ["speculative.py", *rounds, *draft],
        "prefix_cache": ["prefix_cache.py", *rounds],
        "prefill_policy": ["prefill_policy.py", *rounds],
    }
    beside = {}
    workloads = options.workloads.split(",")
    for shape in options.shapes.split(","):
        beside[f"engines-{shape}"] = [
            "compare.py", *rounds, "--shapes", shape, "--engines", options.engines,
            "--workloads", ",".join(workloads), "--timeout", str(options.timeout), "--resume",
        ]  # fmt: skip
        # `streams` always has one small model, whatever the shape.
        workloads = [workload for workload in workloads if workload != "streams"]
    # More rounds: its bars are near, and the speed of a shared machine changes from run to run.
    beside["engines-serving"] = [
        "compare.py", "--rounds", str(2 * options.rounds + 1), "--shapes", "0.5B",
        "--engines", ",".join(_SERVED), "--workloads", "b32",
        "--timeout", str(options.timeout), "--resume",
    ]  # fmt: skip
    beside["engines-formats"] = [
        "compare.py", *rounds, "--shapes", "1B", "--engines", ",".join(_FORMATS),
        "--workloads", "single,p1024", "--timeout", str(options.timeout), "--resume",
    ]  # fmt: skip
    return {**alone, **beside}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="0.5B,1B", help="of compare.py")
    parser.add_argument("--engines", default=",".join(_ENGINES), help="of compare.py")
    parser.add_argument("--workloads", default=",".join(TASKS), help="of compare.py")
    parser.add_argument("--timeout", type=float, default=1800, help="of compare.py")
    parser.add_argument("--lock", type=Path, help="of compare.py")
    parser.add_argument("--only", help="names of results; default: all")
    parser.add_argument("--work-dir", type=Path, default=WORK_DIR)
    parser.add_argument("--replace", action="store_true", help="results of another commit")
    parser.add_argument("--list", action="store_true", help="only say the commands")
    options = parser.parse_args(arguments)
    known = steps(options)
    for name in (options.only or "").split(","):
        if options.only and name not in known:
            parser.error(f"--only has {name!r}; it must be one of {', '.join(known)}")
    return options


# The precisions of this engine that the documents show, and all of the peers.
_ENGINES = (
    "allspark/bf16", "allspark/A8W8", "allspark/A8W4",
    "openvino", "llama.cpp", "vllm", "onnxruntime-genai", "transformers",
)  # fmt: skip
# Servers of 32 streams, and this engine without one.
_SERVED = (
    "allspark/bf16", "allspark/A8W8", "allspark-serve/bf16", "allspark-serve/A8W8",
    "vllm-serve/bf16", "llama.cpp/BF16",
)  # fmt: skip
# Files of others as they are, and what they are compared with.
_FORMATS = (
    "allspark/A8Q4_K_M", "allspark/A16Q4_K_M", "llama.cpp/Q4_K_M",
    "allspark/A8MXFP4", "allspark/A16MXFP4", "llama.cpp/MXFP4",
    "allspark/A8W4", "allspark/A16W4", "allspark/FP8", "allspark/bf16",
)  # fmt: skip


def outputs(name: str, folder: Path) -> list[str]:
    if name.startswith("engines"):
        return ["--output-dir", str(folder), "--name", name]
    return ["--json", str(folder / f"{name}.json")]


def is_done(path: Path, command: list[str]) -> bool:
    """Whether this command has measured all, undisturbed; compare.py itself knows what it still has
    to do."""
    if path.stem.startswith("engines") or not path.is_file():
        return False
    found = read(path)
    is_whole = found["complete"] and found["command"] == command_of(command)
    return is_whole and not any("disturbed" in each for each in found["measurements"])


def of_others(folder: Path, commit: str | None) -> list[Path]:
    return [path for path in sorted(folder.glob("*.json")) if read(path)["commit"] != commit]


def remove(paths: list[Path]) -> None:
    for path in paths:
        print(f"{path} is of another commit: removed", file=sys.stderr)
        for each in (path, path.with_suffix(".md"), path.with_suffix(".png")):
            each.unlink(missing_ok=True)


def main() -> int:
    options = parse_arguments()
    commands = steps(options)
    names = options.only.split(",") if options.only else list(commands)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    if options.list:
        for name in names:
            print(f"{name}: python benchmarks/{shlex.join(commands[name])}")
        return 0
    # On SIGTERM the stack unwinds, so that the running command is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    about = about_engine(options.work_dir)
    commit, folder = commit_of(about["version"]), RESULTS / machine.kind(about["isa"])
    if is_modified(commit) is not False:
        which = f"the installed package is of commit {commit}"
        print(f"full.py: {which}, and the checkout is not; commit, and install it", file=sys.stderr)
        return 2
    others = of_others(folder, commit)
    if others and not options.replace:
        names_of_others = ", ".join(path.name for path in others)
        print(f"full.py: {folder} has results of another commit than {commit}: {names_of_others}; "
              "--replace removes them", file=sys.stderr)  # fmt: skip
        return 2
    remove(others)
    failed = []
    for name in names:
        if is_done(folder / f"{name}.json", commands[name]):
            continue
        work = ["--work-dir", str(options.work_dir)]
        if options.lock is not None and name.startswith("engines"):
            work += ["--lock", str(options.lock)]
        script, *arguments = commands[name]
        print(f"=== {name}", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / script), *arguments, *work, *outputs(name, folder)]
        process = subprocess.Popen(command, stdout=sys.stderr)
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if status != 0:
            failed.append(name)
        figures.write_documents(RESULTS)
    if failed:
        print(f"full.py: not without failures: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
