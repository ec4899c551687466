"""The checkpoint readers: what they read, and that they refuse everything malformed."""

from __future__ import annotations

import collections
import json
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from allspark.model_loader import pickle_file
from allspark.model_loader.checkpoint import Checkpoint
from allspark.model_loader.errors import CheckpointError, CheckpointNotFoundError
from allspark.model_loader.safetensors_file import MAX_HEADER_BYTES, read_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import llama_tensors, safetensors_bytes, write_checkpoint

TENSORS = {
    "a": np.arange(12, dtype="<f4").reshape(3, 4),
    "b": np.arange(5, dtype="<f2"),
    "c": np.arange(6, dtype="<u2").reshape(2, 3),
    "scalar": np.array(7, "<i8"),
    "empty": np.zeros((0, 3), "<f4"),
}

FUZZ = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def read_all(checkpoint):
    values = {}
    for name, entry in checkpoint.tensors.items():
        with entry.open() as array:
            assert array.flags.c_contiguous
            values[name] = array.copy()
    return values


def assert_same(read, written):
    assert read.keys() == written.keys()
    for name, array in written.items():
        assert read[name].shape == array.shape
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def write_file(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return path


# safetensors: accepted.


def test_single_file(tmp_path):
    write_file(tmp_path, safetensors_bytes(TENSORS))
    checkpoint = Checkpoint.open(tmp_path)
    assert_same(read_all(checkpoint), TENSORS)
    assert checkpoint.tensors["c"].dtype == "bfloat16"


def test_shards(tmp_path):
    tensors = llama_tensors()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, shards=3))
    assert len(checkpoint.files) == 3
    assert_same(read_all(checkpoint), tensors)


def test_data_at_an_odd_address_is_read(tmp_path):
    raw = safetensors_bytes({"a": TENSORS["a"]})
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length].rstrip()
    header += b" " * (1 + -len(header) % 2)
    write_file(tmp_path, struct.pack("<Q", len(header)) + header + raw[8 + length :])
    assert_same(read_all(Checkpoint.open(tmp_path)), {"a": TENSORS["a"]})


def test_safetensors_are_preferred(tmp_path):
    write_file(tmp_path, safetensors_bytes(TENSORS))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    assert_same(read_all(Checkpoint.open(tmp_path)), TENSORS)
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        Checkpoint.open(tmp_path, "pt")


def test_a_tensor_read_is_a_view_and_stays_valid(tmp_path):
    write_file(tmp_path, safetensors_bytes(TENSORS))
    tracemalloc.start()
    entry = Checkpoint.open(tmp_path).tensors["a"]
    with entry.open() as array:
        assert not array.flags.owndata and not array.flags.writeable
    tracemalloc.stop()
    np.testing.assert_array_equal(array, TENSORS["a"])


# safetensors: refused.


def edited(**changes):
    """A file whose entry "a" has changed fields."""

    def edit(header):
        header["a"].update(changes)

    return safetensors_bytes({"a": TENSORS["a"], "b": TENSORS["b"]}, edit)


def without(field):
    def edit(header):
        del header["a"][field]

    return safetensors_bytes({"a": TENSORS["a"]}, edit)


