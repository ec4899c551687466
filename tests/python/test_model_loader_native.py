"""The loaders with the engine: round trips through files and memory, what is kept and what is made
again, and how much memory a conversion takes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from support.checkpoints import CONFIG, llama_tensors, safetensors_bytes, write_checkpoint

native = pytest.importorskip("allspark._allspark")

from allspark.engine import Engine, RoPEScaleMethod, TargetDevice  # noqa: E402
from allspark.model_loader import (  # noqa: E402
    DashInferModel,
    HuggingFaceModel,
    ModelSerializerException,
)
from allspark.model_loader.errors import CheckpointError, UnexplainedTensorError  # noqa: E402

IDS = [5, 17, 3, 30, 8, 21]
NAME = "m"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "in")


def loader_of(directory, name=NAME):
    return HuggingFaceModel(str(directory), name, user_set_data_type="float32").load_model()


def logits(model):
    if not isinstance(model, native.ModelImage):
        model = str(model)
    return native.testing.forward_logits(model, IDS, [], 1, "", 16)


def generate(engine, loader, name=NAME):
    """Installs, runs one greedy request, and releases."""
    builder = loader.create_reference_runtime_config_builder(name, TargetDevice.CPU, [0], 2)
    engine.install_model(builder.build())
    assert int(engine.start_model(name)) == 0, engine.last_error()
    fields = loader.create_reference_generation_config_builder(builder.build())
    fields.update({"max_new_tokens": 8, "early_stopping": False})
    status, handle, queue = engine.start_request_ids(name, loader, IDS, fields)
    assert int(status) == 0, engine.last_error()
    engine.sync_request(name, handle)
    ids = queue.Get().ids_from_generate
    engine.stop_model(name)
    assert int(engine.release_model(name)) == 0
    return ids


def test_files_memory_and_native_loader_are_one_model(checkpoint, tmp_path):
    engine = Engine()
    in_memory = loader_of(checkpoint).serialize_to_memory(engine)
    in_files = loader_of(checkpoint).serialize_to_path(engine, str(tmp_path / "out"))
    graph = tmp_path / "out" / "m.asgraph"
    np.testing.assert_array_equal(logits(in_memory._image), logits(graph))
    expected = generate(engine, in_memory)
    assert len(expected) == 8
    assert generate(engine, in_files) == expected
    # The directory is a complete model: the checkpoint is not needed any more.
    shutil.rmtree(checkpoint)
    for path in (tmp_path / "out", graph, tmp_path / "out" / "m"):
        opened = DashInferModel(str(path), NAME).load_model().read_model_config()
        assert opened.serialize_to_memory(engine).free_model() is opened
        assert opened.get_model_context_length() == 64
        assert opened.get_model_config()["vocab_size"] == 40
        assert generate(engine, opened) == expected
    (tmp_path / "out" / "config.json").unlink()
    assert generate(engine, DashInferModel(str(graph), NAME)) == expected


def test_an_image_is_installed_under_any_name(checkpoint):
    engine = Engine()
    loader = loader_of(checkpoint, "org/name").serialize_to_memory(engine)
    expected = generate(engine, loader, "org/name")
    assert generate(engine, loader, "org_name") == expected
    assert generate(engine, loader, "another") == expected


@pytest.mark.parametrize("installed", ["org/name", "prod"])
def test_an_image_lives_as_long_as_it_is_needed(checkpoint, installed):
    engine = Engine()
    loader = loader_of(checkpoint, "org/name").serialize_to_memory(engine)
    builder = loader.create_reference_runtime_config_builder(installed, TargetDevice.CPU, [0], 2)
    engine.install_model(builder.build())
    assert loader.free_memory_serialize_file() is loader
    assert int(engine.start_model(installed)) == 0, engine.last_error()
    engine.stop_model(installed)
    assert int(engine.release_model(installed)) == 0
    for name in (installed, "org/name", "org_name"):
        engine.install_model(builder.model_name(name).build())
        assert f"no serialised model '{name}' is in memory" in engine.last_error()


def test_runtime_builder(checkpoint, tmp_path):
    loader = loader_of(checkpoint).serialize_to_memory(Engine())

    def build(**options):
        return loader.create_reference_runtime_config_builder(
            NAME, TargetDevice.CPU, [0], 3, **options
        ).build()

    config = build()
    assert (config.model_name, config.model_path) == (NAME, "")
    assert (config.engine_max_length, config.engine_max_batch) == (64, 3)
    assert build(max_context_length=32).engine_max_length == 32
    for bad in (0, 1, -2, 65):
        with pytest.raises(
            ValueError, match=f"max_context_length is {bad}, expected -1 or 2 to 64"
        ):
            build(max_context_length=bad)
    loader.serialize_to_path(None, str(tmp_path / "out"))
    assert build().model_path == str(tmp_path / "out" / "m.asgraph")
    assert build().weights_path == str(tmp_path / "out" / "m.asparam")


def test_generation_builder(checkpoint):
    fields = {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.5, "top_k": 7}
    (checkpoint / "generation_config.json").write_text(json.dumps(fields))
    loader = loader_of(checkpoint)
    built = loader.create_reference_generation_config_builder().build()
    assert built["max_length"] == 64 and built["eos_token_id"] == 2 and built["top_k"] == 7
    config = loader.create_reference_runtime_config_builder(
        NAME, TargetDevice.CPU, [0], 1, max_context_length=20
    ).build()
    built = loader.create_reference_generation_config_builder(config).build()
    assert built["max_length"] == 20


def change_byte(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 0xFF]))


def make_current(out, checkpoint, loader):
    del out, checkpoint, loader


def flip_weight(out, checkpoint, loader):
    change_byte(out / "m.asparam", 4096)


def flip_graph(out, checkpoint, loader):
    change_byte(out / "m.asgraph", 40)


def truncate_param(out, checkpoint, loader):
    os.truncate(out / "m.asparam", 4096)


def empty_graph(out, checkpoint, loader):
    os.truncate(out / "m.asgraph", 0)


def remove_param(out, checkpoint, loader):
    (out / "m.asparam").unlink()


def other_weights(out, checkpoint, loader):
    write_checkpoint(checkpoint, llama_tensors(seed=1))
    loader.load_model()


def other_config(out, checkpoint, loader):
    write_checkpoint(checkpoint, config={**CONFIG, "rms_norm_eps": 1e-3})
    loader.load_model()


def other_data_type(out, checkpoint, loader):
    loader.load_model(override_data_type="bfloat16")


def other_rope(out, checkpoint, loader):
    parameters = {"factor": 2.0, "original_max_position_embeddings": 32}
    loader.set_rope_scale_method(RoPEScaleMethod.YaRN, parameters)


@pytest.mark.parametrize(
    "change",
    [
        make_current,
        flip_weight,
        flip_graph,
        truncate_param,
        empty_graph,
        remove_param,
        other_weights,
        other_config,
        other_data_type,
        other_rope,
    ],
)
@pytest.mark.parametrize("with_engine", [True, False])
def test_skip_if_exists_keeps_only_what_is_current(checkpoint, tmp_path, change, with_engine):
    out = tmp_path / "out"
    loader = loader_of(checkpoint).serialize_to_path(None, str(out))
    change(out, checkpoint, loader)
    before = {path.name: path.stat().st_ino for path in out.glob("m.as*")}
    engine = Engine() if with_engine else None
    loader.serialize_to_path(engine, str(out), skip_if_exists=True)
    after = {path.name: path.stat().st_ino for path in out.glob("m.as*")}
    assert (before == after) == (change is make_current)
    fresh = loader_of(checkpoint)
    fresh.data_type, fresh._rope_scaling = loader.data_type, loader._rope_scaling
    fresh.read_model_config().serialize_to_memory(Engine())
    np.testing.assert_array_equal(logits(out / "m.asgraph"), logits(fresh._image))
    if engine is not None:
        assert engine.list_models() == []


def test_a_failed_conversion_leaves_no_files(checkpoint, tmp_path):
    tensors = llama_tensors()
    tensors["model.norm.weight"][3] = np.nan
    write_checkpoint(checkpoint, tensors)
    with pytest.raises(CheckpointError, match="tensor 'model.norm.weight'.*final_norm"):
        loader_of(checkpoint).serialize_to_path(None, str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
    tensors = llama_tensors()
    (checkpoint / "model.safetensors").write_bytes(
        safetensors_bytes({**tensors, "mystery": tensors["model.norm.weight"]})
    )
    with pytest.raises(UnexplainedTensorError, match="mystery"):
        loader_of(checkpoint).serialize_to_path(None, str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_native_directories_that_are_none(tmp_path, checkpoint):
    with pytest.raises(FileNotFoundError, match=r"no serialised model"):
        DashInferModel(str(checkpoint))
    with pytest.raises(FileNotFoundError, match=r"gone.asgraph: no such file"):
        DashInferModel(str(tmp_path / "gone"))
    out = tmp_path / "out"
    loader_of(checkpoint, "a").serialize_to_path(None, str(out))
    loader_of(checkpoint, "b").serialize_to_path(None, str(out))
    with pytest.raises(CheckpointError, match=r"several models \(a.asgraph, b.asgraph\)"):
        DashInferModel(str(out))
    DashInferModel(str(out / "a")).load_model()
    os.truncate(out / "a.asparam", 100)
    with pytest.raises(CheckpointError, match="a.asparam: 100 bytes"):
        DashInferModel(str(out / "a")).load_model()
    (out / "a.asparam").unlink()
    with pytest.raises(FileNotFoundError, match="a.asparam"):
        DashInferModel(str(out / "a")).load_model()
    (out / "a.asgraph").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="wrong magic"):
        DashInferModel(str(out / "a")).load_model()
    with pytest.raises(ModelSerializerException):
        DashInferModel(str(out / "a")).get_model_context_length()


# Memory.

BIG = {
    **CONFIG,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8000,
    "max_position_embeddings": 256,
}

MEASURE = """
import re, sys
from allspark.engine import Engine
from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.native import native
from allspark.model_loader.spec import message_class

