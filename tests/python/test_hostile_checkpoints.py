"""Checkpoints that are made to stall, to fill the memory or to read other files: refused by name,
at once, and nothing of what they lead to arrives in an output.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from allspark.model_loader import HuggingFaceModel, ModelSerializerException
from allspark.whole_file import temporary_file
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.lora import write_adapter

# A child ends where this process would wait for ever.
PROGRAM = """
import resource, sys, warnings
from allspark.model_loader import HuggingFaceModel, ModelSerializerException
warnings.simplefilter("error")
resource.setrlimit(resource.RLIMIT_DATA, (600 << 20,) * 2)
try:
    loader = HuggingFaceModel(sys.argv[1], "m").load_model()
    if sys.argv[2] == "tokenizer":
        loader.get_tokenizer()
    else:
        loader.serialize_to_path(None, sys.argv[1] + "/out")
except (ModelSerializerException, UserWarning) as error:
    print(error)
"""


def message_of(directory, action="serialize", program=PROGRAM):
    command = [sys.executable, "-c", program, str(directory), action]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    return write_checkpoint(directory, llama_tensors(CONFIG), CONFIG)


NAMES = [
    ("config.json", "serialize"),
    ("generation_config.json", "serialize"),
    ("model.safetensors.index.json", "serialize"),
    ("tokenizer_config.json", "tokenizer"),
    ("tokenizer.json", "tokenizer"),
    ("chat_template.jinja", "tokenizer"),
]


def put(path, make):
    path.unlink(missing_ok=True)
    if path.name == "model.safetensors.index.json":
        (path.parent / "model.safetensors").unlink()
    make(path)


@pytest.mark.parametrize(("name", "action"), NAMES)
def test_a_pipe(checkpoint, name, action):
    put(checkpoint / name, os.mkfifo)
    assert f"{checkpoint / name}: not a regular file" in message_of(checkpoint, action)


@pytest.mark.parametrize(("name", "action"), NAMES)
def test_a_device(checkpoint, name, action):
    put(checkpoint / name, lambda path: path.symlink_to("/dev/zero"))
    expected = f"{checkpoint / name}: a link out of its directory, to /dev/zero"
    assert expected in message_of(checkpoint, action)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "generation_config.json"])
def test_a_link_to_somebody_s_file_is_not_copied(checkpoint, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"key": "hunter2"}))
    (checkpoint / name).symlink_to(secret)
    expected = f"{checkpoint / name}: a link out of its directory, to {secret}"
    assert expected in message_of(checkpoint)
    out = checkpoint / "out"
    assert not any(b"hunter2" in path.read_bytes() for path in out.glob("*"))


@pytest.mark.parametrize("action", ["serialize", "tokenizer"])
def test_a_link_to_somebody_s_folder_of_templates_is_not_followed(checkpoint, tmp_path, action):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "secret.jinja").write_text("hunter2")
    (checkpoint / "tokenizer.json").write_text("{}")
    folder = checkpoint / "additional_chat_templates"
    folder.symlink_to(tmp_path / "else")
    expected = f"{folder}: a link out of its directory, to {tmp_path / 'else'}"
    assert expected in message_of(checkpoint, action)
    assert not any((checkpoint / "out").glob("*"))


def test_links_within_the_checkpoint_and_a_hub_s_cache_are_followed(checkpoint, tmp_path):
    text = (checkpoint / "config.json").read_bytes()
    (checkpoint / "own.json").write_bytes(text)
    put(checkpoint / "config.json", lambda path: path.symlink_to("own.json"))
    HuggingFaceModel(str(checkpoint), "m").load_model()

    cache = tmp_path / "models--somebody--model"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for i, name in enumerate(("config.json", "model.safetensors")):
        (cache / "blobs" / str(i)).write_bytes((checkpoint / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{i}")
    HuggingFaceModel(str(snapshot), "m").load_model().serialize_to_path(None, str(tmp_path / "o"))
    assert (tmp_path / "o" / "config.json").read_bytes() == text

    # Blobs of another repository are somebody else's.
    other = tmp_path / "models--somebody--else"
    cache.rename(other)
    checkpoint.rename(snapshot := tmp_path / "models--somebody--model")
    for blob in ("../models--somebody--else/blobs/0", str(other / "blobs" / "0")):
        put(snapshot / "config.json", lambda path, blob=blob: path.symlink_to(blob))
        with pytest.raises(ModelSerializerException, match=f"out of its directory, to {other}/blo"):
            HuggingFaceModel(str(snapshot), "m").load_model()


def test_a_file_that_grows_is_read_to_its_bound(checkpoint, monkeypatch):
    from allspark.model_loader import config

    monkeypatch.setattr(config, "MAX_JSON_BYTES", 100)
    with pytest.raises(ModelSerializerException, match="config.json: larger than 100 bytes, so n"):
        HuggingFaceModel(str(checkpoint), "m").load_model()


HUGE = 1 << 28
MIXTRAL = {
    **CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 4096,
    "num_local_experts": 1024,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
}
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "hidden_size": HUGE,
    "n_head": HUGE,
    "n_layer": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (MIXTRAL, [], "the checkpoint lacks 'model.layers.0.block_sparse_moe.experts.0.w1.weight'"),
        (
            MIXTRAL,
            [f"model.layers.{i}.block_sparse_moe.experts.0.w1.weight" for i in range(4096)],
            "there are 1024 experts in a layer, so 6144 tensors of experts up to layer 2; the "
            "checkpoint has 4117 tensors",
        ),
        (BLOOM, [], f"config.json: n_head is {HUGE}, expected 1 to 65536"),
    ],
)
def test_a_configuration_takes_no_memory_that_its_files_do_not_have(
    tmp_path, config, names, message
):
    pytest.importorskip("allspark._allspark")
    tensors = dict.fromkeys(names, np.zeros((1, 1), "<f4"))
    tensors |= llama_tensors({**CONFIG, "hidden_size": 64})
    directory = write_checkpoint(tmp_path / "checkpoint", tensors, config)
    assert message in message_of(directory)


def test_a_full_disk_leaves_nothing(checkpoint):
    pytest.importorskip("allspark._allspark")
    (checkpoint / "tokenizer.json").write_bytes(b"{}" + b" " * (1 << 20))
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19,) * 2)\ntry:"
    limited = PROGRAM.replace("try:", limit)
    message = message_of(checkpoint, program=limited)
    assert f"{checkpoint / 'out' / 'tokenizer.json'}: cannot be written: File too large" in message
    assert not any((checkpoint / "out").iterdir())


def test_what_a_killed_process_left_is_removed(checkpoint, tmp_path):
    pytest.importorskip("allspark._allspark")
    out = tmp_path / "out"
    out.mkdir()
    leftovers = [out / ".config.json.1-0.tmp", out / "m.asparam.tmp-1-0", out / "m.asgraph.tmp-1-0"]
    for path in leftovers:
        path.write_text("a part")
    locked = out / ".config.json.1-1.tmp"
    with open(locked, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        HuggingFaceModel(str(checkpoint), "m").load_model().serialize_to_path(None, str(out))
    names = sorted(path.name for path in out.iterdir())
    assert names == [locked.name, "config.json", "m.asgraph", "m.asparam"]


# Files of another container, whose processes have the same ids.
BUSY = """
import fcntl, os, sys
os.mkdir(sys.argv[1] + "/out")
files = [
    open(f"{sys.argv[1]}/out/.config.json.{os.getpid()}-{i}.tmp", "wb") for i in range(9)
]
for file in files:
    fcntl.flock(file, fcntl.LOCK_EX)
