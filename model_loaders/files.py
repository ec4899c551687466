"""Opens the files of a checkpoint, which somebody else may have made. Nothing waits for a pipe,
reads a device, reads more than a limit, or follows a link to a file of something else.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from .errors import CheckpointError, CheckpointNotFoundError

# Git LFS writes a few lines of text in place of a file that was not fetched; they begin so.
_LFS_BEGIN = b"version https://git-lfs."
_MAX_LFS_BYTES = 1024

# The largest tokenizer.json that was published has 35 MB.
MAX_COMPANION_BYTES = 256 << 20


def file_size(path: Path) -> int:
    """Bytes of a regular file that is not empty; errors say what is there instead."""
    size = _regular_size(path)
    if size == 0:
        raise CheckpointError(f"{path}: empty file")
    return size


def check_no_pointer(path: Path) -> None:
    """Refuses the text that Git LFS writes in place of a file that was not fetched."""
    with open(path, "rb") as file:
        text = file.read(_MAX_LFS_BYTES)
    if text.startswith(_LFS_BEGIN):
        found = re.search(rb"^size (\d+)$", text, re.MULTILINE)
        size = f" of {int(found[1])} bytes" if found else ""
        raise CheckpointError(
            f"{path}: a Git LFS pointer to the file{size}, not the file itself; fetch it with "
            "'git lfs pull'"
        )


def read_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a small file, which may be copied into a serialised model. Refuses links out of
    its directory, except those of a hub's cache into the same repository, and more than
    ``max_bytes``, however many the file said it had.
    """
    check_link(path)
    # Without O_NONBLOCK, a pipe that nobody writes to is waited for.
    flags = os.O_RDONLY | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes")
    return data


def check_file(path: Path, max_bytes: int) -> None:
    """Refuses what ``read_file`` does, of a file that others are going to read."""
    check_link(path)
    size = _regular_size(path)
    if size > max_bytes:
        raise CheckpointError(f"{path}: {size} bytes, more than {max_bytes}")


def _regular_size(path: Path) -> int:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointNotFoundError(f"{path}: a symbolic link that leads nowhere") from None
        raise CheckpointNotFoundError(f"{path}: no such file") from None
    except OSError as error:  # ELOOP, EACCES, ENAMETOOLONG
        raise CheckpointNotFoundError(f"{path}: cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return info.st_size


def check_link(path: Path) -> None:
    """Refuses a link out of its directory, except one of a hub's cache into the same repository."""
    if not path.is_symlink():
        return
    target, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    if target.is_relative_to(folder):
        return
    # models--OWNER--NAME/snapshots/REVISION/NAME -> models--OWNER--NAME/blobs/HASH
    repository = target.parent.parent
    is_blob = target.parent.name == "blobs" and repository.name.startswith("models--")
    if is_blob and folder.is_relative_to(repository):
        return
    raise CheckpointError(
        f"{path}: a link out of its directory, to {target}; put the file itself there"
    )
