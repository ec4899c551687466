"""FileStore: the files of /v1/files, in a folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from allspark.error_text import shown
from allspark.serve.batches.record import read_record
from allspark.serve.errors import ApiError
from allspark.serve.ids import make_id
from allspark.whole_file import write_whole

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_TEMPORARY_PREFIX = "allspark-files-"
_LOCK = "lock"


def _remove_left_folders() -> None:
    """Removes the temporary folders of this user's servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, just made, or removed by another server


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str  # "batch" or "batch_output"

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return {**asdict(self), "object": "file", "status": "processed", "expires_at": None}


class FileStore:
    """Files with their records, within bounds. Used on the event loop alone.

    A file is `ID`, its record `ID.json`; without a record there is no file. So whatever ends the
    process, a file is there as a whole or not at all.

    Args:
        folder: where they are kept; None: a temporary folder, which `close` removes.
        max_bytes: of all files together.

    Raises:
        OSError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path | None, max_files: int, max_bytes: int):
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            _remove_left_folders()
            self._temporary = tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX)
            folder = Path(self._temporary.name)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        lock = folder / _LOCK
        # A temporary folder's lock gets its name when it is held: one that is free is left over.
        made = lock if self._temporary is None else folder / "lock.new"
        self._lock = made.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise OSError(f"{folder}: another server keeps its files there") from None
        made.replace(lock)
        self._files: dict[str, FileRecord] = {}
        self._num_uploads = 0
        self._upload_bytes = 0
        self._load()

    def _load(self) -> None:
        found = []
        for path in self.folder.glob("file-*.json"):
            record = read_record(path, FileRecord)
            if self.path_of(record.id).is_file():
                found.append(record)
        for record in sorted(found, key=lambda each: (each.created_at, each.id)):
            self._files[record.id] = record

    def remove_others(self, kept: set[str]) -> None:
        """Removes files without a record, which an end of the process left, but for `kept`."""
        for path in self.folder.iterdir():
            name = path.name.partition(".")[0]
            if FILE_ID.fullmatch(name) and name not in self._files and name not in kept:
                path.unlink(missing_ok=True)

    def path_of(self, file_id: str) -> Path:
        """Where the content of a file is, or will be."""
        return self.folder / file_id

    @property
    def files(self) -> list[FileRecord]:
        """All of them, the oldest first."""
        return list(self._files.values())

    def get(self, file_id: str) -> FileRecord:
        """The record of a file. Raises ApiError where there is none."""
        record = self._files.get(file_id)
        if record is None:
            message = f"there is no file {shown(file_id)}"
            raise ApiError(404, message, param="file_id", code="file_not_found")
        return record

    def begin_upload(self) -> Upload:
        """A new file. Raises ApiError where there are too many."""
        count = len(self._files) + self._num_uploads
        if count >= self._max_files:
            message = f"there are {count} files, the bound; delete some"
            raise ApiError(400, message, param="file", code="too_many_files")
        return Upload(self)

    def add(self, file_id: str, filename: str, purpose: str) -> None:
        """Makes a file known whose content is there; no effect where it is known."""
        if file_id in self._files:
            return
        size = self.path_of(file_id).stat().st_size
        record = FileRecord(file_id, size, int(time.time()), filename, purpose)
        write_whole(self._record_path(file_id), json.dumps(asdict(record)).encode())
        self._files[file_id] = record

    def remove(self, file_id: str) -> None:
        """Removes a file. Raises ApiError where there is none."""
        self.get(file_id)
        del self._files[file_id]
        self._record_path(file_id).unlink(missing_ok=True)
        self.path_of(file_id).unlink(missing_ok=True)

    def _record_path(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"

    def _reserve(self, size: int) -> None:
        total = sum(record.bytes for record in self._files.values()) + self._upload_bytes + size
        if total > self._max_bytes:
            message = f"the files have more than {self._max_bytes} bytes, the bound; delete some"
            raise ApiError(400, message, param="file", code="too_many_files")
        self._upload_bytes += size

    def close(self) -> None:
        """Removes a temporary folder; a second call has no effect."""
        self._lock.close()
        if self._temporary is not None:
            self._temporary.cleanup()


class Upload:
    """A file that is being written. `reserve` and the ends are called on the event loop, `write` on
    any thread."""

    def __init__(self, store: FileStore):
        self.id = make_id("file")
        self.num_bytes = 0
        self._store = store
        self._file: BinaryIO = store.path_of(self.id).open("wb")
        self._is_open = True
        store._num_uploads += 1

    def reserve(self, size: int) -> None:
        """Takes room for more. Raises ApiError where there is none."""
        self._store._reserve(size)
        self.num_bytes += size

    def write(self, data: bytes) -> None:
        """Appends what room was taken for."""
        self._file.write(data)

    def sync(self) -> None:
        """Waits for the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def commit(self, filename: str, purpose: str) -> FileRecord:
        """Makes it a file."""
        self._end()
        self._store.add(self.id, filename, purpose)
        return self._store.get(self.id)

    def discard(self) -> None:
        """Removes it, where it was not made a file."""
        if self._is_open:
            self._end()
            self._store.path_of(self.id).unlink(missing_ok=True)

    def _end(self) -> None:
        self._is_open = False
        self._file.close()
        self._store._num_uploads -= 1
        self._store._upload_bytes -= self.num_bytes
