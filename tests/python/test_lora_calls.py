"""Engine.load_lora and its related calls, with a native engine that records its calls: where an
adapter is read from, and how failures are reported.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.checkpoints import CONFIG, write_checkpoint
from support.lora import adapter_tensors, write_adapter

pytest.importorskip("allspark._allspark")

from allspark import AsStatus, HuggingFaceModel, TargetDevice
from allspark.engine import Engine
from allspark.model_loader import LoraAdapter
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.convert import describe_decoder

SUCCESS = AsStatus.ALLSPARK_SUCCESS


class FakeNative:
    def __init__(self):
        self.calls = []

    def model_spec(self, model_name):
        if model_name != "m":
            raise KeyError(f"model '{model_name}' is not installed")
        return describe_decoder(ModelConfig(CONFIG)).spec("float32").SerializeToString()

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            failed = "refused" in arguments
            status = AsStatus.ALLSPARK_LORA_IN_USE if failed else SUCCESS
            return SimpleNamespace(ok=not failed, as_status=status, message="no")

        return call


@pytest.fixture
def engine():
    engine = Engine()
    engine._native = FakeNative()
    return engine


def loaded(engine):
    """The arguments of the last load_lora of the native engine."""
    name, *arguments = engine._native.calls[-1]
    assert name == "load_lora"
    return arguments


def test_the_statuses_are_there():
    codes = {
        name: int(getattr(AsStatus, f"ALLSPARK_LORA_{name}"))
        for name in (
            "NUM_EXCEED_LIMIT_ERROR",
            "RANK_EXCEED_LIMIT_ERROR",
            "NOT_FOUND",
            "ALREADY_LOADED",
            "IN_USE",
        )
    }
    assert list(codes.values()) == [21, 22, 23, 24, 25]


def test_a_file_is_left_to_the_native_engine(engine, tmp_path):
    assert engine.load_lora("m", "a", tmp_path / "a.aslora") == SUCCESS
    assert loaded(engine) == ["m", "a", str(tmp_path / "a.aslora")]
    assert engine.load_lora("m", "refused", "b.aslora") == AsStatus.ALLSPARK_LORA_IN_USE
    assert engine.last_error() == "no"
    assert engine.unload_lora("m", "a") == SUCCESS
    assert engine.unload_lora("m", "refused") == AsStatus.ALLSPARK_LORA_IN_USE


def test_directories_adapters_and_images(engine, tmp_path):
    directory = write_adapter(tmp_path / "adapter")
    adapter = LoraAdapter(directory, engine._native.model_spec("m"))
    for lora in (directory, str(directory), adapter, adapter.serialize_to_memory()):
        assert engine.load_lora("m", "a", lora) == SUCCESS
        assert type(loaded(engine)[2]).__name__ == "LoraImage"


def test_what_cannot_be_read_is_a_status(engine, tmp_path):
    directory = write_adapter(tmp_path / "adapter", use_dora=True)
    assert engine.load_lora("m", "a", directory) == AsStatus.ALLSPARK_PARAM_ERROR
    assert "use_dora is True" in engine.last_error()
    assert engine.load_lora("other", "a", directory) == AsStatus.ALLSPARK_PARAM_ERROR
    assert engine.last_error() == "model 'other' is not installed"
    (directory / "adapter_config.json").unlink()
    assert engine.load_lora("m", "a", directory) == AsStatus.ALLSPARK_IO_ERROR
    assert "adapter_config.json: no such file" in engine.last_error()
    assert engine._native.calls == []
    with pytest.raises(TypeError, match="lora is a int"):
        engine.load_lora("m", "a", 3)


def test_adapters_beside_the_models_files(engine, tmp_path):
    write_adapter(tmp_path / "loras" / "a")
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path / "base")), "m", False)
    lora_cfg = {"input_base_dir": str(tmp_path / "loras"), "lora_names": ["a"]}
    loader.load_model().serialize_to_path(None, str(tmp_path / "out"), lora_cfg=lora_cfg)
    builder = loader.create_reference_runtime_config_builder("served", TargetDevice.CPU)
    engine.install_model(builder.build())
    assert engine.load_lora("served", "a") == SUCCESS
    assert loaded(engine) == ["served", "a", str(tmp_path / "out" / "a.aslora")]
    engine.release_model("served")
    assert engine.load_lora("served", "a") == AsStatus.ALLSPARK_PARAM_ERROR
    assert "no adapter 'a' was serialised with the model 'served'" in engine.last_error()


def test_adapters_in_memory_beside_the_model(engine, tmp_path):
    for seed, name in enumerate(("a", "b")):
        write_adapter(tmp_path / "loras" / name, adapter_tensors(seed=seed))
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path / "base")), "m", True)
    lora_cfg = {"input_base_dir": str(tmp_path / "loras"), "lora_names": ["a", "b"]}
    loader.load_model().serialize(engine, lora_cfg=lora_cfg)
    assert {name for name, *_ in engine._native.calls} == {"register_image"}
    builder = loader.create_reference_runtime_config_builder("served", TargetDevice.CPU)
    engine.install_model(builder.build())
    images = set()
    for model_name in ("m", "served"):
        for name in ("a", "b"):
            assert engine.load_lora(model_name, name) == SUCCESS
            images.add(loaded(engine)[2])
    assert len(images) == 2
    assert engine.load_lora("served", "c") == AsStatus.ALLSPARK_PARAM_ERROR
    engine.release_model("served")
    assert engine.load_lora("served", "a") == AsStatus.ALLSPARK_PARAM_ERROR


def test_a_release_drops_the_adapters_under_all_names_of_the_loader(engine, tmp_path):
    write_adapter(tmp_path / "loras" / "a")
    lora_cfg = {"input_base_dir": str(tmp_path / "loras"), "lora_names": ["a"]}
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path / "base")), "m", True)
    loader.load_model().serialize(engine, lora_cfg=lora_cfg)
    for name in ("served", "again"):
        builder = loader.create_reference_runtime_config_builder(name, TargetDevice.CPU)
        engine.install_model(builder.build())
    engine.release_model("served")
    # What belongs to a model that is installed stays.
    assert engine.load_lora("again", "a") == SUCCESS
    engine.release_model("again")
    assert engine._loras._images == {}
    # Now the loader's own name is another model's, which has adapters of its own.
    other = HuggingFaceModel(str(tmp_path / "base"), "m", False).load_model()
    other.serialize_to_path(None, str(tmp_path / "out"), lora_cfg=lora_cfg)
    builder = other.create_reference_runtime_config_builder("m", TargetDevice.CPU)
    engine.install_model(builder.build())
    assert engine.load_lora("m", "a") == SUCCESS
    assert loaded(engine) == ["m", "a", str(tmp_path / "out" / "a.aslora")]
