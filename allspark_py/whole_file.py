"""Files that are written as a whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file of which a reader sees the old or the new content, whenever this ends. Links
    and what is no file, such as /dev/stdout, stay what they are, and are written to."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


@contextlib.contextmanager
def temporary_file(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A new file that is open to be written, and to be renamed to `name`; at the end it is
    removed unless it was. It is locked: one without a lock is a killed process's, and the next one
    for `name` removes it. Other file systems than those with locks keep it.
    """
    for path in folder.glob(f".{glob.escape(name)}.*.tmp"):
        with contextlib.suppress(OSError), open(path, "r+b") as leftover:
            fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    with _new_file(folder, name) as file:
        try:
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)


def _new_file(folder: Path, name: str) -> BinaryIO:
    """A new file, locked. Its name is random: processes of two containers may have the same id."""
    while True:
        file = open(folder / f".{name}.{secrets.token_hex(8)}.tmp", "xb")
        if _lock_new(file):
            return file
        file.close()


def _lock_new(file: BinaryIO) -> bool:
    """Locks a new file until it is closed. False: another process has just removed it, or is about
    to, as a leftover.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks, where no leftover is removed
    return os.path.exists(file.name)
