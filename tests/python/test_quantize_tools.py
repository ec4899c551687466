"""The commands and functions around quantize_model: `allspark quantize`, `allspark eval layers` and
LMDeploy's tools by their names."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import sys

import numpy as np
import pytest

native = pytest.importorskip("allspark._allspark")

from allspark.batch.digests import model_files  # noqa: E402
from allspark.cli import main  # noqa: E402
from allspark.eval import Text  # noqa: E402
from allspark.eval.facts import digest_of  # noqa: E402
from allspark.eval.windows import windows_of  # noqa: E402
from allspark.model_loader import HuggingFaceModel  # noqa: E402
from allspark.model_loader.quantized.e4m3 import E4M3_VALUES  # noqa: E402
from allspark.model_loader.serialised import read_graph  # noqa: E402
from allspark.quantize import QuantizeConfig, layer_effects, lite, quantize_model  # noqa: E402
from allspark.quantize.blocked_fp8 import block_scales, blocked_fp8, round_e4m3  # noqa: E402
from allspark.quantize.calibration import read_ids  # noqa: E402
from allspark.quantize.effects import Effect  # noqa: E402
from allspark.quantize.grid import WeightFormat  # noqa: E402
from allspark.quantize.target_bits import (  # noqa: E402
    WeightBits,
    choose_upgrades,
    room_for,
    stored_bits,
)
from safetensors.numpy import load_file  # noqa: E402
from support.quantize_oracle import (  # noqa: E402
    SMALL,
    divergence_of,
    small_checkpoint,
    small_tensors,
    words,
)
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


def test_an_effect_is_that_of_a_model_with_one_weight_quantised(demo_model):
    config = QuantizeConfig(method="rtn", **GROUPS)
    effects = layer_effects(str(demo_model), [TEXT], config, context=64, tokens=128)
    divergences = [effect.kl_divergence for effect in effects]
    assert divergences == sorted(divergences, reverse=True)
    loader = HuggingFaceModel(str(demo_model), "m").load_model()
    assert len(effects) == len(loader.plan(config.customized_quant_config()).spec.weight_quant)
    ids = read_ids(loader, [TEXT], 2, 64).tolist()
    for effect in (effects[0], effects[-1]):
        expected = divergence_of(demo_model, config, effect.weight, ids)
        # Both are sums of differences of float32 logits; these are rounded by 2^-20 or so.
        assert effect.kl_divergence == pytest.approx(expected, rel=0.02, abs=1e-6)


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
    arguments += ["--tokens", "64", "--group-size", "32", "--lm-head", "int8"]
    arguments += ["--json", str(files[0]), "--markdown", str(files[1])]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(files[0].read_text())
    assert record["evaluation"] == "layers" and record["settings"]["group_size"] == 32
    names = [weight["weight"] for weight in record["weights"]]
    assert [line.split()[0] for line in lines[1:]] == names
    page = files[1].read_text()
    rows = re.findall(r"^\| (\S+) \| u?int[48], 32 \|", page, re.MULTILINE)
    # The demo model has one weight for embedding and head.
    assert rows == names and "embedding" in names and "| `group_size` | 32 |" in page


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
    nan = float("nan")
    unseen = Effect("layers.0.up", WeightFormat(4, True, 32), 64, 0.1, 0.9, nan, nan, 0)
    monkeypatch.setattr(module, "weight_effects", lambda *arguments, **fields: [unseen])
    path = tmp_path / "layers.json"
    arguments = ["eval", "layers", str(demo_model), "--text", str(text_file), "--context", "64"]
    assert main([*arguments, "--group-size", "32", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text(), parse_constant=pytest.fail)["weights"]
    assert found["product_error"] is None and found["weight_error"] == 0.1


# A target of bits per weight.


def test_weights_that_gain_most_per_bit_get_eight_bits():
    # uint4 in groups of 64 has 4 + 24 / 64 bits, int8 8 + 16 / 64.
    assert stored_bits(WeightFormat(4, True, 64), 6400, 64) == 6400 * 4.375
    sizes = {"a": 6400, "b": 640, "c": 640}
    weights = [
        WeightBits(name, count, count * 35 // 8, count * 31 // 8) for name, count in sizes.items()
    ]
    chosen = functools.partial(choose_upgrades, weights, {"a": 0.1, "b": 0.02, "c": 0.001})
    assert chosen(4.375) == []
    assert chosen(4.8) == ["b"]
    assert chosen(8.1) == ["a", "b"]
    assert chosen(8.25) == ["a", "b", "c"]
    for bits in (4.374, 8.251):
        with pytest.raises(ValueError, match=rf"is {bits}; it must be in \[4.375, 8.250\], from"):
            chosen(bits)


def test_the_bounds_of_a_target_are_inside_of_them():
    """Thirds, which have no last digit."""
    weights = [WeightBits("a", 3, 13, 12)]
    with pytest.raises(ValueError, match=r"it must be in \[4.334, 8.333\]"):
        room_for(weights, 9)
    assert room_for(weights, 4.334) > 0 and room_for(weights, 8.333) < 12


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
    short = tmp_path / "short.txt"
    short.write_text("1+2")
    cases = [
        ([], 2, "--calib is missing; --method awq+gptq reads a calibration text"),
        (["--method", "rtn", "--smooth", "0.5"], 1, "only 'activate_quant' has activations"),
        (["--calib", str(tmp_path / "none.txt")], 1, "none.txt"),
        (["--calib", str(text_file), "--calib-seqlen", "4000"], 1, "calib_seqlen is 4000"),
        (["--calib", str(short)], 1, "3 tokens; it must have at least calib_seqlen, 512"),
        (["--method", "rtn", "--group-settings", "down"], 2, "it must be PATTERN=VALUE"),
        (["--method", "rtn", "--format-settings", "down=int5"], 1, "format_settings['down']"),
        (["--calib", str(text_file), "--target-bits", "3"], 1, "it must be in [4.375, 8.250]"),
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


def test_a_report_names_weights_that_fell_back_and_those_that_got_more_bits(
    demo_model, tmp_path, text_file, capsys
):
    out = tmp_path / "out"
    arguments = ["quantize", str(demo_model), "--output", str(out), "--calib", str(text_file)]
    arguments += ["--calib-samples", "2", "--calib-seqlen", "64", "--method", "gptq"]
    arguments += ["--target-bits", "5.3", "--report", str(text_file), "--report-context", "64"]
    assert main([*arguments, "--report-tokens", "64"]) == 0
    record = json.loads((out / "accuracy.json").read_text())
    page, err = (out / "accuracy.md").read_text(), capsys.readouterr().err
    # Products with 256 input features, of 128 tokens.
    assert record["fallbacks"].keys() >= {"layers.0.down"}
    for weight, reason in record["fallbacks"].items():
        assert f"| {weight} | {reason} |\n" in page and f"{weight} has searched" in err
    upgraded = [quant.tensor for quant in quants_of(out) if quant.bits == 8]
    assert record["upgrades"] == upgraded != []
    assert page.endswith("".join(f"- {weight}\n" for weight in upgraded))


def test_bits_are_those_of_the_weights_that_are_quantised(repo_root, capsys):
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    assert "bits per weight that is quantised" in " ".join(capsys.readouterr().out.split())
    text = (repo_root / "docs" / "quantization.md").read_text("utf-8")
    assert "the mean over the layers' weights that are quantised" in text


# LMDeploy's tools.


AWQ = {"method": "awq", "weight_format": "uint4", "group_size": 128}
GPTQ = {"method": "gptq", "weight_format": "int4", "group_size": 128}
INT8 = {"weight_format": "int8", "group_size": 0, "compute_method": "activate_quant"}
SMOOTH = {"method": "rtn", "smooth": 0.5, **INT8}


def check_same_files(made, model, config, text):
    """That the files of a tool are those of quantize_model, byte by byte."""
    folder = made[0].parent.with_name("direct")
    direct = quantize_model(str(model), folder, config, text if config.is_calibrated else None)
    assert [path.name for path in made] == [path.name for path in direct.paths]
    for own, expected in zip(made, direct.paths, strict=True):
        assert own.read_bytes() == expected.read_bytes(), own.name


@pytest.mark.parametrize(
    ("tool", "fields", "expected"),
    [
        ("auto_awq", {}, AWQ),
        (
            "auto_awq",
            {"w_sym": True, "w_bits": 8, "w_group_size": 64},
            {"method": "awq", "weight_format": "int8", "group_size": 64},
        ),
        ("auto_awq", {"calib_samples": 0}, {**AWQ, "method": "search"}),
        ("auto_gptq", {}, GPTQ),
        ("auto_gptq", {"calib_samples": 0}, {**GPTQ, "method": "search"}),
        ("smooth_quant", {}, SMOOTH),
        ("smooth_quant", {"calib_samples": 0}, {**SMOOTH, "smooth": None}),
    ],
)
def test_tools_have_lmdeploys_methods_and_formats(
    demo_model, tmp_path, text_file, tool, fields, expected
):
    sizes = {"calib_samples": 4, "calib_seqlen": 64}
    given = {"calib_dataset": str(text_file), **sizes, **fields}
    made = getattr(lite, tool)(str(demo_model), str(tmp_path / "work"), **given)
    sizes["calib_samples"] = given["calib_samples"]
    check_same_files(made.paths, demo_model, QuantizeConfig(**expected, **sizes), text_file)


@pytest.mark.parametrize(
    ("tool", "context", "length", "expected"),
    [
        ("auto_awq", 4096, 2048, AWQ),
        ("auto_gptq", 4096, 2048, GPTQ),
        ("smooth_quant", 512, 512, SMOOTH),  # the model's length
    ],
)
def test_commands_of_tools_have_lmdeploys_defaults(
    tmp_path, monkeypatch, tool, context, length, expected
):
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "max_position_embeddings": context}
    source = small_checkpoint(tmp_path / "model", config={**SMALL, **sizes})
    text = tmp_path / "wikitext2.txt"
    text.write_text(words(np.random.default_rng(0), 5000, SMALL["vocab_size"]))
    monkeypatch.chdir(tmp_path)
    assert main(["lite", tool, str(source)]) == 0
    made = [tmp_path / "work_dir" / f"model.{end}" for end in ("asgraph", "asparam")]
    config = QuantizeConfig(**expected, calib_samples=128, calib_seqlen=length)
    check_same_files(made, source, config, text)


@pytest.mark.parametrize("tool", ["auto_awq", "auto_gptq", "smooth_quant", "calibrate"])
def test_functions_of_tools_have_lmdeploys_defaults(tool):
    parameters = inspect.signature(getattr(lite, tool)).parameters
    found = {name: parameter.default for name, parameter in parameters.items()}
    assert found["work_dir"] == "./work_dir" and found["calib_dataset"] == "wikitext2"
    # None: 2048, or the model's length.
    assert found["calib_samples"] == 128 and found["calib_seqlen"] is None


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


def test_ranges_go_beside_other_results_and_not_into_the_checkpoint(
    demo_model, tmp_path, text_file
):
    given = {"calib_dataset": str(text_file), "calib_samples": 1, "calib_seqlen": 32}
    source = shutil.copytree(demo_model, tmp_path / "source")
    with pytest.raises(ValueError, match="it must be another directory than the model"):
        lite.calibrate(str(source), work_dir=str(source), **given)
    assert not (source / "inputs_stats.safetensors").exists()
    for tool in (blocked_fp8, functools.partial(lite.auto_gptq, calib_samples=0)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        lite.calibrate(str(source), work_dir=str(folder), **given)
        tool(str(source), str(folder))
        lite.calibrate(str(source), work_dir=str(folder), **given)


def test_tools_share_no_folder(demo_model, tmp_path):
    """The config of one would make the weights of the other mean something else."""
    tools = [blocked_fp8, functools.partial(lite.auto_gptq, calib_samples=0)]
    for first, second in (tools, reversed(tools)):
        folder = tmp_path / first.__class__.__name__
        first(str(demo_model), str(folder))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ValueError, match="which loaders would mix up with"):
            second(str(demo_model), str(folder))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        first(str(demo_model), str(folder))


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
    for flags in ([], ["work", "turbomind", "--kv-bits", "8"], ["--work_dir", "work", "--kv_sym"]):
        assert main(["lite", "kv_qparams", *flags]) == 1
        assert "there is nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize("value", [[], ["True"], ["False"], ["0"]])
def test_lmdeploys_documented_command_runs(demo_model, tmp_path, text_file, value, capsys):
    arguments = ["lite", "auto_awq", str(demo_model), "--calib-dataset", str(text_file)]
    arguments += ["--calib-samples", "1", "--calib-seqlen", "64", "--batch-size", "1"]
    arguments += ["--work-dir", str(tmp_path / "work"), "--w-bits", "4", "--w-group-size", "128"]
    assert main([*arguments, "--search-scale", *value]) == 0
    with pytest.raises(SystemExit):
        main([*arguments, "--search-scale", "maybe"])
    assert "--search-scale: 'maybe' is neither True nor False" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["auto_awq", "--calib-samples", "0"],
        ["auto_gptq", "--calib-samples", "0"],
        ["smooth_quant", "--calib-samples", "0"],
        ["blocked_fp8"],
    ],
)
def test_tools_report_what_they_cost(demo_model, tmp_path, text_file, command, capsys):
    arguments = ["lite", *command, str(demo_model), "--work-dir", str(tmp_path / "work")]
    arguments += ["--report", str(text_file), "--report-context", "64", "--report-tokens", "64"]
    # A model of a hub would be where they say; this one is where it was.
    assert main([*arguments, "--download-dir", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "work" / "accuracy.json").read_text())
    assert record["kl_divergence"]["mean"]["value"] > 0 and record["fallbacks"] == {}
    assert record["settings"]["tool"] == command[0]
    assert record["reference"]["source"] == str(demo_model)
    assert record["reference"]["compute_type"] == "float32"
    assert "KL divergence" in capsys.readouterr().out


def test_tools_have_flags_for_what_their_messages_ask_for(tmp_path, capsys):
    """Groups of 128 divide the input features of `down` alone."""
    source, work = small_checkpoint(tmp_path / "source"), tmp_path / "work"
    command = ["lite", "auto_gptq", str(source), "--calib-samples", "0", "--work-dir", str(work)]
    assert main(command) == 1
    assert "set another for it in group_settings" in capsys.readouterr().err
    flags = ["--group-settings", "^(?!.*down)=64", "--format-settings", "down=int8"]
    assert main([*command, *flags, "--modules-to-not-convert", r"\.o$"]) == 0
    found = {quant.tensor: (quant.bits, quant.group_size) for quant in quants_of(work)}
    assert {name: size for name, size in found.items() if name.startswith("layers.0.")} == {
        "layers.0.qkv": (4, 64), "layers.0.gate_up": (4, 64), "layers.0.down": (8, 128),
    }  # fmt: skip


def test_tools_quantise_again_where_they_are_asked_to(demo_model, tmp_path, capsys):
    blocked_fp8(str(demo_model), str(tmp_path / "fp8"))
    command = ["lite", "smooth_quant", str(tmp_path / "fp8"), "--calib-samples", "0"]
    command += ["--work-dir", str(tmp_path / "work")]
    assert main(command) == 1
    assert "quantised already; " in capsys.readouterr().err
    assert main([*command, "--requantize"]) == 0
    assert {quant.bits for quant in quants_of(tmp_path / "work")} == {8}


def test_blocked_fp8_names_no_setting_that_it_lacks(tmp_path):
    pytest.importorskip("torch")
    import test_architectures as parity

    source = tmp_path / "source"
    parity.save(parity.build("mixtral-stacked"), source)
    with pytest.raises(ValueError, match="of single experts alone can be quantised$"):
        blocked_fp8(str(source), str(tmp_path / "fp8"))


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


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", (50, 3)),
        ("model.layers.1.input_layernorm.weight", (7,)),
        ("model.layers.2.mlp.down_proj.weight", (63, 127)),
        ("model.norm.weight", (3,)),
        ("lm_head.weight", (50, 3)),
    ],
)
def test_numbers_that_are_not_finite_are_named_before_a_float8_file_is_made(
    tmp_path, name, place, value
):
    tensors = small_tensors()
    tensors[name][place] = value
    source = small_checkpoint(tmp_path / "source", tensors)
    where = ", ".join(map(str, place))
    match = rf"^{re.escape(f'{name}[{where}]')} is {value}; it must be finite"
    with pytest.raises(ValueError, match=match):
        blocked_fp8(str(source), str(tmp_path / "fp8"))
    assert not (tmp_path / "fp8").exists()


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
