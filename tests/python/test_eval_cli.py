"""The command `eval`: what it prints and writes, and how it fails."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types

import pytest

pytest.importorskip("allspark._allspark")

from allspark.cli import main  # noqa: E402
from allspark.cli.output_files import settings_of  # noqa: E402
from allspark.eval import compare, perplexity  # noqa: E402
from allspark.eval.report import markdown_of, record_of, text_of, write  # noqa: E402
from allspark.eval.statistics import mean  # noqa: E402
from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402

TEXT = "What is 12+35? 12 + 35 = 47. A ResultQueue is where tokens arrive. " * 12

CODE_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class Own(PreTrainedTokenizerFast):
    vocab_files_names = {"vocab_file": "own.tiktoken"}

    def __init__(self, vocab_file=None, **settings):
        super().__init__(**{**settings, "tokenizer_file": vocab_file})
"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "sums.txt"
    path.write_text(TEXT)
    return path


def test_perplexity_is_printed_and_written(demo_model, text, tmp_path, capsys):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "md")}
    arguments = ["eval", "ppl", str(demo_model), "--text", str(text), "--context", "64",
                 "--data-type", "float32", "--json", str(files["json"]),
                 "--markdown", str(files["md"])]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    record = json.loads(files["json"].read_text())
    shown = re.search(r"^  perplexity +([\d.]+) ± ([\d.]+)$", out, re.MULTILINE)
    assert shown and record["perplexity"]["value"] == pytest.approx(float(shown[1]), abs=1e-4)
    assert record["perplexity"]["error"] == pytest.approx(float(shown[2]), abs=1e-4)
    assert record["evaluation"] == "perplexity"
    assert record["settings"] == {
        "context": 64, "data_type": "float32", "model": str(demo_model), "text": [str(text)],
    }  # fmt: skip
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    assert record["texts"] == [{"name": str(text), "num_bytes": len(TEXT), "sha256": digest}]
    assert record["model"]["compute_type"] == "float32"
    page = files["md"].read_text()
    assert f"| perplexity | {shown[1]} | {shown[2]} |" in page
    assert f"sha256 {digest}" in page and "| `data_type` | float32 |" in page
    assert "bits per weight" in page and "bits per weight" in out
    model = ServedModel.open(str(demo_model), EngineConfig(data_type="float32"))
    try:
        found = perplexity(model, text, 64)
    finally:
        model.close()
    assert found.perplexity.value == record["perplexity"]["value"]


def test_a_reference_adds_its_figures(demo_model, text, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["eval", "ppl", str(demo_model), "--text", str(text), str(text), "--context", "64",
                 "--precision", "A8W4", "--reference", str(demo_model), "--tokens", "700",
                 "--json", str(file)]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    record = json.loads(file.read_text())
    for line in (
        r"  model +[\d.]+ ± ", r"  reference +[\d.]+ ± ", r"  ratio +[\d.]+ ± ",
        r"  correlation +[\d.]+ %$", r"  mean +0\.\d{6} ± 0\.\d{6}$", r"  99\.9 % +[\d.]+$",
        r"  root mean square +[\d.]+ % ± [\d.]+ %$", r"  same likeliest token +[\d.]+ % ± ",
        r"  common to the five likeliest +[\d.]+ % ± ",
    ):  # fmt: skip
        assert re.search(f"^{line}", out, re.MULTILINE), line
    assert record["reference"]["compute_type"] == "float32"
    assert record["reference"]["weights"] == [] and record["num_windows"] == 10
    assert record["kl_divergence"]["mean"]["value"] > 0
    assert list(record["kl_divergence"]["percentiles"])[3:5] == ["50", "90"]
    assert len(record["texts"]) == 2
    assert record["ratio"]["error"] < record["perplexity"]["error"]


def test_references_have_a_type(demo_model, text, tmp_path, capsys):
    common = ["eval", "ppl", str(demo_model), "--text", str(text), "--context", "64"]
    same = [*common, "--reference", str(demo_model), "--reference-type", "bfloat16"]
    assert main([*same, "--json", str(tmp_path / "a.json")]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["kl_divergence"]["largest"] == 0 and record["ratio"]["value"] == 1
    assert main(["convert", str(demo_model), "--output", str(tmp_path / "native")]) == 0
    native = [*common, "--reference", str(tmp_path / "native")]
    assert main([*native, "--json", str(tmp_path / "b.json")]) == 0
    record = json.loads((tmp_path / "b.json").read_text())
    assert record["reference"]["compute_type"] == "bfloat16"
    assert record["reference"]["model_digest"] == record["model"]["model_digest"]
    capsys.readouterr()
    assert main([*native, "--reference-type", "float32"]) == 1
    assert "reference-type is 'float32'; " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*common, "--reference-type", "float32"])
    assert "--reference must be, too" in capsys.readouterr().err


def test_choices_are_printed_and_written(demo_model, repo_root, tmp_path, capsys):
    file = repo_root / "tests" / "data" / "choices.jsonl"
    arguments = ["eval", "choices", str(demo_model), str(file), "--json", str(tmp_path / "o.json"),
                 "--markdown", str(tmp_path / "o.md")]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  accuracy +100\.000 % ± 0\.000 %$", out, re.MULTILINE)
    record = json.loads((tmp_path / "o.json").read_text())
    assert record["evaluation"] == "choices" and record["accuracy"] == {"value": 1, "error": 0}
    assert [each["chosen"] for each in record["results"]] == [0, 1, 1]
    assert record["tasks"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert "| accuracy | 100.000 % | 0.000 % |" in (tmp_path / "o.md").read_text()
    assert main([*arguments[:4], "--limit", "1", "--seed", "2"]) == 0
    out = capsys.readouterr().out
    assert "1 of 3, chosen with seed 2" in out and "±" not in out.split("Right answers")[1]


def test_adapters_are_evaluated(demo_model, repo_root, text, capsys):
    adapter = f"threes={repo_root / 'examples' / 'demo_adapter'}"
    common = ["eval", "ppl", str(demo_model), "--text", str(text), "--context", "64"]
    assert main(common) == 0
    plain = capsys.readouterr().out
    assert main([*common, "--adapters", adapter]) == 0
    found = capsys.readouterr().out
    assert "adapter threes)" in found
    assert plain.split("perplexity")[1] != found.split("perplexity")[1]
    assert main([*common, "--adapters", adapter, "--adapter-name", "twos"]) == 1
    assert "--adapter-name is 'twos'; it must be one of --adapters" in capsys.readouterr().err
    other = adapter.replace("threes", "more")
    assert main([*common, "--adapters", adapter, other]) == 1
    assert "--adapters has threes, more; --adapter-name must say" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "4096"], r"allspark eval: context is 4096; it must be in \[8, 2048\]"),
        (["--context", "4"], "allspark eval: context is 4; it must be an integer of at least 8"),
        (["--tokens", "63"], "allspark eval: tokens is 63; it must be None or at least context"),
        (["--context", "1024"], "has [0-9]+ tokens; it must have at least context, 1024"),
        (["--json", "/no/such/x"], "allspark eval: --json is '/no/such/x'; there is no such"),
        (["--markdown", "/"], "allspark eval: --markdown is '/', which is a folder"),
        (["--reference", "/no/such"], "allspark eval: /no/such: no such directory"),
        (["--precision", "A1W1"], "allspark eval: EngineConfig.precision is 'A1W1'; it must"),
    ],
)
def test_bad_input_is_a_message(demo_model, text, capsys, arguments, message):
    context = [] if "--context" in arguments else ["--context", "64"]
    command = ["eval", "ppl", str(demo_model), "--text", str(text), *context, *arguments]
    assert main(command) == 1
    assert re.match(f".*{message}", capsys.readouterr().err, re.DOTALL)


def test_files_are_read_before_the_model(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    assert main(["eval", "ppl", "/no/such/model", "--text", str(tmp_path / "binary")]) == 1
    assert "binary: byte 4 is 0; the file must be a text" in capsys.readouterr().err
    assert main(["eval", "ppl", "/no/such/model", "--text", str(tmp_path / "none")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["eval", "choices", "/no/such/model", str(tmp_path / "binary")]) == 1
    assert "binary: byte 4 is 0" in capsys.readouterr().err


def test_arguments_that_make_no_sense(demo_model, text, capsys):
    for more, message in (
        (["--chat-template", "llama2"], "--chat-template is given; it must be left out"),
        (["--context", "0"], "0 is not at least 1"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["eval", "ppl", str(demo_model), "--text", str(text), *more])
        assert caught.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "layers"])


def test_what_is_no_number_is_null_and_a_dash(demo_model, text):
    model = ServedModel.open(str(demo_model), EngineConfig(session_len=64))
    try:
        found = compare(model, model, text, 64, tokens=64)
    finally:
        model.close()
    single = type(found)(**{**vars(found), "same_top": mean([1.0]), "correlation": float("nan")})
    record = json.loads(json.dumps(record_of(single, {}), allow_nan=False))
    assert record["correlation"] is None and record["same_top"] == {"value": 1.0, "error": None}
    assert re.search(r"correlation +-$", text_of(single), re.MULTILINE)
    assert "| correlation | - |" in markdown_of(single, {"a": "x|y\nz"})
    assert "| `a` | x\\|y z |" in markdown_of(single, {"a": "x|y\nz"})


def test_files_are_written_as_a_whole(demo_model, text, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError("no space left")

    model = ServedModel.open(str(demo_model), EngineConfig())
    result = perplexity(model, text, context=64)
    model.close()
    files = [tmp_path / "out.json", tmp_path / "out.md"]
    for file, given in zip(files, ([files[0], None], [None, files[1]]), strict=True):
        file.write_text("an older one")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
            patch.setattr(os, "fsync", full)
            write(result, {}, *given)
        assert file.read_text() == "an older one"
        write(result, {}, *given)
        assert "perplexity" in file.read_text()


def test_the_opencompass_config_is_a_config(repo_root, monkeypatch):
    """OpenCompass is not here: that it is Python, and names a server's default port."""
    kind = type("OpenAISDK", (), {})
    for name in ("opencompass", "opencompass.models"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(OpenAISDK=kind))
    config = runpy.run_path(str(repo_root / "examples" / "opencompass.py"))
    (model,) = config["models"]
    assert model["type"] is kind and model["openai_api_base"] == "http://127.0.0.1:23333/v1"
    assert config["datasets"] == [{"path": "tasks.jsonl", "infer_method": "gen"}]


