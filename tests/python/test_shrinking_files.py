"""Files that somebody makes shorter while they are read are an error of the call or the model that
reads them. The system would end the process; so each test has one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_fixture import write_small_checkpoint
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.lora import adapter_tensors, write_adapter

READING = """
import os, sys
from pathlib import Path
from allspark import AllSparkError, AsStatus, HuggingFaceModel
from allspark.model_loader.errors import CheckpointError
from allspark.model_loader.storage import MappedFile, TensorEntry
from engine_fixture import GREEDY, read_all, start_engine

directory, out = Path(sys.argv[1]), sys.argv[2]


def shrink_at(number, name, to_bytes):
    '''From the reading of that tensor on, the file that holds it has ``to_bytes``.'''
    array, count = TensorEntry._array, 0

    def shrinking(entry):
        nonlocal count
        values = array(entry)
        count += entry.file.path.name == name
        if count == number and entry.file.path.name == name:
            os.truncate(entry.file.path, to_bytes)
        return values

    TensorEntry._array = shrinking


def refused(call, file):
    try:
        call()
    except CheckpointError as error:
        assert str(error) == (
            f"{file}: became shorter, or could not be read, while it was being read"
        ), error
    else:
        assert False, "no exception"
"""


def run(program: str, *arguments: object) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "HIE_LOG_LEVEL": "3"},  # a step that fails is logged
    )
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")


@pytest.fixture
def checkpoint(tmp_path):
    return write_small_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("number", [1, 4, 12])
@pytest.mark.parametrize("to_bytes", [0, 5000])
def test_converting(checkpoint, tmp_path, number, to_bytes):
    run(
        READING
        + f"""
shrink_at({number}, "model.safetensors", {to_bytes})
loader = HuggingFaceModel(str(directory), "m").load_model()
refused(lambda: loader.serialize_to_path(None, out), directory / "model.safetensors")
assert os.listdir(out) == []
""",
        checkpoint,
        tmp_path / "out",
    )


def test_loading_an_adapter(checkpoint, tmp_path):
    adapter = tmp_path / "adapter"
    write_adapter(adapter, adapter_tensors())
    run(
        READING
        + """
engine, loader = start_engine(directory, lora_max_num=2, lora_max_rank=8)
tokens = read_all(engine.start_request_ids("m", None, [1, 2, 3], GREEDY)[2])
shrink_at(2, "adapter_model.safetensors", 0)
assert engine.load_lora("m", "a", out) == AsStatus.ALLSPARK_IO_ERROR
assert "became shorter, or could not be read" in engine.last_error(), engine.last_error()
assert engine.list_loras("m") == []
assert read_all(engine.start_request_ids("m", None, [1, 2, 3], GREEDY)[2]) == tokens
""",
        checkpoint,
        adapter,
    )


SERVING = """
import os, sys
from pathlib import Path
from allspark import AsStatus, DashInferModel, Engine, GenerateRequestStatus, TargetDevice
from engine_fixture import GREEDY, read_all

OK, IO_ERROR = AsStatus.ALLSPARK_SUCCESS, AsStatus.ALLSPARK_IO_ERROR
directory = Path(sys.argv[1])
engine = Engine()


def install(name, **settings):
    loader = DashInferModel(str(directory / name), name).load_model()
    builder = loader.create_reference_runtime_config_builder(name, TargetDevice.CPU, max_batch=8)
    return engine.install_model(builder.update_from_dict(settings).build())


def start(name, **fields):
    return engine.start_request_ids(name, None, [1, 2, 3], {**GREEDY, **fields})


def message(name):
    path = directory / name / f"{name}.asparam"
    return (
        f"{path}: the file became shorter, or could not be read, while it was in use; release the "
        "model and install it again"
    )
"""


@pytest.fixture
def models(tmp_path):
    from allspark import HuggingFaceModel

    checkpoint = write_small_checkpoint(tmp_path / "checkpoint")
    for name in ("a", "b"):
        loader = HuggingFaceModel(str(checkpoint), name).load_model()
        loader.serialize_to_path(None, str(tmp_path / name))
    return tmp_path


def test_serving(models):
    run(
        SERVING
        + """
for name in "ab":
    assert install(name) == OK and engine.start_model(name) == OK, engine.last_error()
tokens = read_all(start("a")[2])
param = directory / "a" / "a.asparam"
content = param.read_bytes()
# Beside a request that runs, and one that comes later.
_, _, running = start("a", max_new_tokens=400)
running.Get()
os.truncate(param, 4096)
read_all(running)
if running.finish_reason != "length":  # it was done before
    assert running.GenerateStatus() == GenerateRequestStatus.InternalError
    assert running.error == message("a")
status, _, later = start("a")
if status == OK:
    read_all(later)
    assert later.error == message("a")
assert start("a")[0] == IO_ERROR and engine.last_error() == message("a")
assert engine.get_model_state("a").name == "Running"
assert read_all(start("b")[2]) == tokens
# The way back.
param.write_bytes(content)
assert start("a")[0] == IO_ERROR
assert engine.stop_model("a") == OK
assert engine.start_model("a") == IO_ERROR and engine.last_error() == message("a")
assert engine.release_model("a") == OK and install("a") == OK and engine.start_model("a") == OK
assert read_all(start("a")[2]) == tokens
""",
        models,
    )


def test_starting_and_loading_again(models):
    run(
        SERVING
        + """
assert install("a") == OK and install("b") == OK
os.truncate(directory / "a" / "a.asparam", 0)
assert engine.start_model("a") == IO_ERROR and engine.last_error() == message("a")
assert engine.start_model("b") == OK
tokens = read_all(start("b")[2])
assert engine.unload_device_mem("b") == OK
param = directory / "b" / "b.asparam"
content = param.read_bytes()
os.truncate(param, 0)
_, _, waiting = start("b")
assert engine.load_device_mem("b") == IO_ERROR and engine.last_error() == message("b")
assert engine.stop_model("b") == OK
assert waiting.finish_reason == "cancelled"
""",
        models,
    )


def test_a_draft_model(tmp_path):
    from allspark import HuggingFaceModel

    for name, layers in (("a", 12), ("b", 1)):  # a draft that is worth computing
        config = {**CONFIG, "num_hidden_layers": layers, "max_position_embeddings": 512}
        write_checkpoint(tmp_path / "c" / name, config=config, tensors=llama_tensors(config))
        loader = HuggingFaceModel(str(tmp_path / "c" / name), name).load_model()
        loader.serialize_to_path(None, str(tmp_path / name))
    run(
        SERVING
        + """
assert install("a", draft_model=str(directory / "b" / "b.asgraph")) == OK, engine.last_error()
assert engine.start_model("a") == OK
os.truncate(directory / "b" / "b.asparam", 0)
_, _, queue = start("a", use_draft_model=True, max_new_tokens=50)
read_all(queue)
assert queue.error == message("b"), queue.error
assert start("a")[0] == IO_ERROR and engine.last_error() == message("b")
""",
        tmp_path,
    )
