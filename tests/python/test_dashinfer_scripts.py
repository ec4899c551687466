"""Scripts written for DashInfer run unmodified: dashinfer_scripts/README.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("allspark._allspark")

SCRIPTS = Path(__file__).parent / "dashinfer_scripts"
ANSWER = "answer: 4 + 5 = 9<|im_end|>"


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "allspark.dashinfer_compat", str(SCRIPTS / script), *arguments],
        capture_output=True, text=True, timeout=300, cwd=cwd,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.parametrize(
    ("place", "reading", "data_type"),
    [("memory", "async", "float16"), ("files", "sync", "float32")],
)
def test_basic_example(demo_model, tmp_path, place, reading, data_type):
    result = run(
        "basic.py", str(demo_model), str(tmp_path), place, reading, data_type, cwd=tmp_path
    )
    assert ANSWER in result.stdout.splitlines()
    assert (tmp_path / "export" / "diconfig.yaml").is_file() == (place == "memory")


def test_config_test(tmp_path):
    assert "Ran 1 test" in run("config.py", cwd=tmp_path).stderr


def test_throughput_benchmark(demo_model, tmp_path):
    result = run("throughput.py", str(demo_model), cwd=tmp_path)
    assert "done: 40 of 40" in result.stdout
    assert "Unexpected status" not in result.stdout


@pytest.mark.torch
def test_performance_benchmark(demo_model, tmp_path):
    pytest.importorskip("torch")
    result = run("performance.py", str(demo_model), str(tmp_path), cwd=tmp_path)
    assert "done: 7" in result.stdout
    assert "CPU_NUMA:0,1" in result.stderr


@pytest.mark.torch
def test_json_test(demo_model, tmp_path):
    pytest.importorskip("torch")
    assert "Ran 2 tests" in run("guided.py", str(demo_model), str(tmp_path), cwd=tmp_path).stderr


def test_server(demo_model, tmp_path):
    result = run(
        "server.py", str(demo_model), str(tmp_path), "--max-batch", "4", "--int8-kv-cache",
        cwd=tmp_path,
    )  # fmt: skip
    expected = ["What is 4+5? -> 4 + 5 = 9<|im_end|>", "What is 2+6? -> 2 + 6 = 8<|im_end|>"]
    assert result.stdout.splitlines()[-8:] == expected * 4


def test_every_name_of_the_binding_can_be_imported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from dashinfer.allspark._allspark import *\nprint(testing.__name__)\n")
    assert run(str(script), cwd=tmp_path).stdout == "allspark._allspark.testing\n"


def test_spawned_processes_find_dashinfer(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing
from dashinfer import allspark

def work(queue):
    import dashinfer.allspark.engine
    queue.put(dashinfer.allspark.engine.Engine is allspark.Engine)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    process.join()
    print(process.exitcode or queue.get())
""")
    assert run(str(script), cwd=tmp_path).stdout == "True\n"


def test_a_script_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom beside import VALUE\nprint(VALUE, sys.argv[1:])\n")
    assert run(str(script), "a", "--b", cwd=tmp_path.parent).stdout == "5 ['a', '--b']\n"
