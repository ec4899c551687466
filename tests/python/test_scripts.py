"""What check_layers, check_isa_symbols and model_table accept and refuse, what setup.sh installs,
and that the library can be built as the documents say and from a source distribution."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import check_layers as layers  # noqa: E402


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def make_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- check_layers.py: C++ ---


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("include/allspark/x.h", "#include <vector>"),
        ("include/allspark/x.h", '#include "allspark/status.h"'),
        ("base/x.cc", '#include "allspark/status.h"'),
        ("memory/x.cc", '#include "base/check.h"'),
        ("tensor/x.h", '#include "memory/allocator.h"'),
        ("kernels/ref/x.cc", '#include "base/dtype.h"'),
        ("kernels/cuda/x.cu", "#include <cuda_runtime.h>"),
        ("kernels/cpu/x_avx2.cc", "#include <immintrin.h>"),
        ("kernels/cpu/x_neon.cc", "#include <arm_neon.h>"),
        ("ops/x.cc", '#include "memory/step_arena.h"'),
        ("weights/x.cc", '#include "proto/allspark.pb.h"'),
        ("model/x.cc", '#include "kernels/kernel_table.h"'),  # through ops
        ("scheduler/x.cc", '#include "kv_cache/block_pool.h"'),
        ("engine/x.cc", '#include "scheduler/scheduler.h"'),
        ("python/x.cc", '#include "engine/testing.h"'),
        ("bench/x.cc", '#include "kernels/args.h"'),
        ("base/x.cc", '// #include "engine/engine_impl.h"'),
    ],
)
def test_allowed_include(tmp_path: Path, path: str, line: str) -> None:
    make_tree(tmp_path, {f"csrc/{path}": f"{line}\n"})
    result = run("check_layers.py", tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("include/allspark/x.h", '#include "base/dtype.h"', "standard library only"),
        ("include/allspark/x.h", "#include <google/protobuf/message.h>", "standard library only"),
        ("include/allspark/x.h", "#include <unistd.h>", "standard library only"),
        ("base/x.cc", '#include "memory/allocator.h"', "base must not include memory"),
        ("memory/x.cc", '#include "platform/thread_pool.h"', "memory must not include platform"),
        ("kernels/x.cc", '#include "base/check.h"', "kernels must not include base"),
        ("kernels/ref/x.cc", '#include "tensor/tensor_view.h"', "kernels must not include tensor"),
        ("kernels/x.cc", '#include "allspark/status.h"', "must not include public headers"),
        ("platform/x.cc", "#include <cuda_runtime.h>", "outside a cuda/ folder"),
        ("ops/x.cc", '#include "proto/allspark.pb.h"', "ops must not include proto"),
        ("weights/x.cc", '#include "ops/linear.h"', "weights must not include ops"),
        ("kv_cache/x.cc", '#include "tensor/tensor_view.h"', "kv_cache must not include tensor"),
        ("scheduler/x.cc", '#include "platform/thread_pool.h"', "must not include platform"),
        ("sampling/x.cc", '#include "model/batch.h"', "sampling must not include model"),
        ("python/x.cc", '#include "base/check.h"', "python must not include base"),
        ("python/x.cc", '#include "engine/step_loop.h"', "python must not include engine"),
        ("base/x.cc", '#include "../memory/allocator.h"', "not a path relative to csrc"),
        ("base/x.cc", '#include "check.h"', "not a path relative to csrc"),
        ("misc/x.cc", "", "misc is no layer"),
    ],
)
def test_refused_include(tmp_path: Path, path: str, line: str, message: str) -> None:
    make_tree(tmp_path, {f"csrc/{path}": f"\n{line}\n"})
    result = run("check_layers.py", tmp_path)
    assert result.returncode == 1
    assert message in result.stdout
    assert f"csrc/{path}:" in result.stdout


def test_isa_source_reaches_a_library_through_our_headers(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {
            "csrc/kernels/cpu/x_avx512.cc": '#include "kernels/cpu/x.inl"\n',
            "csrc/kernels/cpu/x.inl": '#include <immintrin.h>\n#include "kernels/table.h"\n',
            "csrc/kernels/table.h": "#include <cstdint>\n#include <vector>\n",
            "csrc/kernels/table.cc": '#include "kernels/table.h"\n#include <algorithm>\n',
        },
    )
    result = run("check_layers.py", tmp_path)
    assert result.returncode == 1
    assert "csrc/kernels/table.h:2: <vector> reaches x_avx512.cc" in result.stdout
    assert "algorithm" not in result.stdout


MAP = """| layer | what it holds | may include |
|---|---|---|
| `include/allspark` | the public API | the standard library |
"""


def map_of(**changes: str) -> str:
    """csrc/README.md's table from the rules, with other cells for some layers; "": no row."""
    rows = {}
    for layer, below in layers.LAYERS.items():
        allowed = [*below, *layers.EXTRA_HEADERS.get(layer, ())]
        rows[layer] = ", ".join(allowed).replace("*", "everything") or "public headers"
    cells = {**rows, **changes}
    return MAP + "".join(f"| `{name}` | x | {cell} |\n" for name, cell in cells.items() if cell)


