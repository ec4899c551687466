"""A program and every process that it starts. Servers such as vLLM's compute in a child of their
own, which must be ended with them, and whose time and memory are theirs."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def adopt_orphans() -> None:
    """What loses its parent below this process becomes its child. Only so can it be waited for, and
    only children that were waited for are in this process's resource usage."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Asks the system to end this process when its parent ends, also where that is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def children(pid: int) -> list[int]:
    found = []
    for task in _tasks(pid):
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # It has ended.
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, its descendants and their children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(child) for child in children(pid))


def kill_children() -> None:
    """Ends every process below this one, and waits for them."""
    while found := children(os.getpid()):
        for child in found:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                continue  # Its own parent has waited for it.