def test_the_package_imports_nothing_heavy():
    code = """
import sys, allspark.eval
print(sorted({"torch", "transformers", "lm_eval", "numpy"} & set(sys.modules)))
print(all(hasattr(allspark.eval, name) for name in allspark.eval.__all__), "lm_eval" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\nTrue False\n", result.stderr


def test_a_conversion_reports_what_it_cost(demo_model, text, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["convert", str(demo_model), "--output", str(out), "--weight-format", "int4",
                 "--group-size", "32", "--report", str(text), "--report-context", "64"]  # fmt: skip
    assert main([*arguments, "--report-tokens", "256"]) == 0
    record = json.loads((out / "accuracy.json").read_text())
    page = (out / "accuracy.md").read_text()
    assert record["evaluation"] == "comparison" and record["num_windows"] == 4
    assert record["settings"]["weight_format"] == "int4" and "| `group_size` | 32 |" in page
    assert record["reference"]["compute_type"] == "float32" and not record["reference"]["weights"]
    assert "of 4 bits, groups of 32" in record["model"]["weights"][0]
    assert record["model"]["bits_per_weight"] < 8 and record["kl_divergence"]["mean"]["value"] > 0
    config = EngineConfig(precision=None)
    opened = [ServedModel.open(str(out), config), ServedModel.open(
        str(demo_model), EngineConfig(data_type="float32", max_batch_size=1))]  # fmt: skip
    try:
        found = compare(*opened, text, 64, 256)
    finally:
        for model in opened:
            model.close()
    assert found.kl_divergence.mean.value == record["kl_divergence"]["mean"]["value"]
    assert f"{found.perplexity.value:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "--output"],
        ["quantize", "--method", "rtn", "--output"],
        ["lite", "blocked_fp8", "--work-dir"],
    ],
)
def test_folders_in_the_home_may_be_named_with_a_tilde(
    demo_model, text, tmp_path, monkeypatch, command
):
    """No shell replaces one after an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    *command, flag = command
    arguments = [*command, str(demo_model), f"{flag}=~/made", "--report", str(text)]
    assert main([*arguments, "--report-context", "64", "--report-tokens", "64"]) == 0
    assert (tmp_path / "made" / "accuracy.json").is_file() and not (tmp_path / "~").exists()