GOOD = safetensors_bytes({"a": TENSORS["a"]})
TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32"}}'
MALFORMED = {
    "empty": (b"", "empty file"),
    "short": (b"\1\0\0", "too short"),
    "header absurdly long": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "header length"),
    "header of 2^64": (b"\xff" * 16, "header length is 18446744073709551615"),
    "header past the end": (struct.pack("<Q", 100) + b"{}", "truncated"),
    "header not UTF-8": (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
    "header not JSON": (struct.pack("<Q", 4) + b"{]  ", "not valid JSON"),
    "header too deep": (struct.pack("<Q", 100000) + b"[" * 100000, "not valid JSON"),
    "header a list": (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    "name twice": (struct.pack("<Q", len(TWICE)) + TWICE + bytes(4), "'a' appears twice"),
    "no dtype": (without("dtype"), "tensor 'a'.*lacks"),
    "no shape": (without("shape"), "tensor 'a'.*lacks"),
    "no offsets": (without("data_offsets"), "tensor 'a'.*lacks"),
    "unknown dtype": (edited(dtype="F33"), "tensor 'a' has dtype 'F33'"),
    "dtype no string": (edited(dtype=[1]), "tensor 'a' has dtype"),
    "dtype of another size": (edited(dtype="F16"), "tensor 'a' has 48 bytes.*takes 24"),
    "negative shape": (edited(shape=[-3, -4]), "tensor 'a' has shape"),
    "shape of floats": (edited(shape=[3.0, 4]), "tensor 'a' has shape"),
    "shape too large": (edited(shape=[1 << 40, 1 << 40]), "too many elements"),
    "rank too high": (edited(shape=[1] * 9), "at most 8 dimensions"),
    "shape of another size": (edited(shape=[3, 5]), "tensor 'a' has 48 bytes.*takes 60"),
    "offsets past the end": (edited(data_offsets=[0, 4096]), "tensor 'a'.*outside the 58 bytes"),
    "offsets negative": (edited(data_offsets=[-48, 0]), "tensor 'a'.*outside"),
    "offsets backwards": (edited(data_offsets=[48, 0]), "tensor 'a'.*outside"),
    "offsets floats": (edited(data_offsets=[0.0, 48.0]), "tensor 'a'.*two integers"),
    "offsets one": (edited(data_offsets=[0]), "tensor 'a'.*two integers"),
    "overlap": (edited(data_offsets=[4, 52]), "tensor '[ab]'.*(overlaps|hole)"),
    "truncated": (GOOD[:-1], "truncated"),
    "trailing bytes": (GOOD + b"\0", "data ends at offset"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_safetensors(tmp_path, case):
    data, message = MALFORMED[case]
    path = write_file(tmp_path, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)), st.booleans())
def test_any_damage_is_an_error_or_harmless(tmp_path, position, value, length, cut):
    data = bytearray(GOOD)
    data[position] = value
    path = write_file(tmp_path, bytes(data[:length] if cut else data))
    try:
        entries = read_safetensors(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        for entry in entries:
            with entry.open() as array:
                array.sum()


# Directories and indices.


def test_directory_without_weights(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"model\.safetensors.*pytorch_model\.bin"):
        Checkpoint.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        Checkpoint.open(tmp_path)


def test_symlink_loop(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="model.safetensors"):
        Checkpoint.open(tmp_path)


def test_symlink_to_nowhere(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointNotFoundError, match="leads nowhere"):
        Checkpoint.open(tmp_path)


def test_weights_that_are_a_directory_or_a_pipe(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(tmp_path)


def change_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_missing_shard(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="model-00002-of-00002.safetensors"):
        Checkpoint.open(tmp_path)


def test_tensor_missing_from_its_shard(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    first = "model-00001-of-00002.safetensors"
    change_index(tmp_path, lambda weight_map: weight_map.update({"gone": first}))
    with pytest.raises(CheckpointError, match=f"{first}.*'gone' is missing"):
        Checkpoint.open(tmp_path)


def test_tensor_in_another_shard_than_the_index_says(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    second = "model-00002-of-00002.safetensors"
    change_index(tmp_path, lambda m: m.update({"model.embed_tokens.weight": second}))
    with pytest.raises(CheckpointError, match=f"embed_tokens.*should lie in '{second}'"):
        Checkpoint.open(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes(llama_tensors()))
    with pytest.raises(CheckpointError, match="is also in"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors", "/etc/passwd", "a/b", "", "..", 5, None,
        "x\0.safetensors", "\ud800", "a\udc80.safetensors",
    ],
)  # fmt: skip
def test_shard_names_that_are_no_file_names(tmp_path, shard):
    write_checkpoint(tmp_path, shards=2)
    change_index(tmp_path, lambda weight_map: weight_map.update({"model.norm.weight": shard}))
    with pytest.raises(CheckpointError, match=r"index.json: tensor 'model.norm.weight'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": []}', "{}", "\udcff", "[" * 100000]
)
def test_malformed_index(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="index.json"):
        Checkpoint.open(tmp_path)


# PyTorch .bin.


def zip_bytes_of(path, members, **options):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data, **options)


def bin_with_pickle(tmp_path, data, storages=None, **options):
    path = tmp_path / "pytorch_model.bin"
    members = {"archive/data.pkl": data}
    members.update({f"archive/data/{key}": raw for key, raw in (storages or {}).items()})
    zip_bytes_of(path, members, **options)
    return path


def test_bin(tmp_path):
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = collections.OrderedDict(
        a=base,
        transposed=base.t(),
        part_of_a=base[1:3, 2:5],
        half=torch.arange(5, dtype=torch.float16),
        brain=torch.linspace(-2, 2, 8).to(torch.bfloat16),
        parameter=torch.nn.Parameter(torch.ones(2, 2)),
        scalar=torch.tensor(3),
        empty=torch.zeros(0, 3),
    )
    torch.save(state, tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(tmp_path)
    read = read_all(checkpoint)
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        bits = tensor.view(torch.uint16) if name == "brain" else tensor
        np.testing.assert_array_equal(read[name], bits.detach().numpy())
    assert checkpoint.tensors["brain"].dtype == "bfloat16"


def test_bin_shards_and_module_state(tmp_path):
    torch = pytest.importorskip("torch")
    first = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).state_dict()
    torch.save(first, tmp_path / "pytorch_model-1.bin")
    torch.save({"x": torch.ones(3)}, tmp_path / "pytorch_model-2.bin")
    weight_map = {**dict.fromkeys(first, "pytorch_model-1.bin"), "x": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = read_all(Checkpoint.open(tmp_path))
    np.testing.assert_array_equal(read["0.weight"], first["0.weight"].numpy())
    np.testing.assert_array_equal(read["x"], np.ones(3, np.float32))


def test_bin_needs_no_torch(tmp_path):
    torch = pytest.importorskip("torch")
    import subprocess
    import sys

    torch.save({"x": torch.arange(4.0)}, tmp_path / "pytorch_model.bin")
    program = (
        "import sys, pathlib; sys.modules['torch'] = None\n"
        "from allspark.model_loader.checkpoint import Checkpoint\n"
        "entry = Checkpoint.open(pathlib.Path(sys.argv[1])).tensors['x']\n"
        "with entry.open() as array: print(array.sum())"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.strip() == "6.0", result.stderr


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/should-not-exist",))


def refused_pickles():
    """Name -> (pickle, message)."""
    # A tuple of the previous one, twice, sixty times: small to hold, endless to print or to hash.
    bomb = b"\x80\x02K\x01q\x00" + b"h\x00h\x00\x86q\x00" * 60
    return {
        "a call": (pickle.dumps({"a": Evil()}, 2), "system"),
        "a call, protocol 4": (pickle.dumps({"a": Evil()}, 4), "system"),
        "builtins": (b"\x80\x02cbuiltins\neval\n.", "builtins.eval"),
        "dotted": (b"\x80\x04\x8c\x05torch\x8c\x0bFloat.eval_\x93.", "torch.Float.eval_"),
        "a torch function": (b"\x80\x02ctorch\nload\n.", "torch.load"),
        "a call of data": (b"\x80\x02K\x01)R.", "a call of 1"),
        "an instance": (b"\x80\x02(icollections\nOrderedDict\n.", "operation INST"),
        "a long string": (b"\x80\x02X\xff\xff\xff\x7fabc.", "damaged"),
        "no end": (b"\x80\x02}", "damaged|without an end"),
        "nothing": (b"", "damaged|without an end"),
        "an empty stack": (b"\x80\x02.", "damaged"),
        "a missing mark": (b"\x80\x02K\x01t.", "without its mark"),
        "a missing memo": (b"\x80\x02h\x05.", "damaged"),
        "not a table": (pickle.dumps([1, 2], 2), "holds a list"),
        "no tensors": (pickle.dumps({"epoch": 3}, 2), "'epoch' is no tensor"),
        "nested tables": (pickle.dumps({"model": {"a": 1}}, 2), "'model' is no tensor"),
        "a key that hashes for ever": (
            b"\x80\x02}q\x01" + bomb[2:] + b"h\x01h\x00K\x01s.",
            "key of type tuple",
        ),
        "a storage that prints for ever": (bomb + b"Q.", "persistent object"),
    }


@pytest.mark.parametrize("case", refused_pickles())
@pytest.mark.timeout(20)
def test_refused_pickles(tmp_path, case):
    data, message = refused_pickles()[case]
    path = bin_with_pickle(tmp_path, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not os.path.exists("/tmp/should-not-exist")


def test_operations_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle_file, "MAX_OPERATIONS", 100)
    bin_with_pickle(tmp_path, b"\x80\x02" + b"]" * 98 + b".")
    with pytest.raises(CheckpointError, match="holds a list"):
        Checkpoint.open(tmp_path)
    bin_with_pickle(tmp_path, b"\x80\x02" + b"]" * 99 + b".")
    with pytest.raises(CheckpointError, match="more than 100 operations"):
        Checkpoint.open(tmp_path)


def tensor_pickle(
    name="a", key="0", numel=12, offset=0, size=(3, 4), stride=(4, 1), legacy=False, view=None,
    python2=False,
):
    """The pickle of a state dict with one float32 tensor, as torch.save writes it."""

    def text(value):
        return b"U" + bytes([len(value)]) + value.encode() if python2 else dump(value)

    def dump(value):
        return pickle.dumps(value, 2)[2:-1]

    out = b"\x80\x02}" + text(name)
    out += b"ctorch._utils\n_rebuild_tensor_v2\n("
    out += b"(" + text("storage") + b"ctorch\nFloatStorage\n"
    out += (text(key) if isinstance(key, str) else dump(key)) + text("cpu") + dump(numel)
    out += (dump(view) if legacy else b"") + b"tQ"
    for value in (offset, size, stride, False):
        out += dump(value)
    return out + b"ccollections\nOrderedDict\n)RtRs."


RAW = np.arange(12, dtype="<f4").tobytes()


def test_hand_made_bin(tmp_path):
    bin_with_pickle(tmp_path, tensor_pickle(), {"0": RAW})
    assert_same(read_all(Checkpoint.open(tmp_path)), {"a": TENSORS["a"]})


@pytest.mark.parametrize(
    ("fields", "storages", "message"),
    [
        ({}, {}, "tensor 'a': its data, member 'data/0', is missing"),
        ({}, {"0": RAW[:-1]}, "tensor 'a': its storage should have 48 bytes, the archive has 47"),
        ({"numel": 1 << 60}, {"0": RAW}, "tensor 'a': its storage should have"),
        ({"numel": -1}, {"0": RAW}, "a storage"),
        ({"offset": 1}, {"0": RAW}, "tensor 'a': elements 1 to 13 of a storage of 12"),
        ({"offset": -1}, {"0": RAW}, "the layout"),
        ({"size": (3, 5)}, {"0": RAW}, "tensor 'a': elements 0 to 13"),
        ({"size": (3, -4)}, {"0": RAW}, "the layout"),
        ({"stride": (5, 1)}, {"0": RAW}, "tensor 'a': elements 0 to 14"),
        ({"stride": (-4, 1)}, {"0": RAW}, "the layout"),
        ({"stride": (4,)}, {"0": RAW}, "the layout"),
        ({"size": "x", "stride": "y"}, {"0": RAW}, "the layout"),
        ({"size": (1 << 40, 1 << 40), "stride": (0, 0)}, {"0": RAW}, "too many elements"),
        (
            {"size": (1 << 22, 2048), "stride": (0, 0)}, {"0": RAW},
            "tensor 'a' has 8589934592 elements; its storage has 12",
        ),
        ({"size": (6, 7), "stride": (1, 1)}, {"0": RAW}, "'a' has 42 elements; its storage has 12"),
        ({"key": 5}, {"0": RAW}, "a storage"),
    ],
)  # fmt: skip
def test_malformed_tensors_in_bin(tmp_path, fields, storages, message):
    path = bin_with_pickle(tmp_path, tensor_pickle(**fields), storages)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)


def test_bin_that_is_compressed_truncated_or_no_archive(tmp_path):
    path = bin_with_pickle(
        tmp_path, tensor_pickle(), {"0": RAW}, compress_type=zipfile.ZIP_DEFLATED
    )
    with pytest.raises(CheckpointError, match="compressed"):
        Checkpoint.open(tmp_path)
    bin_with_pickle(tmp_path, tensor_pickle(), {"0": RAW})
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="in neither of PyTorch's forms"):
        Checkpoint.open(tmp_path)
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "storages")
    with pytest.raises(CheckpointError, match="a tar archive.*save it again as safetensors"):
        Checkpoint.open(tmp_path)
    zip_bytes_of(path, {"archive/data.pkl": b"", "archive/constants.pkl": b""})
    with pytest.raises(CheckpointError, match="a TorchScript program, which holds code"):
        Checkpoint.open(tmp_path)
    zip_bytes_of(path, {"archive/other": b""})
    with pytest.raises(CheckpointError, match="'data.pkl' is missing"):
        Checkpoint.open(tmp_path)
    big_endian = {"a/data.pkl": tensor_pickle(), "a/data/0": RAW, "a/byteorder": b"big"}
    zip_bytes_of(path, big_endian)
    with pytest.raises(CheckpointError, match="little-endian"):
        Checkpoint.open(tmp_path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.booleans())
def test_any_damage_to_a_bin_is_an_error_or_harmless(tmp_path, data, legacy):
    path = bin_with_pickle(tmp_path, tensor_pickle(), {"0": RAW})
    raw = bytearray(legacy_bin() if legacy else path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        read_all(checkpoint)


# PyTorch .bin from before 1.6.

MACHINE = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


def legacy_bin(
    magic=0x1950A86A20F9469CFC6C, version=1001, machine=MACHINE, table=None, keys=("0",), data=None
):
    """A file as torch.save wrote it before 1.6: five pickles, counts and elements."""
    table = tensor_pickle(legacy=True) if table is None else table
    pickles = [pickle.dumps(value, 2) for value in (magic, version, machine)]
    data = struct.pack("<q", 12) + RAW if data is None else data
    return b"".join([*pickles, table, pickle.dumps(list(keys), 2), data])


def test_legacy_bin(tmp_path):
    """As torch itself writes the old form."""
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).state_dict()
    state = collections.OrderedDict(
        module,
        a=base,
        transposed=base.t(),
        part_of_a=base[1:3, 2:5],
        brain=torch.linspace(-2, 2, 8).to(torch.bfloat16),
        parameter=torch.nn.Parameter(torch.ones(2, 2)),
        scalar=torch.tensor(3),
        empty=torch.zeros(0, 3),
    )
    for protocol in (2, 4):
        torch.save(
            state,
            tmp_path / "pytorch_model.bin",
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=False,
        )
        read = read_all(Checkpoint.open(tmp_path))
        assert read.keys() == state.keys()
        for name, tensor in state.items():
            bits = tensor.view(torch.uint16) if name == "brain" else tensor
            np.testing.assert_array_equal(read[name], bits.detach().numpy())


def test_hand_made_legacy_bin(tmp_path):
    """Also as Python 2 wrote it, with other opcodes for strings."""
    for table in (None, tensor_pickle(legacy=True, python2=True)):
        (tmp_path / "pytorch_model.bin").write_bytes(legacy_bin(table=table))
        assert_same(read_all(Checkpoint.open(tmp_path)), {"a": TENSORS["a"]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": 5}, "a pickle, but not one of torch.save's"),
        ({"magic": {"a": Evil()}}, "its first pickle asks for the global '.*system'"),
        ({"version": 1000}, "version 1000 of PyTorch's form before 1.6, expected 1001"),
        ({"machine": {**MACHINE, "little_endian": False}}, "not little-endian"),
        ({"machine": []}, "not little-endian"),
        ({"table": pickle.dumps({"a": Evil()}, 2)}, "its state dict asks for the global"),
        ({"table": pickle.dumps([1], 2)}, "holds a list"),
        ({"table": b"\x80\x02X\xff\xff\xff\x7fabc."}, "more than 67108864 bytes of pickles"),
        ({"table": b"\x80\x02}"}, "holds a list"),  # the list of keys, which follows
        ({"table": tensor_pickle(legacy=True, view=("v", 0, 1))}, "a persistent object"),
        ({"keys": ()}, "its list of storages is not that of its tensors' 1"),
        ({"keys": ("0", "1")}, "its list of storages"),
        ({"keys": (0,)}, "its list of storages"),
        ({"data": b""}, "storage '0' should have 12 elements, the file has -1"),
        ({"data": struct.pack("<q", 11) + RAW}, "'0' should have 12 elements, the file has 11"),
        ({"data": struct.pack("<q", 12) + RAW[:-1]}, "truncated"),
        ({"data": struct.pack("<q", 12) + RAW + b"x"}, "data ends at offset"),
    ],
)
def test_malformed_legacy_bin(tmp_path, fields, message):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(legacy_bin(**fields))
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not os.path.exists("/tmp/should-not-exist")


# Other kinds of files; the message names the kind.

POINTER = (
    b"version https://git-lfs.example/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 12345\n"
)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_git_lfs_pointers(tmp_path, name):
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=f"{name}: a Git LFS pointer to .* 12345 bytes, not"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pt", "model.pt is a file of torch.save; .* name it pytorch_model.bin"),
        ("last.ckpt", "last.ckpt is a file of torch.save"),
        ("weights.npz", "weights.npz is a file of NumPy arrays, as early versions of MLX wrote"),
        ("tf_model.h5", "tf_model.h5 is a file of TensorFlow's weights, which is not read"),
    ],
)
def test_directory_with_other_weights(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(CheckpointNotFoundError, match=f"holds no weights; .*{message}"):
        Checkpoint.open(tmp_path)