"""


def test_temporary_files_of_another_container_are_in_nobody_s_way(checkpoint):
    pytest.importorskip("allspark._allspark")
    assert message_of(checkpoint, program=BUSY + PROGRAM) == ""
    names = sorted(path.name for path in (checkpoint / "out").iterdir())
    assert names[-3:] == ["config.json", "m.asgraph", "m.asparam"] and len(names) == 3 + 9


@pytest.mark.parametrize("is_done", [True, False])
def test_a_new_file_that_another_process_takes_for_a_leftover(tmp_path, monkeypatch, is_done):
    lock, taken = fcntl.flock, []

    def flock(file, operation):
        if not taken:
            taken.append(file.name)
            with open(file.name, "r+b") as other:
                lock(other, operation)
                try:
                    if not is_done:
                        lock(file, operation)  # fails: the other process has it
                finally:
                    os.unlink(file.name)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with temporary_file(tmp_path, "x") as file:
        file.write(b"whole")
        file.flush()
        os.replace(file.name, tmp_path / "x")
    assert taken and (tmp_path / "x").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


LOCKED = """
import os, signal
from tqdm import tqdm
tqdm.get_lock()
if os.fork() == 0:
    tqdm.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
"""


def test_a_fork_that_was_killed_in_a_conversion_stops_no_other(checkpoint):
    pytest.importorskip("allspark._allspark")
    pytest.importorskip("tqdm")
    assert message_of(checkpoint, program=LOCKED + PROGRAM) == ""
    assert (checkpoint / "out" / "m.asgraph").exists()


@pytest.mark.parametrize(("path", "name"), [("m", "a\0b"), ("a\0b", "m")])
def test_a_name_with_a_nul(path, name):
    with pytest.raises(ValueError, match="has a NUL character in its name or path"):
        HuggingFaceModel(path, name)


ADAPTER = """
import sys
from allspark.model_loader import HuggingFaceModel, LoraAdapter
base = HuggingFaceModel(sys.argv[1], "m").load_model()
print(len(LoraAdapter(sys.argv[1] + "/" + sys.argv[2], base).pairs))
"""


def test_an_expression_of_an_adapter_returns(checkpoint):
    # Python's own expressions would try 2^30 ways to match a name.
    write_adapter(checkpoint / "adapter", exclude_modules="(([a-z0-9._])+)+X")
    assert message_of(checkpoint, "adapter", ADAPTER) == "14\n"
