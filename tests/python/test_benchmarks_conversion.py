"""The benchmark of conversions: what it measures, where its files are, and what it leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.benchmarks import check_kept, run_script


@pytest.mark.torch
def test_conversion_is_watched(tmp_path: Path, load) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    # A tiny model is not a Llama, and its rows are shorter than blocks of Q4_K.
    others = ("Meta .pth", "GGUF Q4_K")
    formats = [name for name in load("conversion").FORMATS if name not in others]
    work = tmp_path / "work"
    work.mkdir()
    memory = tmp_path / "memory"
    memory.mkdir()
    folders = ["--work-dir", work, "--memory-dir", memory]
    printed, _ = run_script(
        tmp_path, "conversion", "--shape", "tiny", *folders, "--formats", *formats
    )
    lines = [line for line in printed.splitlines() if line.startswith("|")][2:]
    rows = [line.strip("|").replace(",", "").split("|") for line in lines]
    assert [row[0].strip() for row in rows] == formats
    assert all(0 < int(row[3]) < int(row[4]) for row in rows)  # megabytes
    of = {"format": "safetensors", "files": "in memory"}
    check_kept(tmp_path, "conversion", of, "resident_mb", "convert_s")
    assert [path.name for path in work.iterdir()] == ["tiny"]  # Its kernel table is recorded.
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "needs"),
    [("safetensors", "numpy"), ("GPTQ int4", "numpy"), ("AWQ", "numpy"), ("FP8", "numpy"),
     ("compressed-tensors int8", "numpy"), (".bin", "torch"), ("Meta .pth", "torch"),
     ("GGUF Q8_0", "gguf"), ("GGUF Q4_0", "gguf"), ("GGUF Q4_K", "gguf")],
)  # fmt: skip
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(
    tmp_path: Path, load, name: str, needs: str
) -> None:
    pytest.importorskip(needs)
    conversion = load("conversion")
    tiny = load("checkpoints").SHAPES["tiny"]
    # Rows of whole blocks of every kind.
    shape = dataclasses.replace(tiny, hidden_size=256, inner_size=512, q_heads=16, kv_heads=16)
    form = conversion.FORMATS[name]
    form.write(tmp_path, shape)
    headers = conversion.size_of(tmp_path) - form.weight_bytes(shape)
    assert 0 < headers < 20_000


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load):
    """Runs conversion.py with a conversion that only writes a file: `convert(free, watch)`. `free`:
    the memory of the machine in bytes. Returns the record; `convert.events` is what was done."""
    conversion = load("conversion")
    events: list[Any] = []
    plain = conversion.FORMATS["safetensors"]

    class Quiet:
        def __init__(self, in_process: bool) -> None:
            events.append(f"measure, {in_process}")

        def share(self) -> float:
            return 0.0

    def write(directory: Path, shape: Any) -> None:
        events.append("write")
        plain.write(directory, shape)

    def converted(command: list[str]) -> tuple[float, int, int]:
        source, target = map(Path, command[3:5])
        assert (source / "model.safetensors").is_file() and not target.exists()
        target.mkdir()
        (target / "m.asparam").write_bytes(bytes(1000))
        events.append(target.parent.parent.name)
        return 1.0, 2_000_000, 3_000_000

    def run_main(free: int = 1 << 40, watch: Any = None) -> dict[str, Any]:
        monkeypatch.setattr(load("machine"), "available_bytes", lambda: free)
        monkeypatch.setattr(conversion, "watch", watch or converted)
        conversion.main()
        return load("record").read(tmp_path / "kept.json")

    monkeypatch.setattr(load("machine"), "Others", Quiet)
    monkeypatch.setattr(conversion, "about_engine", lambda work: {"version": "1", "isa": "avx2"})
    monkeypatch.setitem(conversion.FORMATS, "safetensors", dataclasses.replace(plain, write=write))
    for name in ("memory", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "argv", [
        "conversion.py", "--shape", "tiny", "--formats", "safetensors",
        "--memory-dir", str(tmp_path / "memory"), "--work-dir", str(tmp_path / "work"),
        "--json", str(tmp_path / "kept.json"),
    ])  # fmt: skip
    handler = signal.getsignal(signal.SIGTERM)
    run_main.events = events  # type: ignore[attr-defined]
    yield run_main
    signal.signal(signal.SIGTERM, handler)


def left_in(tmp_path: Path) -> list[Path]:
    return [path for name in ("memory", "work") for path in (tmp_path / name).iterdir()]


def test_conversions_are_measured_in_memory(tmp_path: Path, convert, capsys) -> None:
    """Writing the checkpoint is no part of the measurement: it would count as others' work."""
    record = convert()
    assert convert.events == ["write", "measure, True", "memory"]
    (measurement,) = record["measurements"]
    assert measurement["of"] == {"format": "safetensors", "files": "in memory"}
    assert measurement["values"]["anonymous_mb"] == 2.0 and left_in(tmp_path) == []
    assert str(tmp_path) not in json.dumps(record) and "memory" not in record["command"]
    assert "| safetensors | " in capsys.readouterr().out


