"""Every checkpoint format, with all the kinds of damage that formats share: what is refused, and
that the message names the file and, if there is one, the tensor. Damage specific to one format is
in the format's own tests.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import test_float8_checkpoints as float8
import test_meta_checkpoints as meta
import test_quantized_checkpoints as quantized
from allspark import Engine, TargetDevice
from allspark.model_loader import DashInferModel, HuggingFaceModel
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.gguf_files import metadata, renamed, write_gguf

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")
pytest.importorskip("allspark._allspark")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*weights are", "ignore:.*without a tokenizer"),
]

SAFETENSORS = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"


def write_safetensors(directory, edit, shards=0):
    tensors = llama_tensors()
    edit(tensors)
    write_checkpoint(directory, tensors, shards=shards)


def write_bin(directory, edit, **options):
    tensors = llama_tensors()
    edit(tensors)
    write_checkpoint(directory, {})
    (directory / SAFETENSORS).unlink()
    state = {name: torch.from_numpy(values.copy()) for name, values in tensors.items()}
    torch.save(state, directory / "pytorch_model.bin", **options)


def write_meta(directory, edit):
    ranks = meta.meta_ranks(llama_tensors(), 1)
    edit(ranks[0])
    meta.write_meta(directory, ranks)


def write_llama_cpp(directory, edit, **options):
    tensors = renamed("llama", llama_tensors(), CONFIG, pairs=True)
    edit(tensors)
    write_gguf(directory / "model.gguf", "llama", tensors, metadata(CONFIG), **options)


def write_row(module, row):
    def write(directory, edit):
        module.write(directory, row, edit)

    return write


# Name -> (a function that writes it after editing its tensors, its file, a matrix, a vector).
FORMATS = {
    "safetensors": (write_safetensors, SAFETENSORS, f"{Q}.weight", "model.norm.weight"),
    "bin": (write_bin, "pytorch_model.bin", f"{Q}.weight", "model.norm.weight"),
    "bin-legacy": (
        functools.partial(write_bin, _use_new_zipfile_serialization=False),
        "pytorch_model.bin", f"{Q}.weight", "model.norm.weight",
    ),
    "meta": (
        write_meta, "consolidated.00.pth", "layers.0.attention.wo.weight", "norm.weight",
    ),
    "gptq": (write_row(quantized, "gptq-int4"), SAFETENSORS, f"{Q}.scales", "model.norm.weight"),
    "awq": (write_row(quantized, "awq"), SAFETENSORS, f"{Q}.scales", "model.norm.weight"),
    "compressed-tensors": (
        write_row(quantized, "w8a8"), SAFETENSORS, f"{Q}.weight_scale", "model.norm.weight",
    ),
    "fp8": (
        write_row(float8, "blocks-32"), SAFETENSORS, f"{Q}.weight_scale_inv", "model.norm.weight",
    ),
    "gguf": (write_llama_cpp, "model.gguf", "blk.0.attn_q.weight", "output_norm.weight"),
}  # fmt: skip


def serialize(directory):
    loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32").load_model()
    loader.serialize_to_path(None, str(directory / "out"))


def refused(directory, *parts):
    """Whether serialising is refused with a message that has all ``parts``, and leaves nothing."""
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        serialize(directory)
    message = str(caught.value)
    assert all(part in message for part in (*parts, str(directory))), message
    assert not list(directory.glob("out/*.as*"))


def test_whole_ones_are_read(tmp_path):
    for name, (write, *_) in FORMATS.items():
        write(tmp_path / name, lambda tensors: None)
        serialize(tmp_path / name)


# Tensors.


def put(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def not_finite(value):
    def change(values):
        values = values.copy()
        values.flat[1] = value
        return values

    return change


TENSORS = {
    "missing matrix": (lambda m, v: lambda t: t.pop(m), 0, ()),
    "missing vector": (lambda m, v: lambda t: t.pop(v), 1, ("lacks",)),
    "too many": (lambda m, v: lambda t: t.update({"x": t[v]}), None, ("'x'",)),
    "fewer rows": (lambda m, v: put(m, lambda a: a[:-1]), 0, ()),
    "fewer columns": (lambda m, v: put(m, lambda a: a[:, :-1]), 0, ()),
    "a longer vector": (lambda m, v: put(v, lambda a: np.tile(a, 2)), 1, ("has",)),
    "a matrix that is flat": (lambda m, v: put(m, np.ravel), 0, ("shape",)),
    "a vector of integers": (lambda m, v: put(v, lambda a: a.astype("<i4")), 1, ("int32", "float")),
    "a matrix of integers": (lambda m, v: put(m, lambda a: a.astype("<i4")), 0, ("int32", "float")),
    "nan": (lambda m, v: put(m, not_finite(np.nan)), 0, ("nan", "finite")),
    "infinite": (lambda m, v: put(v, not_finite(np.inf)), 1, ("inf", "finite")),
}


@pytest.mark.parametrize("damage", TENSORS)
@pytest.mark.parametrize("name", FORMATS)
def test_tensors(tmp_path, name, damage):
    write, _, *victims = FORMATS[name]
    edit, victim, parts = TENSORS[damage]
    write(tmp_path, edit(*victims))
    named = () if victim is None else (victims[victim].rpartition(".")[0],)
    if name in ("meta", "gguf") and damage.startswith("missing"):
        # The name in the family's declaration.
        named = ({"gguf": "q_proj", "meta": "o_proj"}[name] if victim == 0 else "model.norm",)
    refused(tmp_path, *named, *parts)


# Bytes.


def cut(part):
    return lambda data: data[: int(len(data) * part)]


def head(size, value):
    return lambda data: value + data[size:]


FOREIGN = b"This is no checkpoint at all.\n" * 100
BYTES = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "header cut": lambda data: data[:40],
    "half": cut(0.5),
    "a byte short": lambda data: data[:-1],
    "a text": lambda data: FOREIGN,
    "zeros": lambda data: bytes(len(data)),
    "a first word of ones": head(8, b"\xff" * 8),
    "more at the end": lambda data: data + bytes(4096),
}
# A zip archive may be followed by anything, as long as its directory is found; a text may be GGUF's
# first four bytes only.
HARMLESS = {("bin", "more at the end"), ("meta", "more at the end")}


@pytest.mark.parametrize("damage", BYTES)
@pytest.mark.parametrize("name", ["safetensors", "bin", "bin-legacy", "meta", "gguf"])
def test_bytes(tmp_path, name, damage):
    write, file, *_ = FORMATS[name]
    write(tmp_path, lambda tensors: None)
    path = tmp_path / file
    path.write_bytes(BYTES[damage](path.read_bytes()))
    if (name, damage) in HARMLESS:
        serialize(tmp_path)
    else:
        refused(tmp_path, file)


@pytest.mark.parametrize("other", ["safetensors", "bin", "gguf"])
@pytest.mark.parametrize("name", ["safetensors", "bin", "meta", "gguf"])
def test_a_file_of_another_format(tmp_path, name, other):
    for form in {name, other}:
        FORMATS[form][0](tmp_path / form, lambda tensors: None)
    path = tmp_path / name / FORMATS[name][1]
    path.write_bytes((tmp_path / other / FORMATS[other][1]).read_bytes())
    if name != other:
        refused(tmp_path / name, path.name)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("safetensors", functools.partial(write_safetensors, shards=3)),
        ("gguf", functools.partial(write_llama_cpp, shard_tensors=8)),
    ],
)
def test_shards(tmp_path, name, write):
    def fresh(part):
        write(tmp_path / part, lambda tensors: None)
        return sorted(path for path in (tmp_path / part).iterdir() if "-of-" in path.name)

    for number, shard in enumerate(fresh("whole")):
        missing = fresh(f"missing-{number}")[number]
        missing.unlink()
        refused_here = (ValueError, NotImplementedError)
        with pytest.raises(refused_here, match=shard.name):
            serialize(missing if name == "gguf" and number == 0 else missing.parent)
        twice = fresh(f"twice-{number}")
        source = twice[number - 1]
        twice[number].write_bytes(source.read_bytes())
        refused(tmp_path / f"twice-{number}", ".safetensors" if name == "safetensors" else "split.")
    serialize(tmp_path / "whole")


# A serialised model.


@pytest.mark.parametrize("damage", BYTES)
@pytest.mark.parametrize("ending", ["asgraph", "asparam"])
def test_serialised_models(tmp_path, ending, damage):
    write_checkpoint(tmp_path)
    loader = HuggingFaceModel(str(tmp_path), "m", user_set_data_type="float32").load_model()
    loader.serialize_to_path(None, str(tmp_path / "out"))
    path = tmp_path / "out" / f"m.{ending}"
    model = DashInferModel(str(tmp_path / "out"), "m").load_model()
    config = model.create_reference_runtime_config_builder("m", TargetDevice.CPU).build()
    path.write_bytes(BYTES[damage](path.read_bytes()))
    engine = Engine()
    assert int(engine.install_model(config)) != 0
    assert str(path) in engine.last_error()
    assert engine.list_models() == []
