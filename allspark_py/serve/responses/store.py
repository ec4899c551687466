"""ResponseStore: bytes of responses, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from allspark.serve.responses.shelf import Shelf


class NoRoomError(Exception):
    """An entry is refused: it is too large, or what runs fills the store."""


@dataclass(frozen=True)
class Bounds:
    """Of a store: entries, bytes of all of them, and seconds since the last use of one; 0 seconds:
    no bound."""

    entries: int
    bytes: int
    lifetime_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"the bound of {name} is {value}; it must be at least 0")


class ResponseStore:
    """Entries by id. Those of responses that run stay; of the others the one goes first whose last
    use is longest ago. One thread at a time calls.

    Args:
        clock: the time in seconds. With a shelf that outlives the process it is the time of day.
    """

    def __init__(self, shelf: Shelf, bounds: Bounds, clock: Callable[[], float]):
        self._shelf = shelf
        self._bounds = bounds
        self._clock = clock
        self._ended = OrderedDict[str, tuple[int, float]]()  # size and last use, oldest first
        self._running: dict[str, int] = {}  # size
        self._num_bytes = 0
        for id, size, used in shelf.load():
            self._ended[id] = (size, used)
            self._num_bytes += size
        self._make_room(0, 0)

    def __len__(self) -> int:
        return len(self._ended) + len(self._running)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._num_bytes

    def get(self, id: str) -> bytes | None:
        """An entry, which is thereby used; None if there is none."""
        self._expire()
        if id in self._ended:
            now = self._clock()
            self._ended[id] = (self._ended[id][0], now)
            self._ended.move_to_end(id)
            self._shelf.touch(id, now)
        elif id not in self._running:
            return None
        return self._shelf.read(id)

    def put(self, id: str, data: bytes, is_running: bool = False) -> None:
        """Adds an entry or takes the place of one; others go where there is no room.

        Raises:
            NoRoomError: there is none beside what runs. The entry of that id is gone.
        """
        self._remove(id)
        size, bounds = len(data), self._bounds
        if len(self._running) + 1 > bounds.entries:
            raise NoRoomError(f"{len(self._running)} responses run; the bound is {bounds.entries}")
        fixed = sum(self._running.values())
        if size + fixed > bounds.bytes:
            beside = f" beside {fixed} of responses that run" if fixed else ""
            raise NoRoomError(f"it has {size} bytes{beside}; the bound is {bounds.bytes}")
        self._make_room(1, size)
        now = self._clock()
        self._shelf.write(id, data, now)
        self._num_bytes += size
        if is_running:
            self._running[id] = size
        else:
            self._ended[id] = (size, now)

    def delete(self, id: str) -> bool:
        """Removes an entry; False if there is none."""
        self._expire()
        return self._remove(id)

    def expire(self) -> int:
        """Removes what was not used for the lifetime; returns how many entries there still are."""
        self._expire()
        return len(self)

    def close(self) -> None:
        """Ends the use of the shelf."""
        self._shelf.close()

    def _expire(self) -> None:
        lifetime = self._bounds.lifetime_s
        if lifetime:
            end = self._clock() - lifetime
            while self._ended and next(iter(self._ended.values()))[1] <= end:
                self._remove_oldest()

    def _make_room(self, entries: int, size: int) -> None:
        self._expire()
        bounds = self._bounds
        while self._ended and (
            len(self) + entries > bounds.entries or self._num_bytes + size > bounds.bytes
        ):
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        self._remove(next(iter(self._ended)))

    def _remove(self, id: str) -> bool:
        if id in self._ended:
            size, _ = self._ended.pop(id)
        elif id in self._running:
            size = self._running.pop(id)
        else:
            return False
        self._num_bytes -= size
        self._shelf.remove(id)
        return True
