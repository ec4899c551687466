"""README blocks, documentation blocks and examples are run, and links are checked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("csrc/**/*.md")])


def python_blocks() -> list:
    blocks = []
    for path in DOCUMENTS:
        for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S)):
            blocks.append(pytest.param(code, id=f"{path.relative_to(ROOT)}-{i}"))
    return blocks


def run(arguments: list[str], **kwargs) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, cwd=ROOT, **kwargs
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.parametrize("code", python_blocks())
def test_python_blocks_run(code, demo_model):
    run([sys.executable, "-c", code])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.torch
def test_the_table_of_models_is_that_of_the_tests():
    """docs/models.md claims what tests are collected for, and nothing else."""
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    pytest.importorskip("allspark._allspark")
    run([sys.executable, "scripts/model_table.py", "--check"])


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for script in set(re.findall(r"scripts/\w+\.sh", text)):
        assert os.access(ROOT / script, os.X_OK), script


def test_quickstart_example(demo_model):
    result = run([sys.executable, "examples/python/quickstart.py", str(demo_model), "12+35"])
    assert "47" in result.stdout.split("\n", 1)[1]


def test_quickstart_example_names_what_is_wrong(tmp_path):
    result = subprocess.run(
        [sys.executable, "examples/python/quickstart.py", str(tmp_path), "hi"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode != 0
    assert str(tmp_path) in result.stderr


def test_batch_example(demo_model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is 1+1?\n2+3\nwhat is a resultqueue\n")
    result = run([sys.executable, "examples/python/batch.py", str(demo_model), str(prompts)])
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts.read_text().splitlines()
    assert "2" in answers[0]["answer"] and "5" in answers[1]["answer"]
    assert all(answer["finish"] == "stop" for answer in answers)


def test_search_example(demo_model, tmp_path):
    lines = ["What is a ResultQueue?", "How are you?", "zzq qqz zqz"]
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(lines))
    arguments = ["examples/python/search.py", str(demo_model), str(path), lines[1]]
    found = [json.loads(line) for line in run([sys.executable, *arguments]).stdout.splitlines()]
    assert found[0]["line"] == lines[1] and found[0]["similarity"] > 0.999
    assert all(line["perplexity"] > 1 for line in found)


def test_guided_example(demo_model):
    result = run([sys.executable, "examples/python/guided.py", str(demo_model)])
    number, choice, animal = (json.loads(line)["answer"] for line in result.stdout.splitlines())
    assert number.endswith("47")
    assert choice in ("yes", "no")
    assert set(json.loads(animal)) == {"name", "legs"}


def test_lora_example(demo_model):
    """The demo adapter reads every 2 as a 3, and is what its README says."""
    example = ["examples/python/lora.py", str(demo_model), "12+35", "examples/demo_adapter"]
    base, adapter = run([sys.executable, *example]).stdout.splitlines()
    assert base.startswith("without an adapter: ") and "47" in base
    assert adapter.startswith("demo_adapter: ") and "48" in adapter

    from allspark.model_loader import HuggingFaceModel, LoraAdapter

    loader = HuggingFaceModel(str(demo_model), "demo")
    (pair,) = LoraAdapter(ROOT / "examples" / "demo_adapter", loader).pairs
    a, b = pair.read()
    two, three = (loader.get_tokenizer().encode(digit)[-1] for digit in "23")
    assert a.shape == (len(a), 1) and a[two] == 1 and abs(a).sum() == 1
    with loader.checkpoint_tensors()["model.embed_tokens.weight"].open() as bits:
        rows = (bits[[two, three]].astype("<u4") << 16).view("<f4")
    assert (b[:, 0] == rows[1] - rows[0]).all()


def test_conversation_example(demo_model):
    questions = ["12+35", "what is a resultqueue", "How does the prefix cache work?"]
    example = [sys.executable, "examples/python/conversation.py", str(demo_model), *questions]
    turns = [json.loads(line) for line in run(example).stdout.splitlines()]
    assert [turn["question"] for turn in turns] == questions and "47" in turns[0]["answer"]
    # All of the turn before, but its last block and the token that was not computed.
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn["from_cache"] >= before["prompt_tokens"] - 16


def test_async_example(demo_model):
    result = run([sys.executable, "examples/python/async_streams.py", str(demo_model), "40"])
    assert "40 answers" in result.stdout


def test_cpp_example_against_the_installed_package(demo_model, tmp_path, cmake):
    """The installed library, its CMake package, and a model that Python serialised."""
    from allspark import Engine, HuggingFaceModel

    source = ROOT / "examples" / "cpp" / "stream_three.cc"
    assert len(source.read_text().splitlines()) < 60
    build = Path(os.environ.get("ALLSPARK_BUILD_DIR", ROOT / "build" / "release"))
    if not list(build.glob("liballspark.so*")):
        pytest.skip(f"no built library in {build} (cmake --preset release builds one)")
    prefix = tmp_path / "prefix"
    run([cmake, "--install", str(build), "--prefix", str(prefix)])
    run([cmake, "-S", "examples/cpp", "-B", str(tmp_path / "b"), f"-DCMAKE_PREFIX_PATH={prefix}",
         "-DCMAKE_BUILD_TYPE=Release"])  # fmt: skip
    run([cmake, "--build", str(tmp_path / "b")])
    HuggingFaceModel(str(demo_model), "demo").load_model().serialize_to_path(
        Engine(), str(tmp_path / "native")
    )
    program = str(tmp_path / "b" / "stream_three")
    result = run([program, str(tmp_path / "native" / "demo.asgraph")])
    requests = {line.split(":")[0] for line in result.stdout.splitlines()}
    assert len(requests) == 3
    assert len(result.stdout.splitlines()) == 3 * 16
    broken = subprocess.run([program, "/nonexistent.asgraph"], capture_output=True, text=True)
    assert broken.returncode == 1 and "/nonexistent" in broken.stderr
