"""The store of responses: its bounds, its file, and the library that the server uses."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import stat
from collections import OrderedDict

import pytest

pytest.importorskip("fastapi")

from allspark.serve.responses.record import OutputItem, Record  # noqa: E402
from allspark.serve.responses.shelf import FileShelf, MemoryShelf  # noqa: E402
from allspark.serve.responses.store import Bounds, NoRoomError, ResponseStore  # noqa: E402

MANY = Bounds(entries=1000, bytes=1 << 20, lifetime_s=100.0)


class Clock:
    """A time that the test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=["memory", "file"])
def make_store(request, clock, tmp_path):
    """Makes stores; with a file a second one opens what the first left."""
    stores = []

    def make(bounds):
        while stores:
            stores.pop().close()
        is_file = request.param == "file"
        shelf = FileShelf(str(tmp_path / "responses.db")) if is_file else MemoryShelf()
        stores.append(ResponseStore(shelf, bounds, clock))
        return stores[-1]

    make.survives = request.param == "file"
    yield make
    for store in stores:
        store.close()


def test_entries_are_found_and_replaced(make_store):
    store = make_store(MANY)
    store.put("a", b"123")
    store.put("b", b"4567")
    assert (store.get("a"), store.get("b"), store.get("c")) == (b"123", b"4567", None)
    store.put("a", b"x")
    assert store.get("a") == b"x" and (len(store), store.num_bytes) == (2, 5)
    assert store.delete("a") and not store.delete("a")
    assert store.get("a") is None and (len(store), store.num_bytes) == (1, 4)


def test_the_least_used_goes_first(make_store, clock):
    store = make_store(Bounds(3, 1 << 20, 0))
    for name in "abc":
        store.put(name, b"1")
        clock.now += 1
    assert store.get("a")
    store.put("d", b"1")
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]


def test_bytes_are_bounded(make_store):
    store = make_store(Bounds(100, 10, 0))
    store.put("a", b"1234")
    store.put("b", b"1234")
    store.put("c", b"12")
    assert len(store) == 3 and store.num_bytes == 10
    store.put("d", b"1")
    assert store.get("a") is None and store.num_bytes == 7
    store.put("e", b"x" * 10)
    assert (len(store), store.num_bytes) == (1, 10)
    with pytest.raises(NoRoomError, match="it has 11 bytes; the bound is 10"):
        store.put("f", b"x" * 11)
    assert store.get("e") == b"x" * 10  # nothing went for what finds no room


def test_what_is_not_used_for_the_lifetime_goes(make_store, clock):
    store = make_store(Bounds(100, 1000, 10.0))
    store.put("a", b"1")
    store.put("b", b"1")
    clock.now += 9.9
    assert store.get("a")
    clock.now += 0.1
    assert store.get("b") is None and store.get("a")
    clock.now += 9.9
    assert store.expire() == 1
    clock.now += 0.2
    assert store.expire() == 0 and store.num_bytes == 0
    forever = make_store(Bounds(100, 1000, 0))
    forever.put("a", b"1")
    clock.now += 1e9
    assert forever.get("a")


def test_what_runs_stays(make_store, clock):
    store = make_store(Bounds(2, 10, 10.0))
    store.put("run", b"12345", is_running=True)
    store.put("a", b"1")
    store.put("b", b"1")
    clock.now += 100
    assert store.get("a") is None and store.get("run") == b"12345"
    with pytest.raises(NoRoomError, match="6 bytes beside 5 of responses that run; the"):
        store.put("c", b"123456")
    store.put("other", b"1", is_running=True)
    with pytest.raises(NoRoomError, match="2 responses run; the bound is 2"):
        store.put("c", b"1")
    store.put("run", b"1")  # it has ended
    store.put("c", b"1")
    assert store.get("run") is None and store.get("other") and store.get("c")


def test_no_bound_is_below_zero():
    for bounds in ((-1, 0, 0), (0, -1, 0), (0, 0, -0.5)):
        with pytest.raises(ValueError, match="must be at least 0"):
            Bounds(*bounds)


def test_random_use_against_a_model(make_store, clock):
    """The same calls on a store and on a plain model of its rules."""
    random.seed(3)
    bounds = Bounds(5, 40, 20.0)
    store = make_store(bounds)
    model = OrderedDict()  # id -> (data, used)

    def expire():
        for name in [n for n, (_, used) in model.items() if used <= clock.now - 20]:
            del model[name]

    for _ in range(800):
        clock.now += random.choice((0, 1, 3, 9))
        name = random.choice("abcdefgh")
        action = random.random()
        expire()
        if action < 0.5:
            data = bytes(random.randrange(0, 30))
            store.put(name, data)
            model.pop(name, None)
            while len(model) >= 5 or sum(len(d) for d, _ in model.values()) + len(data) > 40:
                model.popitem(last=False)
            model[name] = (data, clock.now)
        elif action < 0.8:
            expected = model.get(name, (None, 0))[0]
            assert store.get(name) == expected
            if name in model:
                model[name] = (expected, clock.now)
                model.move_to_end(name)
        elif action < 0.95:
            assert store.delete(name) == (name in model)
            model.pop(name, None)
        elif make_store.survives:
            store = make_store(bounds)
        assert store.expire() == len(model)
        assert store.num_bytes == sum(len(data) for data, _ in model.values())


