"""The demo model behind servers, for the tests of HTTP routes, and the modules of benchmarks/.
Files that need other models or settings have fixtures of their own of these names."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/, which is a folder of scripts, not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


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
