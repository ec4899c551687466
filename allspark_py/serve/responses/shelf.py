"""Where a ResponseStore puts its bytes: in memory, or in a file that outlives the server."""

from __future__ import annotations

import os
import sqlite3
from typing import Protocol

_FORMAT = 1  # of the file's tables; `user_version` of the file
_SCHEMA = "CREATE TABLE responses (id TEXT PRIMARY KEY, used REAL, size INTEGER, data BLOB)"


class Shelf(Protocol):
    """Bytes by ids. One thread at a time calls."""

    def load(self) -> list[tuple[str, int, float]]:
        """All ids with their sizes, in bytes, and the times of their last use; oldest first."""

    def read(self, id: str) -> bytes: ...

    def write(self, id: str, data: bytes, used: float) -> None: ...

    def touch(self, id: str, used: float) -> None:
        """It was used."""

    def remove(self, id: str) -> None: ...

    def close(self) -> None: ...


class MemoryShelf:
    """A shelf that ends with the process."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def load(self) -> list[tuple[str, int, float]]:
        return []

    def read(self, id: str) -> bytes:
        return self._data[id]

    def write(self, id: str, data: bytes, used: float) -> None:
        self._data[id] = data

    def touch(self, id: str, used: float) -> None:
        pass

    def remove(self, id: str) -> None:
        self._data.pop(id, None)

    def close(self) -> None:
        self._data.clear()


class FileShelf:
    """A shelf in an SQLite file, which only its owner may read.

    Raises:
        ValueError: the file cannot be opened, is none of this kind, or another server has it.
    """

    def __init__(self, path: str):
        try:
            # Before SQLite does, which would let others read it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._file = sqlite3.connect(
                path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"response_store {path!r} cannot be opened: {error}") from None

    def _open(self) -> None:
        execute = self._file.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # one server has it
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA secure_delete = ON")  # what was deleted cannot be read from the file
        execute("BEGIN EXCLUSIVE")
        ((version,),) = execute("PRAGMA user_version")
        ((num_tables,),) = execute("SELECT count(*) FROM sqlite_master")
        if version == 0 and num_tables == 0:
            execute(_SCHEMA)
            execute(f"PRAGMA user_version = {_FORMAT}")
        elif version != _FORMAT:
            message = f"its format is {version}; this version reads {_FORMAT}"
            execute("ROLLBACK")
            self._file.close()
            raise OSError(message)
        execute("COMMIT")

    def load(self) -> list[tuple[str, int, float]]:
        return list(self._file.execute("SELECT id, size, used FROM responses ORDER BY used"))

    def read(self, id: str) -> bytes:
        ((data,),) = self._file.execute("SELECT data FROM responses WHERE id = ?", (id,))
        return bytes(data)

    def write(self, id: str, data: bytes, used: float) -> None:
        row = (id, used, len(data), data)
        self._file.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", row)

    def touch(self, id: str, used: float) -> None:
        self._file.execute("UPDATE responses SET used = ? WHERE id = ?", (used, id))

    def remove(self, id: str) -> None:
        self._file.execute("DELETE FROM responses WHERE id = ?", (id,))

    def close(self) -> None:
        self._file.close()
