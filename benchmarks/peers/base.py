"""The interface of the engines that compare.py measures.

Each engine has one file with its class and, below it, its worker: `load`, which the file's own main
passes to worker.py. compare.py runs that main in the engine's own environment, so at its top the
file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The CPU build of torch by this version; other builds bring gigabytes of CUDA.
TORCH = "torch==2.13.0"
BENCHMARKS = Path(__file__).resolve().parents[1]
# How many of a failed program's last lines are quoted.
_SAID_LINES = 3
_SAID_CHARACTERS = 600


class EngineError(RuntimeError):
    """An engine that cannot be installed, prepared or measured; the message says why."""


@dataclass(frozen=True)
class Precision:
    """How weights are stored (bits with their scales) and multiplied; the limits depend on it."""

    body_bits: float
    head_bits: float
    rate: str  # One of the rates that limits.cc measures.
    options: Mapping[str, Any] = field(default_factory=dict)  # For the engine's own use.
    cache_mode: str = "AsCacheDefault"  # Of this engine, whose files do not contain it.
    only_by_name: bool = False  # Not among those of an engine that is named without a precision.


BF16 = Precision(16, 16, "bf16_gflop_s")


class TookTooLong(EngineError):
    """A measurement that was ended by its time limit."""


class ProgramEnded(EngineError):
    """A program that failed or was killed. The message has the exit status and its last lines."""

    def __init__(self, name: str, returncode: int, said: str) -> None:
        self.signal = -returncode if returncode < 0 else None
        how = f"ended with {returncode}"
        if self.signal is not None:
            how = f"was ended by {_signal_name(self.signal)}"
        super().__init__(f"{name} {how}: {last_lines(said)}")


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:  # A real-time signal.
        return f"signal {number}"


def last_lines(text: str) -> str:
    """The last lines that are not empty, joined; of a very long line only the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_SAID_LINES:])[-_SAID_CHARACTERS:] or "no message"


def run_command(
    command: Sequence[str | Path], timeout_s: float = 3600, text: str | None = None, **options: Any
) -> str:
    """Returns its standard output; `text` is its input. A failure quotes its last error lines."""
    name = Path(command[0]).name
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        # A new session, so that processes that it started are ended with it.
        process = subprocess.Popen(
            [str(part) for part in command], text=True, start_new_session=True, **pipes, **options
        )
    except OSError as error:
        raise EngineError(f"{name}: {error.strerror}") from error
    try:
        output, errors = process.communicate(text, timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _wait_for_group(process.pid)
        if isinstance(error, subprocess.TimeoutExpired):
            raise TookTooLong(f"{name} took more than {timeout_s:g} s") from error
        raise
    if process.returncode != 0:
        raise ProgramEnded(name, process.returncode, errors.strip() or output)
    return output


def _wait_for_group(group: int) -> None:
    """Waits for what an ended program had started, where this process has adopted it
    (process_tree.adopt_orphans): only then is its processor time known."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


class Engine:
    """An engine to compare with. `home` is its own folder: environment, sources, builds."""

    name: str
    precisions: Mapping[str, Precision]
    module = ""  # Of its worker, if it is another file.
    packages: Sequence[Sequence[str]] = ()  # Arguments of pip, one list per call.
    unwanted: Sequence[str] = ()  # Dependencies of these that do not work with this torch.
    is_ours = False
    is_server = False  # Another engine's, measured over HTTP.

    def __init__(self, home: Path) -> None:
        self.home = home

    @property
    def python(self) -> Path:
        return self.home / "venv" / "bin" / "python"

    def install(self) -> None:
        """Makes the engine's own virtual environment, unless it exists."""
        stamp = self.home / "installed"
        wanted = repr([list(arguments) for arguments in self.packages])
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        self.home.mkdir(parents=True, exist_ok=True)
        run_command([sys.executable, "-m", "venv", self.home / "venv"])
        for arguments in self.packages:
            run_command([self.python, "-m", "pip", "install", "-q", *arguments])
        if self.unwanted:
            run_command([self.python, "-m", "pip", "uninstall", "-q", "-y", *self.unwanted])
        self.build()
        stamp.write_text(wanted)

    def versions(self) -> list[str]:
        """What is installed in its environment, each with its version."""
        infos = (self.home / "venv").glob("lib/python*/site-packages/*.dist-info")
        return sorted(info.stem for info in infos)

    def build(self) -> None:
        """Steps to do after pip."""

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        """Converts the checkpoint into the folder `model`."""
        raise NotImplementedError

    def source_bytes(self, precision: str, model: Path) -> int | None:
        """The size of the file from which `model` was made, if memory is compared with it."""
        return None

    def environment(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Environment variables for its worker of this job, in addition to the caller's."""
        return {}

    def run_worker(self, job: str, timeout_s: float) -> str:
        """Runs this engine's module as a program: a job on stdin, a result on stdout."""
        module = self.module or type(self).__module__
        environment = {**os.environ, **self.environment(json.loads(job))}
        command = [self.python, "-m", module]
        return run_command(command, timeout_s, job, env=environment, cwd=BENCHMARKS)