# The file.


def open_file(path, clock, bounds=MANY):
    return ResponseStore(FileShelf(str(path)), bounds, clock)


def test_a_file_outlives_its_store(tmp_path, clock):
    path = tmp_path / "responses.db"
    store = open_file(path, clock)
    for name in "abc":
        store.put(name, name.encode())
        clock.now += 1
    store.put("run", b"run", is_running=True)
    store.get("a")
    store.close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    # What ran does so no longer, and the order of use is that of before.
    store = open_file(path, clock, Bounds(3, 1000, 100.0))
    assert [name for name in ("a", "b", "c", "run") if store.get(name)] == ["a", "c", "run"]
    store.close()
    clock.now += 101
    store = open_file(path, clock)
    assert len(store) == 0
    store.close()


def test_one_store_has_a_file(tmp_path, clock):
    path = tmp_path / "responses.db"
    store = open_file(path, clock)
    with pytest.raises(ValueError, match="locked"):
        open_file(path, clock)
    store.close()
    open_file(path, clock).close()


def test_what_is_no_store_is_refused_and_left_alone(tmp_path, clock):
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(ValueError, match="response_store '.*notes.txt' cannot be opened"):
        open_file(text, clock)
    assert text.read_text() == "not a database " * 100
    with pytest.raises(ValueError, match="cannot be opened"):
        open_file(tmp_path / "nowhere" / "x.db", clock)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE things (a)")
    file.close()
    with pytest.raises(ValueError, match="its format is 0; this version reads 1"):
        open_file(other, clock)
    newer = tmp_path / "newer.db"
    open_file(newer, clock).close()
    with sqlite3.connect(newer) as file:
        file.execute("PRAGMA user_version = 7")
    file.close()
    with pytest.raises(ValueError, match="its format is 7"):
        open_file(newer, clock)


def test_what_was_deleted_is_not_in_the_file(tmp_path, clock):
    path = tmp_path / "responses.db"
    store = open_file(path, clock)
    store.put("a", b"a secret of the user" * 50)
    store.delete("a")
    store.close()
    data = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    assert b"a secret" not in data


# Records.


def test_a_record_is_the_same_after_a_store():
    item = OutputItem("message", "msg_1", pieces=["a", "b\u20ac"], rows=[[{"token": "a"}], []])
    call = OutputItem("function_call", "fc_1", "call_1", "clock", ["{", "}"], None, True, False)
    head = {"id": "resp_1", "previous_response_id": None, "background": False}
    record = Record(head, [{"id": "x"}], [item, call], usage={"input_tokens": 3})
    again = Record.from_bytes(record.to_bytes())
    assert again == record and again.response() == record.response()


# The library.


def test_a_server_without_requests_removes_what_has_expired(clock):
    from allspark.serve.responses.library import Library
    from allspark.serve.settings import ServerSettings

    class Ended:
        """A response that has ended."""

        def __init__(self, name):
            head = {"id": name, "previous_response_id": None, "background": False}
            self.record = Record(head, [], status="completed")

        def cancel(self, failure=None):
            pass

        async def ended(self):
            pass

    async def run():
        short = Library(ServerSettings(response_lifetime=5.0), clock)
        assert short._sweep_s == 1.0
        short.close()
        # So long that no sweep comes by itself.
        library = Library(ServerSettings(response_lifetime=10_000.0), clock)
        runs = [Ended(f"resp_{i}") for i in range(3)]
        for each in runs[:2]:
            library.running[each.record.id] = each
            library.keep(each)
            # Until it is stored it is found among those that run.
            assert await library.find(each.record.id) == each.record
        await library.end()
        assert not library.running
        clock.now += 6000
        library.keep(runs[2])
        await library.end()
        await library._sweep()
        assert len(library._store) == 3
        assert library._sweeper is not None and library._sweep_s == 1000.0
        clock.now += 5000
        library._begin_sweep()
        await library._sweeper
        assert len(library._store) == 1 and library._sweeper is not None
        clock.now += 10_000
        library._begin_sweep()
        await library._sweeper
        assert len(library._store) == 0 and library._sweeper is None
        library.close()

    asyncio.run(run())
