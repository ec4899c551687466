"""The command ``allspark``: what it writes and prints, and how it fails."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from allspark.cli import main
from allspark.model_loader import DashInferModel, HuggingFaceModel
from support.checkpoints import shared_data, write_checkpoint
from support.quantized import CONFIG

native = pytest.importorskip("allspark._allspark")


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "tiny", config=CONFIG)


def convert(checkpoint, output, *arguments):
    return main(["convert", str(checkpoint), "--output", str(output), *arguments])


def test_convert_writes_what_the_loader_writes(checkpoint, tmp_path, capsys):
    assert convert(checkpoint, tmp_path / "out") == 0
    assert re.search(r"tiny.asparam: \d+ bytes", capsys.readouterr().out)
    HuggingFaceModel(str(checkpoint), "tiny").load_model().serialize_to_path(None, str(tmp_path))
    for ending in ("asgraph", "asparam"):
        found = (tmp_path / "out" / f"tiny.{ending}").read_bytes()
        assert found == (tmp_path / f"tiny.{ending}").read_bytes()


def test_options_are_those_of_the_quantiser(checkpoint, tmp_path):
    options = ("--weight-format", "int4", "--group-size", "32", "--activate-quant", "--lm-head",
               "int8", "--data-type", "float32", "--name", "n")  # fmt: skip
    assert convert(checkpoint, tmp_path / "out", *options) == 0
    spec = DashInferModel(str(tmp_path / "out" / "n")).decoder_spec()
    quants = {quant.tensor: quant for quant in spec.weight_quant}
    assert len(quants) == 9 and quants["lm_head"].bits == 8 and spec.compute_type == 1
    quant = quants["layers.0.qkv"]
    assert (quant.bits, quant.group_size, quant.quantize_activations) == (4, 32, True)


def test_the_result_is_a_whole_model(tmp_path):
    source = shared_data() / "checkpoints" / "stories260K"
    assert convert(source, tmp_path) == 0
    loader = DashInferModel(str(tmp_path)).load_model()
    text = "Once upon a time"
    ids = HuggingFaceModel(str(source), "s").get_tokenizer().encode(text)
    assert loader.get_tokenizer().encode(text) == ids
    assert (tmp_path / "generation_config.json").exists()
    logits = native.testing.forward_logits(str(loader.files[0]), ids, [], 1, "", 16)
    assert np.isfinite(logits).all()


def test_inspect_says_what_a_model_holds(checkpoint, tmp_path, capsys):
    convert(checkpoint, tmp_path / "out", "--weight-format", "uint4", "--group-size", "32")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--tensors", "--verify"]) == 0
    text = capsys.readouterr().out
    for line in (
        "model: tiny", "format version: ", "weights of 4 bits: groups of 32", "hidden_size: 64",
        "layers.0.down uint4 64x96 ", "layers.0.down_zero uint8 64x3 ", "checksums: right",
    ):  # fmt: skip
        assert line in text, line
    assert main(["inspect", str(tmp_path / "out" / "tiny.asgraph")]) == 0
    assert "tensors:" not in capsys.readouterr().out


def test_inspect_finds_damage(checkpoint, tmp_path, capsys):
    convert(checkpoint, tmp_path)
    param = tmp_path / "tiny.asparam"
    data = bytearray(param.read_bytes())
    data[4096 + 17] ^= 1
    param.write_bytes(data)
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["inspect", str(tmp_path), "--verify"]) == 1
    assert "tiny is damaged" in capsys.readouterr().err


def test_list(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in ("LlamaForCausalLM", "gptq", "awq", "compressed-tensors", "fp8", "bfloat16"):
        assert f"  {name}\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "/no/such", "--output", "x"], "allspark convert: /no/such: no such directory"),
        (["inspect", "/no/such"], "allspark inspect: /no/such.asgraph: no such file"),
    ],
)
def test_errors_are_messages(arguments, message, capsys):
    assert main(arguments) == 1
    assert capsys.readouterr().err.strip() == message


def test_bad_values_are_messages(checkpoint, tmp_path, capsys):
    bad = ("--weight-format", "int8", "--group-size", "48")
    assert convert(checkpoint, tmp_path / "out", *bad) == 1
    assert "group_size is 48, expected" in capsys.readouterr().err
    assert convert(checkpoint, tmp_path / "out", "--data-type", "int7") == 1
    assert "data type is 'int7', expected" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        convert(checkpoint, tmp_path / "out", "--group-size", "32")
    assert caught.value.code == 2 and "add --weight-format" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "allspark.cli", "list"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and "MistralForCausalLM" in result.stdout
