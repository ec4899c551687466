"""The demo model behind servers, for the tests of HTTP routes. Files that need other models or
settings have fixtures of the same names."""

from __future__ import annotations

import dataclasses

import pytest


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