@pytest.mark.parametrize("command", [["convert"], ["quantize", "--method", "rtn"]])
def test_a_report_with_a_tokenizer_that_is_code(demo_model, text, tmp_path, monkeypatch, command):
    """Nothing but the model that was made is needed to read it."""
    dynamic_modules = pytest.importorskip("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic_modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(demo_model, source)
    (source / "tokenizer.json").rename(source / "own.tiktoken")
    (source / "tokenization_own.py").write_text(CODE_TOKENIZER)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    own = ["tokenization_own.Own", None]
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": own}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    arguments = [*command, str(source), "--output", str(out), "--trust-remote-code",
                 "--report", str(text), "--report-context", "64",
                 "--report-tokens", "64"]  # fmt: skip
    assert main(arguments) == 0
    record = json.loads((out / "accuracy.json").read_text())
    assert record["num_windows"] == 1 and record["settings"]["trust_remote_code"]


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "--output"],
        ["quantize", "--method", "rtn", "--output"],
        ["quantize", "--method", "rtn", "--save-format", "gptq", "--output"],
        ["lite", "blocked_fp8", "--work-dir"],
    ],
)
def test_a_new_model_removes_the_report_of_an_older_one(demo_model, tmp_path, command):
    for name in ("accuracy.json", "accuracy.md", "notes.md"):
        (tmp_path / name).write_text("of an older model")
    kind, *more = command
    tool = [more.pop(0)] if kind == "lite" else []
    assert main([kind, *tool, str(demo_model), *more, str(tmp_path)]) == 0
    assert not list(tmp_path.glob("accuracy.*")) and (tmp_path / "notes.md").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "--output"],
        ["quantize", "--method", "rtn", "--output"],
        ["lite", "auto_awq", "--calib-samples", "0", "--work-dir"],
    ],
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "missing.txt"], "missing.txt"),
        (["--report", "{text}", "--report-context", "4000"], "context is 4000; it must be in [8, "),
        (["--report", "{short}", "--report-context", "64"], "3 tokens; it must have at least cont"),
        (["--report", "{text}", "--report-context", "4"], "context is 4; it must be"),
        (["--report", "{text}", "--report-tokens", "9"], "tokens is 9; it must be None or"),
    ],
)
def test_a_report_is_refused_before_the_conversion(
    demo_model, text, tmp_path, capsys, command, arguments, message
):
    out, short = tmp_path / "out", tmp_path / "short.txt"
    short.write_text("1+2")
    given = [each.format(text=text, short=short) for each in arguments]
    assert main([*command, str(out), str(demo_model), *given]) == 1
    assert message in capsys.readouterr().err and not out.exists()


def test_a_setting_of_zero_is_one():
    given = argparse.Namespace(
        command="quantize", fail=None, group_size=0, json="x", seed=0, smooth=0.0,
        calib=[], report=None, search=False, requantize=True,
    )  # fmt: skip
    expected = {"group_size": 0, "requantize": True, "seed": 0, "smooth": 0.0}
    assert settings_of(given) == expected


def test_settings_of_a_report_need_one(demo_model, tmp_path, capsys):
    given = ["--output", str(tmp_path / "out"), "--report-tokens", "9"]
    with pytest.raises(SystemExit):
        main(["convert", str(demo_model), *given])
    assert "--report-tokens is given; --report must be, too" in capsys.readouterr().err
