"""Output files that grow by whole lines, and can be continued after any end."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_BLOCK = 1 << 20


class OutputFile:
    """A file of lines, open for one run.

    Lines are given to the system at once, and to the disk when the file is closed by `finish`. So
    they outlive the process, but the last of them may not outlive the machine.

    Raises:
        OSError: the file cannot be opened, or another process writes it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise OSError(f"{path}: another process writes it") from None

    def num_bytes(self) -> int:
        """The file's size."""
        return os.fstat(self._fd).st_size

    def cut(self) -> int:
        """Cuts off a last line that is not whole; returns how many lines there are."""
        count = end = at = 0
        while block := os.pread(self._fd, _BLOCK, at):
            count += block.count(b"\n")
            last = block.rfind(b"\n")
            if last >= 0:
                end = at + last + 1
            at += len(block)
        if end < at:
            os.ftruncate(self._fd, end)
        return count

    def clear(self) -> None:
        """Removes all lines."""
        os.ftruncate(self._fd, 0)

    def write(self, data: bytes) -> None:
        """Appends whole lines."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def finish(self) -> None:
        """Waits for the disk, and closes the file."""
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Closes the file; a second call has no effect."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
