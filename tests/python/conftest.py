"""Shared by all tests: markers, the folders that tests read from, a small random model, the demo
model behind servers for the tests of HTTP routes, and the modules of benchmarks/. Files that need
other models or settings have fixtures of their own of these names."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support import checkpoints

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: minutes, not seconds; run by scripts/test.sh --slow")
    config.addinivalue_line("markers", "torch: needs torch; left out by scripts/test.sh --fast")
    # A shell without job control lets what it starts in the background ignore Ctrl-C, and all that
    # is started from there. Tests are of programs in the foreground.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of modules that import torch, and lets scripts/sum_results.py know which
    tests --fast leaves out."""
    for item in items:
        if hasattr(getattr(item, "module", None), "torch"):
            item.add_marker("torch")
        if item.get_closest_marker("torch") is not None:
            item.user_properties.append(("torch", "1"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real checkpoints, tokenizers and texts, which are not part of the repository."""
    return checkpoints.shared_data()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The embedded demo model, in Hugging Face layout."""
    path = ROOT / "examples" / "demo_model"
    if not (path / "config.json").is_file():
        pytest.skip(f"no demo model at {path} (scripts/train_demo_model.py makes it)")
    return path


@pytest.fixture(scope="session")
def dashinfer() -> ModuleType:
    """dashinfer.allspark, as a DashInfer script imports it."""
    from allspark.dashinfer_compat import install

    install()
    return importlib.import_module("dashinfer.allspark")


@pytest.fixture(scope="session")
def cmake() -> str:
    path = shutil.which("cmake")
    if path is None:
        pytest.skip("cmake is not installed")
    return path


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/, which is a folder of scripts, not a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A small random model, to be read only."""
    from engine_fixture import write_small_checkpoint

    return write_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def model(demo_model):
    from allspark.pipeline.served_model import ServedModel

    model = ServedModel.open(str(demo_model), name="demo")
    yield model
    model.close()


@pytest.fixture(scope="module")
def server(model):
    from support.http_server import RunningServer

    with RunningServer([model]) as server:
        yield server


@pytest.fixture
def started(model, monkeypatch):
    """The fields of all requests to the engine, in order."""
    seen = []
    start = type(model.engine).start_request_ids

    def spy(self, name, loader, ids, fields):
        seen.append(fields)
        return start(self, name, loader, ids, fields)

    monkeypatch.setattr(type(model.engine), "start_request_ids", spy)
    return seen


@pytest.fixture(scope="module")
def tool_model(model):
    """With a chat template that has places for tools and reasoning."""
    from allspark.chat_template import TokenizerTemplate
    from support.chats import TEMPLATE

    return dataclasses.replace(model, template=TokenizerTemplate(model.tokenizer, TEMPLATE))


@pytest.fixture(scope="module")
def tool_server(tool_model):
    from support.http_server import RunningServer

    settings = {"tool_call_parser": "qwen", "reasoning_parser": "default"}
    with RunningServer([tool_model], **settings) as server:
        yield server


@pytest.fixture(scope="module")
def call_server(tool_model):
    """Without reasoning, which may come before a call that is required."""
    from support.http_server import RunningServer

    with RunningServer([tool_model], tool_call_parser="qwen") as server:
        yield server
