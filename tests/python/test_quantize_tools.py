"""The commands and functions around quantize_model: `allspark quantize`, `allspark eval layers` and
LMDeploy's tools by their names."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys

import numpy as np
import pytest

native = pytest.importorskip("allspark._allspark")

from allspark import Engine  # noqa: E402
from allspark.batch.digests import model_files  # noqa: E402
from allspark.cli import main  # noqa: E402
from allspark.eval import Text  # noqa: E402
from allspark.eval.facts import digest_of  # noqa: E402
from allspark.eval.windows import windows_of  # noqa: E402
from allspark.model_loader import HuggingFaceModel  # noqa: E402
from allspark.model_loader.export import read_graph  # noqa: E402
from allspark.model_loader.quantized.e4m3 import E4M3_VALUES  # noqa: E402
from allspark.quantize import QuantizeConfig, layer_effects, lite  # noqa: E402
from allspark.quantize.blocked_fp8 import block_scales, blocked_fp8, round_e4m3  # noqa: E402
from allspark.quantize.calibration import read_ids  # noqa: E402
from allspark.quantize.effects import Effect  # noqa: E402
from allspark.quantize.grid import WeightFormat  # noqa: E402
from allspark.quantize.target_bits import choose_upgrades, stored_bits  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from support.server_process import ServerProcess  # noqa: E402

SENTENCE = "What is {}+{}? {} + {} = {}. A ResultQueue is where the tokens of a request arrive. "
CONTENT = "".join(SENTENCE.format(i, 7, i, 7, i + 7) for i in range(40))
TEXT = Text.of(CONTENT, "sums")
GROUPS = {"group_size": 32}


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "sums.txt"
    path.write_text(CONTENT, encoding="utf-8")
    return path


def quants_of(directory):
    (graph,) = directory.glob("*.asgraph")
    return read_graph(graph).spec.weight_quant


# The effects of single weights.


def logits_of(model, quantised, ids):
    """Of a model in float32 of which one weight is quantised."""
    loader = HuggingFaceModel(str(model), "m", user_set_data_type="float32").load_model()
    config = None
    if quantised is not None:
        others = rf"^(?!{quantised.replace('.', '[.]')}$)layers"
        config = {"weight_format": "uint4", **GROUPS, "modules_to_not_convert": [others]}
    loader.serialize_to_memory(
        Engine(), enable_quant=config is not None, customized_quant_config=config
    )
    logits = native.testing.forward_logits(loader._image, ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_an_effect_is_that_of_a_model_with_one_weight_quantised(demo_model):
    config = QuantizeConfig(method="rtn", **GROUPS)
    effects = layer_effects(str(demo_model), [TEXT], config, context=64, tokens=128)
    divergences = [effect.kl_divergence for effect in effects]
    assert divergences == sorted(divergences, reverse=True)
    loader = HuggingFaceModel(str(demo_model), "m").load_model()
    assert len(effects) == len(loader.plan(config.customized_quant_config()).spec.weight_quant)
    ids = read_ids(loader, [TEXT], 2, 64)
    for effect in (effects[0], effects[-1]):
        found = []
        for sequence in ids.tolist():
            exact = logits_of(demo_model, None, sequence)
            own = logits_of(demo_model, effect.weight, sequence)
            found.append((np.exp(exact) * (exact - own)).sum(axis=1))
        # Both are sums of differences of float32 logits; these are rounded by 2^-20 or so.
        assert effect.kl_divergence == pytest.approx(np.mean(found), rel=0.02, abs=1e-6)


def test_errors_are_those_of_the_weight_and_of_its_products(demo_model):
    """Eight bits leave a sixteenth of the error of four."""
    of = {}
    for kind in ("uint4", "int8"):
        config = QuantizeConfig(method="rtn", weight_format=kind, **GROUPS)
        effects = layer_effects(str(demo_model), [TEXT], config, context=64, tokens=64)
        of[kind] = {effect.weight: effect for effect in effects}
    for name, coarse in of["uint4"].items():
        fine = of["int8"][name]
        for kind in ("weight", "product"):
            error, cosine = f"{kind}_error", f"{kind}_cosine"
            assert 10 < getattr(coarse, error) / getattr(fine, error) < 30, name
            # An error at a right angle to the weight: cos = 1 / sqrt(1 + error^2).
            expected = 1 / np.sqrt(1 + getattr(coarse, error) ** 2)
            assert getattr(coarse, cosine) == pytest.approx(expected, abs=0.01)
            assert getattr(fine, cosine) > getattr(coarse, cosine)


def test_eval_layers_prints_the_worst_first(demo_model, tmp_path, text_file, capsys):
    files = tmp_path / "layers.json", tmp_path / "layers.md"
    arguments = ["eval", "layers", str(demo_model), "--text", str(text_file), "--context", "64"]
    arguments += ["--tokens", "64", "--group-size", "32", "--json", str(files[0])]
    assert main([*arguments, "--markdown", str(files[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(files[0].read_text())
    assert record["evaluation"] == "layers" and record["settings"]["group_size"] == 32
    names = [weight["weight"] for weight in record["weights"]]
    assert [line.split()[0] for line in lines[1:]] == names
    page = files[1].read_text()
    rows = re.findall(r"^\| (layers\.\S+) \|", page, re.MULTILINE)
    assert rows == names and "| `group_size` | 32 |" in page


def test_the_files_of_eval_layers_say_what_was_measured(demo_model, tmp_path, text_file, capsys):
    files = tmp_path / "layers.json", tmp_path / "layers.md"
    arguments = ["eval", "layers", str(demo_model), "--text", str(text_file), "--context", "200"]
    arguments += ["--tokens", "100000", "--group-size", "32", "--json", str(files[0])]
    assert main([*arguments, "--markdown", str(files[1])]) == 0
    record, page = json.loads(files[0].read_text()), files[1].read_text()
    windows = windows_of(TEXT, HuggingFaceModel(str(demo_model), "m").get_tokenizer(), 200)
    assert record["num_sequences"] == len(windows) < 500 and record["context"] == 200
    assert record["version"] == native.__version__ and f"allspark {native.__version__}" in page
    digest = hashlib.sha256(text_file.read_bytes()).hexdigest()
    assert record["texts"][0]["sha256"] == digest and digest in page
    loader = HuggingFaceModel(str(demo_model), "m").load_model()
    digest = digest_of(model_files(loader))
    assert record["model"]["sha256"] == digest and digest in page
    assert record["model"]["architecture"] == loader.decoder_spec().architecture


def test_what_no_token_reached_is_null(demo_model, tmp_path, text_file, monkeypatch, capsys):
    module = sys.modules[layer_effects.__module__]
    unseen = Effect("layers.0.up", WeightFormat(4, True, 32), 64, 0.1, 0.9, *3 * [float("nan")])
    monkeypatch.setattr(module, "weight_effects", lambda *arguments: [unseen])
    path = tmp_path / "layers.json"
    arguments = ["eval", "layers", str(demo_model), "--text", str(text_file), "--context", "64"]
    assert main([*arguments, "--group-size", "32", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text(), parse_constant=pytest.fail)["weights"]
    assert found["product_error"] is None and found["weight_error"] == 0.1


# A target of bits per weight.


def effect(name, count, divergence):
    return Effect(name, WeightFormat(4, True, 64), count, 0, 0, 0, 0, divergence)


def test_weights_that_gain_most_per_bit_get_eight_bits():
    effects = [effect("a", 6400, 0.1), effect("b", 640, 0.02), effect("c", 640, 0.001)]
    features = dict.fromkeys("abc", 64)
    # uint4 in groups of 64 has 4 + 24 / 64 bits, int8 8 + 16 / 64.
    assert stored_bits(effects[0].format, 6400, 64) == 6400 * 4.375
    assert choose_upgrades(effects, features, 4.375) == []
    assert choose_upgrades(effects, features, 4.8) == ["b"]
    assert choose_upgrades(effects, features, 8.1) == ["a", "b"]
    assert choose_upgrades(effects, features, 8.25) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"target_bits is 4.3; it must be at least 4.375"):
        choose_upgrades(effects, features, 4.3)


def test_a_target_is_reached_and_not_passed(demo_model, tmp_path, text_file, capsys):
    arguments = ["quantize", str(demo_model), "--output", str(tmp_path / "out"), "--calib"]
    arguments += [str(text_file), "--calib-samples", "4", "--calib-seqlen", "64", "--group-size"]
    assert main([*arguments, "64", "--target-bits", "5.3"]) == 0
    assert "bytes" in capsys.readouterr().out
    shapes = {}
    for quant in quants_of(tmp_path / "out"):
        shapes[quant.tensor] = quant.bits
    assert set(shapes.values()) == {4, 8}
    loader = HuggingFaceModel(str(demo_model), "m").load_model()
    sizes = {
        name: (int(np.prod(shape)), shape[1])
        for name, _, _, shape, *_ in native.required_tensors(loader.plan().spec.SerializeToString())
        if name in shapes
    }
    bits = sum(
        stored_bits(WeightFormat(shapes[name], shapes[name] == 4, 64), *sizes[name])
        for name in shapes
    )
    # No weight that is still small would fit in what is left.
    total = sum(count for count, _ in sizes.values())
    smallest = min(count for name, (count, _) in sizes.items() if shapes[name] == 4)
    assert 5.3 * total - smallest * 3.875 < bits <= 5.3 * total


# The command.


def test_a_chat_model_is_quantised_in_the_three_commands_of_the_guide(
    demo_model, tmp_path, text_file, repo_root, capsys
):
    pytest.importorskip("fastapi")
    text = (repo_root / "docs" / "quantization.md").read_text("utf-8")
    (block,) = re.findall(r"```\n(allspark quantize MODEL.*?)```", text, re.S)
    means = {"MODEL": demo_model, "DIR": tmp_path / "DIR"}
    means |= dict.fromkeys(("wikitext.txt", "other.txt"), text_file)
    commands = [
        [str(means.get(word, word)) for word in line.split()[1:]] for line in block.splitlines()
    ]
    quantize, evaluate, (serve, directory) = commands
    small = ["--calib-seqlen", "64"]  # texts and contexts of the demo model are short
    assert main([*quantize, *small]) == 0
    assert main([*evaluate, "--context", "64"]) == 0
    assert "KL divergence" in capsys.readouterr().out
    assert serve == "serve"
    with ServerProcess(directory) as server:
        answer = server.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "What is 12+35?"}],
        ).json()
    assert "12 + 35 = 47" in answer["choices"][0]["message"]["content"]


def test_what_the_command_lacks_is_named(demo_model, tmp_path, text_file, capsys):
    output = ["--output", str(tmp_path / "out")]
    rtn, none = ["--method", "rtn"], ["--method", "search", "--calib-samples", "0"]
    cases = [
        ([], 2, "--calib is missing; --method awq+gptq reads a calibration text"),
        (["--method", "rtn", "--smooth", "0.5"], 1, "only 'activate_quant' has activations"),
        (["--calib", str(tmp_path / "none.txt")], 1, "none.txt"),
        (["--calib", str(text_file), "--calib-seqlen", "4000"], 1, "calib_seqlen is 4000"),
        (["--method", "rtn", "--group-settings", "down"], 2, "it must be PATTERN=VALUE"),
        (["--method", "rtn", "--format-settings", "down=int5"], 1, "format_settings['down']"),
        (["--calib", str(text_file), "--target-bits", "3"], 1, "it must be at least 4."),
        ([*rtn, "--calib", str(text_file)], 2, "--calib is given; --method rtn reads no text"),
        ([*none, "--calib", str(text_file)], 2, "--calib is given; --calib-samples 0 reads no"),
    ]
    for more, status, message in cases:
        try:
            found = main(["quantize", str(demo_model), *output, *more])
        except SystemExit as error:
            found = error.code
        assert (found, message in capsys.readouterr().err) == (status, True), more
        assert not list((tmp_path / "out").glob("*.asgraph"))


def test_bits_are_those_of_the_weights_that_are_quantised(repo_root, capsys):
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    assert "bits per weight that is quantised" in " ".join(capsys.readouterr().out.split())
    text = (repo_root / "docs" / "quantization.md").read_text("utf-8")
    assert "the mean over the layers' weights that are quantised" in text


# LMDeploy's tools.


@pytest.mark.parametrize(
    ("tool", "fields", "expected"),
    [
        ("auto_awq", {}, (4, True, 128, False)),
        ("auto_awq", {"w_sym": True, "w_bits": 8, "w_group_size": 64}, (8, False, 64, False)),
        ("auto_awq", {"calib_samples": 0}, (4, True, 128, False)),
        ("auto_gptq", {}, (4, False, 128, False)),
        ("smooth_quant", {}, (8, False, 0, True)),
        ("smooth_quant", {"calib_samples": 0}, (8, False, 0, True)),
    ],
)
def test_tools_have_lmdeploys_formats(demo_model, tmp_path, text_file, tool, fields, expected):
    given = {"calib_samples": 4, "calib_seqlen": 64, "calib_dataset": str(text_file), **fields}
    made = getattr(lite, tool)(str(demo_model), str(tmp_path / "work"), **given)
    assert [path.is_file() for path in made.paths] == [True, True]
    for quant in quants_of(tmp_path / "work"):
        found = quant.bits, quant.asymmetric, quant.group_size, quant.quantize_activations
        assert found == expected


def test_calibrate_writes_the_ranges_of_inputs(demo_model, tmp_path, text_file):
    status = main(
        ["lite", "calibrate", str(demo_model), "--work-dir", str(tmp_path / "work"),
         "--calib-dataset", "sums", "--calib-dir", str(tmp_path), "--calib-samples", "3",
         "--calib-seqlen", "32"]
    )  # fmt: skip
    assert status == 0
    found = load_file(tmp_path / "work" / "inputs_stats.safetensors")
    names = {name.rpartition(".")[0] for name in found}
    assert {"layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"} <= names
    for name in names:
        mean, largest = found[f"{name}.absmean"], found[f"{name}.absmax"]
        assert found[f"{name}.num_tokens"].item() == 3 * 32
        assert (0 < mean).all() and (mean <= largest).all()


def test_ranges_are_written_as_a_whole(demo_model, tmp_path, text_file, monkeypatch):
    path = tmp_path / "inputs_stats.safetensors"
    path.write_text("older ones")

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        lite.calibrate(str(demo_model), str(text_file), 1, 32, str(tmp_path))
    assert path.read_text() == "older ones"


def test_names_of_data_sets_mean_files(tmp_path):
    for name in ("wikitext2_valid.txt", "c4.txt.bz2"):
        (tmp_path / name).touch()
    folder = str(tmp_path)
    assert lite.dataset_file("wikitext2", folder).name == "wikitext2_valid.txt"
    assert lite.dataset_file("c4", folder).name == "c4.txt.bz2"
    assert lite.dataset_file(f"{folder}/c4.txt.bz2", None).name == "c4.txt.bz2"
    with pytest.raises(FileNotFoundError, match=r"'pileval'.*calib_dir.*pileval.txt"):
        lite.dataset_file("pileval", folder)


def test_tools_say_what_they_cannot_do(demo_model, capsys):
    with pytest.raises(ValueError, match=r"w_bits is 3; it must be 4 or 8"):
        lite.auto_awq(str(demo_model), w_bits=3)
    with pytest.raises(ValueError, match=r"quant_dtype is 'fp8'; it must be 'int8'"):
        lite.smooth_quant(str(demo_model), quant_dtype="fp8")
    assert main(["lite", "kv_qparams", "work", "turbomind"]) == 1
    assert "there is nothing to do" in capsys.readouterr().err


# Float8 in blocks.


def test_every_float8_number_is_its_own_nearest():
    codes = np.delete(np.arange(256), [127, 255]).astype(np.uint8)
    np.testing.assert_array_equal(round_e4m3(E4M3_VALUES[codes]), codes)


@pytest.mark.torch
def test_rounding_to_float8_is_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = rng.standard_normal(20000).astype(np.float32) * np.exp2(rng.uniform(-12, 8, 20000))
    ties = (E4M3_VALUES[1:126] + E4M3_VALUES[:125]) / 2
    values = np.clip(np.concatenate([values.astype(np.float32), ties]), -448, 448)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(round_e4m3(values), expected)
    assert round_e4m3(np.array([1e9, -1e9], np.float32)).tolist() == [126, 254]


def test_a_block_of_zeros_has_the_scale_one():
    weight = np.zeros((130, 140), np.float32)
    weight[129, 139] = -896
    np.testing.assert_array_equal(block_scales(weight, 128), [[1, 1], [1, 2]])


def test_a_float8_checkpoint_is_read_back(demo_model, tmp_path):
    paths = blocked_fp8(str(demo_model), str(tmp_path / "fp8"))
    assert [path.name for path in paths] == ["model.safetensors"]
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    original = HuggingFaceModel(str(demo_model), "m").load_model().checkpoint_tensors()
    loader = HuggingFaceModel(str(tmp_path / "fp8"), "m").load_model()
    rounded = 0
    for name, entry in loader.checkpoint_tensors().items():
        with entry.open() as own, original[name].open() as exact:
            if entry.dtype == original[name].dtype:
                np.testing.assert_array_equal(own, exact)
                continue
            rounded += 1
            floats = (exact.astype(np.uint32) << 16).view(np.float32)
            # A float8 number is within a 16th of a value; a block's smallest, within a 2^-10 of
            # its scale.
            scale = np.abs(floats).max() / 448
            assert (np.abs(own - floats) <= np.abs(floats) / 16 + scale * 2**-10).all(), name
    assert rounded == 7 * loader.decoder_spec().num_layers
    with pytest.raises(ValueError, match="block_size is 100; it must be 32, 64, 128 or 256"):
        blocked_fp8(str(demo_model), str(tmp_path / "other"), block_size=100)
    with pytest.raises(ValueError, match="quantised already"):
        blocked_fp8(str(tmp_path / "fp8"), str(tmp_path / "other"))
