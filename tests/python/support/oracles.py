"""Other programs that the slow tests compare with. scripts/setup.sh --slow installs each in its own
environment; if one could not be installed, its tests are skipped with a message.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_TESTS = Path(__file__).resolve().parents[1]
_DEFAULT = _TESTS.parents[1] / "build" / "oracles"
_TIMEOUT_S = 550  # less than the time limit of a test


def environment(name) -> Path:
    """The folder in which the oracle ``name`` is installed."""
    folder = Path(os.environ.get("ALLSPARK_ORACLES", _DEFAULT)) / name
    if not (folder / "complete").is_file():
        pytest.skip(f"the oracle {name} is not installed in {folder} (scripts/setup.sh --slow)")
    return folder


def run(folder, script, *arguments, cwd=None, **variables):
    """Runs a script of tests/python/oracles in the Python of the environment."""
    command = [folder / "bin" / "python", _TESTS / "oracles" / script, *arguments]
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=_TIMEOUT_S,
        cwd=cwd, env={**os.environ, **variables},
    )  # fmt: skip
    if result.returncode != 0:
        pytest.fail(f"{script} {arguments}: {result.returncode}\n{result.stderr[-3000:]}")
    return result.stdout


@pytest.fixture(scope="module")
def llama_cpp():
    oracle = LlamaCpp(environment("llama-cpp"))
    yield oracle
    oracle.close()


class LlamaCpp:
    """llama.cpp: its converter, its quantiser, its logits."""

    def __init__(self, folder):
        self._folder = folder
        source = folder / "source" / "vendor" / "llama.cpp"
        # One process for all conversions, because it takes seconds to start.
        self._converter = subprocess.Popen(
            [sys.executable, str(_TESTS / "oracles" / "convert_gguf.py"), str(source)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def close(self):
        self._converter.communicate(timeout=_TIMEOUT_S)

    def convert(self, checkpoint, out, kind="f32", vocabulary=False):
        """Makes a GGUF file of a checkpoint."""
        line = json.dumps([str(checkpoint), str(out), kind, vocabulary])
        self._converter.stdin.write(f"{line}\n")
        self._converter.stdin.flush()
        answer = self._converter.stdout.readline()
        assert answer == "\n" and out.is_file(), f"llama.cpp's converter: {answer or 'it died'}"
        return out

    def quantize(self, file, out, kind, mixed=False):
        """``kind``: llama-quantize's name of the type, for every matrix or (``mixed``) for most;
        F32 dequantises.
        """
        mode = "mixed" if mixed else "pure"
        run(self._folder, "llama_cpp_run.py", "quantize", file, out, kind, mode)
        return out

    def logits(self, file, ids):
        scratch = file.with_suffix(".ids"), file.with_suffix(".npy")
        scratch[0].write_text(json.dumps(ids))
        run(self._folder, "llama_cpp_run.py", "logits", file, *scratch)
        return np.load(scratch[1])

    def tokenize(self, file, texts):
        scratch = file.with_suffix(".texts"), file.with_suffix(".json")
        scratch[0].write_text(json.dumps(texts))
        run(self._folder, "llama_cpp_run.py", "tokenize", file, *scratch)
        return json.loads(scratch[1].read_text())
