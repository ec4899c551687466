"""`allspark serve --config`: flags from a file."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import httpx
import pytest

pytest.importorskip("fastapi")

from allspark.cli import main, serve  # noqa: E402
from allspark.cli.engine_flags import to_engine_config  # noqa: E402
from allspark.cli.server_flags import to_server_settings  # noqa: E402

YAML = """
# Comments are allowed.
models: [a/b=m, c]
server-port: 8000
server_name: 127.0.0.1
api-keys: [k1, k2]
strict-fields: true
ssl: false
log-level: info
session-timeout: 1.5
max-stops: 3
max-tools: 4
max-schema-bytes: 5
schema-timeout: 6
session-len: 99
precision: A8W8
model-name: null
reasoning-field: [reasoning]
adapters: {x: path/x, y: path/y}
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    """What `serve` is given by a command line and a file's text."""
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr(serve, "run", lambda options: found.append(options) or 0)

    def read(text, *arguments, name="flags.yaml"):
        (tmp_path / name).write_text(text)
        assert main(["serve", "--config", name, *arguments]) == 0
        return found.pop()

    return read


def test_keys_are_flags(options):
    found = options(YAML)
    assert found.models == ["a/b=m", "c"]
    assert serve._sources(found, found.models) == [("a/b", "m"), ("c", None)]
    settings = to_server_settings(found)
    assert (settings.server_port, settings.server_name) == (8000, "127.0.0.1")
    assert settings.reasoning_fields == ("reasoning",)
    assert settings.api_keys == ("k1", "k2") and settings.strict_fields is True
    assert (settings.max_stops, settings.max_tools) == (3, 4)
    assert (settings.max_schema_bytes, settings.schema_timeout) == (5, 6)
    assert settings.session_timeout == 1.5 and settings.ssl_keyfile is None
    assert found.log_level == "INFO" and found.model_name is None
    config = to_engine_config(found)
    assert (config.session_len, config.precision) == (99, "A8W8")
    assert config.adapters == {"x": "path/x", "y": "path/y"}


def test_the_command_line_wins(options):
    found = options(YAML, "d", "--server-port", "1", "--api-keys", "k3", "--session-len=7")
    assert found.models == ["d"] and found.server_port == 1 and found.api_keys == ["k3"]
    assert to_engine_config(found).session_len == 7 and found.strict_fields is True


@pytest.mark.parametrize(
    "models, given, expected",
    [
        ("[a, b]", ["gradio"], ("gradio", ["a", "b"])),
        ("[a, b]", ["api_server"], ("api_server", ["a", "b"])),
        ("[a, b]", ["gradio", "c"], ("gradio", ["c"])),
        ("[gradio, a]", [], ("gradio", ["a"])),
        ("[gradio]", [], None),
        ("null", ["gradio"], None),
    ],
)
def test_a_form_on_the_command_line_keeps_the_models_of_the_file(options, models, given, expected):
    found = options(f"models: {models}", *given)
    if expected is None:
        with pytest.raises(ValueError, match="no model is named"):
            serve._form(found)
    else:
        assert serve._form(found) == expected


def test_json_and_nothing(options):
    found = options(json.dumps({"models": "m", "server-port": 5}), name="flags.json")
    assert (found.models, found.server_port) == (["m"], 5)
    found = options("", "m")
    assert (found.models, found.server_port) == (["m"], None)


@pytest.mark.parametrize(
    "text, message",
    [
        ("server-prot: 1", "flags.yaml: there is no flag 'server-prot'; near it are server-port"),
        ("max_concurent_requests: 1", "near it are max-concurrent-requests"),
        ("zzzz: 1", "there is no flag 'zzzz'; `allspark serve --help` lists them"),
        ("config: other", "there is no flag 'config'"),
        ("help: true", "there is no flag 'help'"),
        ("7: 1", "there is no flag 7"),
        ("server-port: many", "flags.yaml: server-port is 'many'; it must be an integer"),
        ("server-port: [1]", "server-port is [1]; it must be a text or a number"),
        ("server-port: true", "server-port is True; it must be a text or a number"),
        ("request-timeout: soon", "request-timeout is 'soon'; it must be a number"),
        ("strict-fields: 1", "strict-fields is 1; it must be true or false"),
        ("cap: dog", "cap is 'dog'; it must be one of 'completion'"),
        ("models: [{a: b}]", "models[0] is {'a': 'b'}; it must be a text or a number"),
        ("models: {a: b}", "models[0] is {'a': 'b'}"),
        ("adapters: {a: [b]}", "adapters.a is ['b']; it must be a text or a number"),
        ("- a", "flags.yaml: it is a list; it must be an object"),
        ("a: [", "flags.yaml: it cannot be read: while parsing"),
        ("models: []", "no model is named"),
        ("models: [m]\nsession-len: 1", "session_len is 1"),
        ("models: [m]\napi-keys: []", "--api-keys has no key"),
        ("models: [m]\napi-keys: ['']", "--api-keys has no key"),
    ],
)
def test_what_is_wrong_is_named(text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flags.yaml").write_text(text)
    assert main(["serve", "--config", "flags.yaml"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_a_file_that_is_missing_or_no_json(tmp_path, capsys):
    assert main(["serve", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("{'a': 1}")
    assert main(["serve", "--config", str(tmp_path / "x.json")]) == 1
    assert "x.json: it cannot be read: Expecting property name" in capsys.readouterr().err
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    assert main(["serve", "--config", str(tmp_path / "x.json")]) == 1
    assert "x.json: byte 7 is 0xff" in capsys.readouterr().err
    (tmp_path / "x.json").write_text('\ufeff{"strict-fields": 1}', encoding="utf-8")
    assert main(["serve", "--config", str(tmp_path / "x.json")]) == 1
    assert "strict-fields is 1; it must be true or false" in capsys.readouterr().err


def test_a_server_of_a_file(demo_model, tmp_path):
    file = tmp_path / "flags.json"
    flags = {"models": [f"{demo_model}=m"], "server-name": "127.0.0.1", "server-port": 0}
    file.write_text(json.dumps({**flags, "api-keys": ["k"], "session-len": 256}))
    command = [sys.executable, "-m", "allspark.cli", "serve", "--config", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        found = re.fullmatch(r"serving m on (http://127.0.0.1:\d+)\n", line)
        assert found, line + process.stderr.read()
        with httpx.Client(base_url=found[1], timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            (card,) = client.get("/v1/models", headers={"x-api-key": "k"}).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("m", 256)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