def test_conversions_without_room_in_memory_are_on_disk(tmp_path: Path, convert, capsys) -> None:
    for free, has_folder in ((1 << 30, True), (1 << 40, False)):
        if not has_folder:
            (tmp_path / "memory").rmdir()
        (measurement,) = convert(free)["measurements"]
        assert measurement["of"]["files"] == "on disk" and convert.events[-1] == "work"
        assert "| safetensors, on disk | " in capsys.readouterr().out
        assert list((tmp_path / "work").iterdir()) == []


def test_room_is_for_the_files_and_for_the_rest(tmp_path: Path, monkeypatch, load) -> None:
    conversion, machine = load("conversion"), load("machine")
    shape, form = load("checkpoints").SHAPES["1B"], conversion.FORMATS["GGUF Q4_0"]
    checkpoint, model = form.weight_bytes(shape), 2 * 1235814400
    assert checkpoint == pytest.approx(695e6, rel=0.01)
    files = checkpoint + model + (1 << 26)
    for free, available, is_enough in (
        (files, files + checkpoint + (1 << 30), True),
        (files - 1, 1 << 40, False),
        (files, files + checkpoint + (1 << 30) - 1, False),
    ):
        usage = shutil._ntuple_diskusage(free, 0, free)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        monkeypatch.setattr(machine, "available_bytes", lambda available=available: available)
        assert conversion.has_room(tmp_path, form, shape) == is_enough
    assert not conversion.has_room(tmp_path / "absent", form, shape)


@pytest.mark.parametrize("how", ["failure", "SIGTERM"])
def test_a_conversion_that_ends_early_leaves_nothing(tmp_path: Path, convert, how: str) -> None:
    def end(command: list[str]) -> tuple[float, int, int]:
        assert len(left_in(tmp_path)) == 1
        if how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it went on")
        sys.exit("the conversion failed")

    with pytest.raises(SystemExit):
        convert(watch=end)
    assert left_in(tmp_path) == []


def test_what_a_killed_run_left_in_memory_is_removed(tmp_path: Path, load, convert) -> None:
    old, other = tmp_path / "memory" / "allspark-conversion-old", tmp_path / "memory" / "of-others"
    for folder in (old, other):
        (folder / "in").mkdir(parents=True)
    with load("conversion").new_folder(tmp_path / "memory") as of_a_run_that_goes_on:
        convert()
        assert set(left_in(tmp_path)) == {other, of_a_run_that_goes_on}
    assert left_in(tmp_path) == [other]


def test_a_watched_process_ends_with_its_watcher(tmp_path: Path, monkeypatch, load) -> None:
    conversion, pid = load("conversion"), tmp_path / "pid"

    def interrupted(seconds: float) -> None:
        if pid.is_file() and pid.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(conversion.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        conversion.watch(["sh", "-c", f"echo $$ > {pid}; exec sleep 60"])
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_files_in_memory_are_not_anonymous_memory(tmp_path: Path, monkeypatch, load) -> None:
    """Mapped pages of a tmpfs count as those of any file do: resident, and not anonymous."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 1 << 28:
        pytest.skip("there is no tmpfs with room")
    conversion = load("conversion")
    reads = """
import mmap, sys, time
from pathlib import Path
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(pages[::4096])
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.001)
print(1.0)
"""
    mapped, seen = tmp_path / "mapped", tmp_path / "seen"
    num_sleeps, sleep = 0, time.sleep

    def sleep_between_looks(seconds: float) -> None:
        nonlocal num_sleeps
        num_sleeps += mapped.exists()
        if num_sleeps == 2:  # one look was after all pages had been read
            seen.touch()
        sleep(seconds)

    monkeypatch.setattr(conversion.time, "sleep", sleep_between_looks)
    with conversion.new_folder(memory) as folder:
        (folder / "file").write_bytes(bytes(1 << 26))
        command = [sys.executable, "-c", reads, str(folder / "file"), str(mapped), str(seen)]
        _, anonymous, resident = conversion.watch(command)
    assert anonymous < 1 << 25 and resident > 1 << 26