def make_mapped_tree(root: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    layers = [line.split("`")[1] for line in map_of().splitlines() if "`" in line]
    make_tree(root, {f"csrc/{layer}/x.cc": "" for layer in layers})
    make_tree(root, {"csrc/include/allspark/x.h": "", "csrc/README.md": map_of(**changes)})
    return run("check_layers.py", root)


def test_the_map_of_the_layers_is_the_rules(tmp_path: Path) -> None:
    result = make_mapped_tree(tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels/cuda": "as `kernels`, and CUDA"}, "names kernels/cuda, which is no folder"),
        ({"kv_cache": ""}, "the table lacks kv_cache"),
        ({"ops": "kernels, tensor"}, "ops may include kernels, tensor, but the rules are"),
        ({"kv_cache": "base, tensor"}, "kv_cache may include base, tensor, but"),
        ({"base": "everything"}, "base may include everything, but the rules are public headers"),
    ],
)
def test_a_map_that_is_wrong_is_refused(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    result = make_mapped_tree(tmp_path, **changes)
    assert result.returncode == 1
    assert message in result.stdout


def test_the_options_of_the_build_are_those_that_are_described() -> None:
    root = SCRIPTS.parent
    build = (root / "CMakeLists.txt").read_text(encoding="utf-8")
    options = re.findall(r"^(?:option|set)\((ALLSPARK_[A-Z]+)\b", build, re.MULTILINE)
    readme = (root / "csrc" / "README.md").read_text(encoding="utf-8")
    described = readme.partition("Presets:")[2].partition("\n\n")[0]
    assert options
    assert set(re.findall(r"`(ALLSPARK_[A-Z]+)`", described)) == set(options)
    presets = json.loads((root / "CMakePresets.json").read_text(encoding="utf-8"))
    names = {preset["name"] for preset in presets["configurePresets"]} - {"base"}
    assert set(re.findall(r"`([a-z]+[0-9]*)`", described)) == names


# --- The library, by the documents and from a source distribution ---

ROOT = SCRIPTS.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_library_of_the_documents_needs_no_tests_and_no_known_compiler() -> None:
    presets = json.loads(read("CMakePresets.json"))
    for page in ("README.md", "docs/cpp_api.md"):
        (name,) = re.findall(r"cmake --preset (\w+) && cmake --build --preset \1\n", read(page))
        (preset,) = (each for each in presets["configurePresets"] if each["name"] == name)
        assert {"ALLSPARK_TESTS": "OFF", "ALLSPARK_WERROR": "OFF"}.items() <= preset[
            "cacheVariables"
        ].items()
        assert name in {each["name"] for each in presets["buildPresets"]}
        assert f"cmake --install build/{name} --prefix" in read(page)


def test_the_packages_of_the_documents_are_those_that_are_installed() -> None:
    always = function_of_setup("missing_packages").partition('if [ "$want_')[0]
    installed = set(re.findall(r"echo ([\w+-]+)$", always, re.MULTILINE))
    of_python = {"python3", "python3-dev", "python3-venv"}
    for page, left_out in (("docs/cpp_api.md", of_python), ("docs/quick_start.md", {"python3"})):
        listed = re.search(r"^apt-get install (.*)$", read(page), re.MULTILINE)
        assert listed is not None
        assert set(listed[1].split()) == installed - left_out


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_source_distribution_has_all_sources() -> None:
    patterns: dict[str, list[str]] = {}
    for line in read("MANIFEST.in").splitlines():
        command, folder, *names = line.split()
        if command == "recursive-include":
            patterns[folder] = names
    tracked = subprocess.run(
        ["git", "ls-files", *patterns], capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    if not tracked:
        pytest.skip("this is no git checkout")
    assert {"cmake", "csrc", "allspark_py", "model_loaders"} <= set(patterns)
    left_out = [
        path
        for path in map(Path, tracked)
        if not any(path.match(pattern) for pattern in patterns[path.parts[0]])
    ]
    assert left_out == []


# --- setup.sh and bench.sh ---


def function_of_setup(name: str) -> str:
    found = re.search(
        rf"^{name}\(\) \{{(?:[^\n]*\}}|.*?^\}})$",
        read("scripts/setup.sh"),
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None, name
    return found[0]


def run_setup(functions: str, commands: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs some functions of setup.sh, after which `commands` may replace others."""
    script = "\n".join([*map(function_of_setup, functions.split()), commands])
    return subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, **kwargs
    )


def make_programs(folder: Path, programs: dict[str, str]) -> None:
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def test_a_half_made_environment_is_made_whole(tmp_path: Path) -> None:
    pytest.importorskip("ensurepip")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / ".allspark-tools").write_text("done\n")
    result = run_setup(
        "is_done set_done make_venv",
        f"""venv={venv}; say() {{ :; }}; hash_of() {{ echo done; }}; has_recent_cmake() {{ :; }}
        python3() {{ {sys.executable} "$@"; }}
        pip() {{ "$venv/bin/python" -m pip --version; echo "pip $*"; }}
        make_venv""",
    )
    assert result.returncode == 0, result.stderr
    assert "pip install -q setuptools" in result.stdout  # what was done before is done again


@pytest.mark.parametrize(
    ("programs", "packages"),
    [
        ([], ["clang-14", "libclang-rt-14-dev"]),
        (["clang++"], ["clang-14", "libclang-rt-14-dev"]),
        (["clang++-14"], ["libclang-rt-14-dev"]),
    ],
)
def test_sanitizers_come_with_their_clang(
    tmp_path: Path, programs: list[str], packages: list[str]
) -> None:
    make_programs(tmp_path, dict.fromkeys(programs, "echo /nowhere"))
    result = run_setup(
        "has_header has_clang has_clang_sanitizers missing_packages",
        "want_test=1 want_native=1 want_slow=0; missing_packages",
        env={"PATH": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert [name for name in result.stdout.split() if "clang" in name] == packages


def test_a_large_torch_is_announced(tmp_path: Path) -> None:
    result = run_setup(
        "install_torch",
        f"""venv={tmp_path}; torch_version=9; is_done() {{ false; }}; set_done() {{ :; }}
        say() {{ :; }}; pip() {{ echo "$*"; [[ "$*" != *+cpu ]]; }}; install_torch""",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["install -q torch==9+cpu", "install -q torch==9"]
    assert "takes the default build" in result.stderr and "PIP_EXTRA_INDEX_URL" in result.stderr


def test_benchmarks_say_what_is_missing(tmp_path: Path) -> None:
    make_programs(tmp_path, {"c++": "exit 1", "cmake": "echo built"})
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run([SCRIPTS / "bench.sh"], capture_output=True, text=True, env=env)
    assert result.returncode == 1 and result.stdout == ""
    assert "no benchmark/benchmark.h (Debian: libbenchmark-dev)" in result.stderr


# --- check_layers.py: Python ---


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("model_loaders/x.py", "def f():\n    import torch\n"),
        ("model_loaders/x.py", "def f():\n    from transformers import AutoTokenizer\n"),
        (
            "model_loaders/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        ),
        ("model_loaders/x.py", "from allspark.engine import Engine\nimport numpy\n"),
        ("allspark_py/x.py", "def f():\n    import transformers\n"),
        ("allspark_py/__init__.py", "from allspark.model_loader import HuggingFaceModel\n"),
        ("allspark_py/serve/x.py", "from allspark.model_loader import HuggingFaceModel\n"),
        ("allspark_py/x.py", "from . import errors\nfrom .errors import A\n"),
        ("allspark_py/eval/x.py", "from allspark.batch import digests\nimport allspark.eval.y\n"),
        ("allspark_py/eval/x.py", "from allspark.chat_template import base\n"),  # through batch
        ("allspark_py/eval/lm_eval.py", "import lm_eval.tasks\n"),
        ("allspark_py/cli/x.py", "from allspark import eval, serve\n"),
    ],
)
def test_allowed_import(tmp_path: Path, path: str, text: str) -> None:
    make_tree(tmp_path, {path: text})
    result = run("check_layers.py", tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("model_loaders/x.py", "\nimport torch.nn as nn\n", "x.py:2: torch is imported inside"),
        ("model_loaders/x.py", "try:\n    import torch\nexcept ImportError:\n    pass\n", "torch"),
        ("model_loaders/x.py", "class A:\n    import torch\n", "torch is imported inside"),
        ("model_loaders/x.py", "from safetensors.torch import save_file\n", "torch is imported"),
        ("model_loaders/a/x.py", "from transformers import AutoTokenizer\n", "transformers is"),
        ("allspark_py/x.py", "import transformers\n", "transformers is imported inside"),
        ("allspark_py/x.py", "def f():\n    import torch\n", "only model_loaders"),
        ("allspark_py/engine.py", "from allspark import model_loader\n", "allspark.model_loader"),
        ("allspark_py/engine.py", "from .model_loader import x\n", "must not import"),
        ("allspark_py/engine.py", "def f():\n    import allspark.cli.main\n", "allspark.cli"),
        ("allspark_py/batch/x.py", "from allspark import eval\n", "batch must not import"),
        ("allspark_py/eval/x.py", "def f():\n    import allspark.serve\n", "eval must not import"),
        ("allspark_py/new/x.py", "from allspark import pipeline\n", "new is no package of the"),
        ("allspark_py/eval/x.py", "def f():\n    import lm_eval\n", "may import lm_eval"),
    ],
)
def test_refused_import(tmp_path: Path, path: str, text: str, message: str) -> None:
    make_tree(tmp_path, {path: text})
    result = run("check_layers.py", tmp_path)
    assert result.returncode == 1
    assert message in result.stdout


def test_this_repository_keeps_its_layers() -> None:
    result = run("check_layers.py")
    assert result.returncode == 0, result.stdout


# --- check_isa_symbols.py ---

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


def compile_isa_object(tmp_path: Path, source: str) -> Path:
    folder = tmp_path / "build" / "csrc" / "kernels" / "cpu"
    folder.mkdir(parents=True)
    (tmp_path / "k.cc").write_text(source)
    command = [COMPILER, "-std=c++20", "-O1", "-c", tmp_path / "k.cc", "-o", folder / "k_avx2.cc.o"]
    subprocess.run([str(part) for part in command], check=True)
    return tmp_path / "build"


@needs_compiler
def test_one_exported_function_passes(tmp_path: Path) -> None:
    build = compile_isa_object(
        tmp_path, "namespace { int F(int x) { return x + 1; } }\nint Fill(int x) { return F(x); }\n"
    )
    result = run("check_isa_symbols.py", build)
    assert result.returncode == 0, result.stdout
    assert "1 object(s), 0 problem(s)" in result.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("#include <vector>\nvoid F(std::vector<int>& v) { v.push_back(1); }\n", "C++ library"),
        ("[[gnu::noinline]] inline int G() { return 1; }\nint F() { return G(); }\n", "weak"),
        ("int F() { return 1; }\nint G() { return 2; }\n", "exports 2 symbols"),
        ("int F() { return 1; }\nint counter = 3;\n", "exports data: counter"),
        ("static int F() { return 1; }\nstatic int x = F();\n", "exports 0 symbols"),
    ],
)
def test_leaking_object_is_refused(tmp_path: Path, source: str, message: str) -> None:
    result = run("check_isa_symbols.py", compile_isa_object(tmp_path, source))
    assert result.returncode == 1
    assert message in result.stdout


def test_a_build_without_isa_objects_is_refused_where_there_should_be_some(tmp_path: Path) -> None:
    result = run("check_isa_symbols.py", tmp_path)
    has_isa_files = os.uname().machine in ("x86_64", "aarch64")
    assert result.returncode == (1 if has_isa_files else 0)


# --- model_table.py ---

CASE = '<testcase classname="tests.python.test_architectures" name="test_float32_logits[{}]">{}'


def table_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *argv: str, **outcome: str
) -> tuple[Path, str]:
    """Runs model_table.py on a run in which rows a1 and a2 are one family and b is another."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import model_table

    cases = {"a1": "", "a2": "", "b": ""} | outcome
    text = "".join(CASE.format(*case) + "</testcase>" for case in cases.items())
    (tmp_path / "run.xml").write_text(f"<testsuite>{text}</testsuite>")
    document = tmp_path / "models.md"
    if not document.exists():
        ticks = ["✓", *"–" * (len(model_table.COLUMNS) - 1)]
        families = [[f"`{name}ForCausalLM`", *ticks] for name in "AB"]
        before = model_table.as_text([["architecture", *model_table.COLUMNS], *families])
        document.write_text(f"{model_table.BEGIN}\n\n{before}\n\n{model_table.END}\n")
    rows = {"AForCausalLM": ["a1", "a2"], "BForCausalLM": ["b"]}
    monkeypatch.setattr(model_table, "rows_of_architectures", lambda: rows)
    monkeypatch.setattr(model_table, "DOCUMENT", document)
    monkeypatch.setattr(sys, "argv", ["model_table.py", *argv, str(tmp_path / "run.xml")])
    try:
        model_table.main()
    except SystemExit as end:
        return document, str(end)
    return document, ""


def test_ticks_of_passed_tests_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert table_of(monkeypatch, tmp_path, "--check")[1] == ""


@pytest.mark.parametrize("what", ["<failure/>", "<error/>", '<skipped message="no data"/>'])
def test_a_tick_whose_test_did_not_pass_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    message = "`AForCausalLM`, float32: models.md says ✓, the run –"
    assert message in table_of(monkeypatch, tmp_path, "--check", a2=what)[1]
    document, _ = table_of(monkeypatch, tmp_path, a2=what)
    assert "| `AForCausalLM` | – |" in document.read_text()
    assert "| `BForCausalLM` | ✓ |" in document.read_text()
    # And in the other direction: a cell that passes again must be ticked again, or the check fails.
    assert "says –, the run ✓" in table_of(monkeypatch, tmp_path, "--check")[1]


def test_an_error_after_a_test_that_passed_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    second_entry = "</testcase>" + CASE.format("b", "<error/>")
    _, message = table_of(monkeypatch, tmp_path, "--check", b=second_entry)
    assert "`BForCausalLM`, float32" in message and "AForCausalLM" not in message


def test_a_run_without_a_ticked_test_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CASE", CASE.replace("float32", "other"))
    message = table_of(monkeypatch, tmp_path, "--check")[1]
    assert message.count("says ✓, the run –") == 2


# --- check_clang.py ---


@needs_compiler
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int two() { return 2; }\n", ""),
        ("int two() { return three; }\n", "three"),
        ("int two() { int unused = 3; return 2; }\n", "unused"),  # -Werror is among the flags
    ],
)
def test_a_source_is_read_with_the_flags_of_its_build(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "x.cc").write_text(text)
    command = f"/usr/bin/ccache {COMPILER} -Wall -Werror -o x.o -c x.cc"
    entry = {"directory": str(tmp_path), "file": "x.cc", "command": command}
    (tmp_path / "compile_commands.json").write_text(json.dumps([entry]))
    # Any compiler that knows -fsyntax-only stands for clang.
    result = run("check_clang.py", tmp_path, COMPILER)
    assert result.returncode == (1 if message else 0), result.stdout
    assert message in result.stdout
    assert not (tmp_path / "x.o").exists()


@needs_compiler
def test_sources_are_read_with_more_flags(tmp_path: Path) -> None:
    (tmp_path / "x.cc").write_text("int two(int unused) { return 2; }\n")
    entry = {"directory": str(tmp_path), "file": "x.cc", "command": f"{COMPILER} -Werror -c x.cc"}
    (tmp_path / "compile_commands.json").write_text(json.dumps([entry]))
    assert run("check_clang.py", tmp_path, COMPILER).returncode == 0
    result = run("check_clang.py", tmp_path, COMPILER, "-Wunused-parameter")
    assert result.returncode == 1 and "unused" in result.stdout


def test_common_headers_are_parsed_once(tmp_path: Path) -> None:
    log, header = tmp_path / "log", tmp_path / "header"
    clang = tmp_path / "clang"
    clang.write_text(
        f"""#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *c++-header*) for word; do case "$word" in *.h) cp "$word" {header} ;; esac; done ;;
  *7.cc) echo "7.cc is wrong" >&2; exit 1 ;;
esac
"""
    )
    clang.chmod(0o755)
    entries = []
    for i in range(12):
        name = f"{i}.cc"
        rare = "#include <map>\n" if i == 3 else ""
        (tmp_path / name).write_text(f'#include <vector>\n{rare}#include "own.h"\n')
        flags = f"-I/{i} -std=c++20 {'-O3' if i == 11 else '-O2'}"
        command = f"c++ {flags} -o {i}.o -c {name}"
        entries.append({"directory": str(tmp_path), "file": name, "command": command})
    (tmp_path / "compile_commands.json").write_text(json.dumps(entries))
    result = run("check_clang.py", tmp_path, str(clang))
    assert result.returncode == 1
    assert result.stdout == "7.cc is wrong\ncheck_clang: 12 source(s), 1 with problems\n"
    calls = log.read_text().splitlines()
    assert len(calls) == 13
    assert sum("c++-header" in call for call in calls) == 1
    assert sum("-include-pch" in call for call in calls) == 11  # one has other flags, alone
    assert header.read_text() == "#include <vector>\n"


@needs_compiler
def test_sources_that_are_compiled_at_once_are_read_one_by_one(tmp_path: Path) -> None:
    unity = tmp_path / "Unity"
    unity.mkdir()
    (tmp_path / "a.cc").write_text("#include <vector>\nstd::vector<int> a;\n")
    (tmp_path / "b.cc").write_text("std::vector<int> b;\n")  # builds after a.cc alone
    name = unity / "unity_0_cxx.cxx"
    name.write_text("".join(f'#include "{tmp_path}/{part}.cc"\n' for part in "ab"))
    command = f"{COMPILER} -o x.o -c {name}"
    entry = {"directory": str(tmp_path), "file": str(name), "command": command}
    (tmp_path / "compile_commands.json").write_text(json.dumps([entry]))
    result = run("check_clang.py", tmp_path, COMPILER)
    assert result.returncode == 1 and "b.cc" in result.stdout
    assert result.stdout.endswith("check_clang: 2 source(s), 1 with problems\n")


@pytest.mark.parametrize("database", [None, "[]"])
def test_no_sources_are_a_problem(tmp_path: Path, database: str | None) -> None:
    if database is not None:
        (tmp_path / "compile_commands.json").write_text(database)
    assert run("check_clang.py", tmp_path, "clang++").returncode == 1


# --- check_arm_kernels.py ---


CLANG = shutil.which("clang++-14") or shutil.which("clang++")


@pytest.mark.skipif(CLANG is None, reason="there is no clang")
@pytest.mark.parametrize("bad", [False, True])
def test_kernels_of_arm_are_read_on_any_processor(tmp_path: Path, bad: bool) -> None:
    (tmp_path / "cmake").mkdir()
    (tmp_path / "cmake" / "AllsparkLayers.cmake").write_text(
        "set(ALLSPARK_ISA_avx2 -mavx2)\nset(ALLSPARK_ISA_neon $<$<X:Y>:-fno-z>)\n"
        "set(ALLSPARK_ISA_neon_dotprod ${ALLSPARK_ISA_neon} -march=armv8.2-a+dotprod)\n"
    )
    folder = tmp_path / "csrc" / "kernels" / "cpu"
    folder.mkdir(parents=True)
    text = "#include <arm_neon.h>\n#include <cstdint>\nstatic_assert(sizeof(uintptr_t) == 8);\n"
    (folder / "kernels_neon.cc").write_text(text)
    dot = "int32x4_t Dot(int32x4_t c, int8x16_t x) { return vdotq_s32(c, x, x); }\n"
    (folder / "kernels_neon_dotprod.cc").write_text(text + ("wrong\n" if bad else dot))
    result = run("check_arm_kernels.py", CLANG, tmp_path)
    assert result.returncode == bad, result.stdout
    assert f"2 source(s), {int(bad)} with problems" in result.stdout
    assert ("wrong" in result.stdout) == bad


def test_there_must_be_kernels_of_arm(tmp_path: Path) -> None:
    (tmp_path / "cmake").mkdir()
    (tmp_path / "cmake" / "AllsparkLayers.cmake").write_text("set(ALLSPARK_ISA_avx2 -mavx2)\n")
    clang = tmp_path / "clang"
    clang.write_text("#!/bin/sh\n")
    clang.chmod(0o755)
    result = run("check_arm_kernels.py", clang, tmp_path)
    assert result.returncode == 1
    assert "names no instruction set of Arm" in result.stdout