def memory(key):
    with open("/proc/self/status") as file:
        return int(re.search(key + r":\\s+(\\d+) kB", file.read())[1]) * 1024

message_class("DecoderSpec"), native()
engine = Engine()
loader = HuggingFaceModel(sys.argv[1], "big").load_model()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # The peak starts again from here.
before = memory("VmRSS")
loader.serialize(engine, sys.argv[2])
print(memory("VmHWM") - before)
"""


@pytest.mark.parametrize("target", ["memory", "path"])
@pytest.mark.parametrize("shards", [0, 3])
def test_conversion_takes_one_tensor_beside_what_it_makes(tmp_path, target, shards):
    """85 MB of bfloat16; a copy of the model, a second one in memory, would be noticed."""
    block = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    block = (block.view(np.uint32) >> 16).astype("<u2")
    tensors = {
        name: np.resize(block, array.shape) for name, array in llama_tensors(BIG, "<u2").items()
    }
    write_checkpoint(tmp_path / "in", tensors, BIG, shards)
    model_bytes = sum(array.nbytes for array in tensors.values())
    tensor_bytes = max(array.nbytes for array in tensors.values())
    assert 70e6 < model_bytes < 100e6
    del tensors
    out = str(tmp_path / "out") if target == "path" else ""
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "in"), out]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout)
    slack = 16 << 20  # headers, index, Python objects
    most = tensor_bytes + slack + (model_bytes if target == "memory" else 0)
    assert peak <= most, f"{peak / 1e6:.0f} MB"
    assert list((tmp_path / "tmp").iterdir()) == []
