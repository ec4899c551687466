"""What is said while a model is opened: a line for each matter, and nothing of packages that it
does not need."""

from __future__ import annotations

import io
import subprocess
import sys
import threading

import pytest
from allspark import HuggingFaceModel
from allspark.pipeline import EngineConfig, pipeline

gguf = pytest.importorskip("gguf")

from test_gguf import LARGE, llama_file  # noqa: E402

MOST_CHARACTERS = 220


def said_by(code, *arguments):
    """The lines on stderr of a program that ends well."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [line for line in result.stderr.splitlines() if line]


SERIALIZE = """
import sys
from allspark import HuggingFaceModel
HuggingFaceModel(sys.argv[1], "m").load_model().serialize_to_path(None, sys.argv[2])
"""


def test_each_notice_is_a_short_line(tmp_path):
    llama_file(tmp_path / "m.gguf", {"": "TQ2_0"}, LARGE)
    lines = said_by(SERIALIZE, tmp_path / "m.gguf", tmp_path / "out")
    notices = [line for line in lines if "UserWarning" in line]
    assert lines == notices and len(notices) == 2, lines
    for line in notices:
        assert line.startswith("allspark:0: UserWarning: ")
        assert len(line.replace(str(tmp_path), "")) < MOST_CHARACTERS
    assert "weights are TQ2_0, and become bfloat16: " in "\n".join(notices)
    assert "without a tokenizer" in "\n".join(notices)


@pytest.mark.parametrize("command", [["convert"], ["quantize", "--method", "rtn", "--requantize"]])
def test_the_commands_say_it_without_the_program(tmp_path, command):
    llama_file(tmp_path / "m.gguf", {"": "TQ2_0"}, LARGE)
    code = "import sys; from allspark.cli import main; sys.exit(main(sys.argv[1:]))"
    lines = said_by(code, *command, tmp_path / "m.gguf", "--output", tmp_path / "out")
    start = f"allspark {command[0]}: "
    assert len(lines) == 2 and all(line.startswith(start) for line in lines), lines


def test_a_progress_bar_is_for_terminals(demo_model, monkeypatch):
    monkeypatch.setattr("allspark.model_loader.convert._PROGRESS_DELAY_S", 0)
    for is_terminal in (True, False):
        stderr = io.StringIO()
        monkeypatch.setattr(stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", stderr)
        with pipeline(str(demo_model), backend_config=EngineConfig(precision="A16W8")):
            assert ("serializing" in stderr.getvalue()) == is_terminal


def test_a_conversion_leaves_no_thread(demo_model, tmp_path):
    before = set(threading.enumerate())
    model = HuggingFaceModel(str(demo_model), "m").load_model()
    model.serialize_to_path(None, str(tmp_path))
    assert set(threading.enumerate()) <= before


def test_nothing_is_said_of_a_missing_torch(demo_model):
    """transformers advises to install it; its tokenizers work without."""
    code = """
import sys
sys.modules["torch"] = None
from allspark.pipeline import pipeline
with pipeline(sys.argv[1]) as pipe:
    pipe("What is 3+4?")
"""
    assert said_by(code, demo_model) == []
    code = """
import sys
sys.modules["torch"] = None
from allspark.dashinfer_compat.vocabulary import make_tokenizer
make_tokenizer({"\N{LOWER ONE EIGHTH BLOCK}": 0, "a": 1, "</s>": 2}, 2)
"""
    assert said_by(code) == []
