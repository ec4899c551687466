"""Fuzz targets for files of weights: safetensors, GGUF, PyTorch's pickles."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mutations import mutated_bytes, mutated_json
from target import checkpoints, file_with, read_all

# safetensors


def safetensors_seeds() -> list[bytes]:
    vector = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.ones(4, "<f2")}
    few = dict(list(checkpoints.llama_tensors().items())[:4])
    several = {name: np.zeros(3, kind) for name, kind in
               {"f8": "u1", "i64": "<i8", "i32": "<i4", "bf16": "<u2"}.items()}  # fmt: skip
    empty = {"nothing": np.zeros((0, 3), "<f4"), "scalar": np.array(1.0, "<f4")}
    return [checkpoints.safetensors_bytes(tensors) for tensors in (vector, few, several, empty)]


def with_length(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def mutated_safetensors(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    if rng.random() < 0.4:
        return mutated_bytes(rng, seeds)
    seed = rng.choice(seeds)
    (length,) = struct.unpack_from("<Q", seed)
    header = seed[8 : 8 + length]
    return with_length(mutated_json(rng, [header]), seed[8 + length :])


def run_safetensors(data: bytes) -> None:
    from allspark.model_loader.safetensors_file import read_safetensors

    read_all(read_safetensors(file_with("model.safetensors", data)))


# GGUF

_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9


def _gguf_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _gguf_value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _gguf_text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if value and isinstance(value[0], str):
        begin = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return begin + b"".join(map(_gguf_text, value))
    return struct.pack(f"<IIQ{len(value)}I", _ARRAY, _UINT32, len(value), *value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple, bytes]]):
    """``tensors``: name -> (type, dimensions from the innermost on, data)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _gguf_text(key) + _gguf_value(value)
    data = b""
    for name, (kind, dims, raw) in tensors.items():
        header += _gguf_text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        header += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return header + bytes(-len(header) % 32) + data


def gguf_metadata() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.alignment": 32,
        "general.file_type": 7,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.block_count": 1,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 8,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>", "c", "d", "e"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def gguf_tensors(quantised: bool) -> dict[str, tuple[int, tuple, bytes]]:
    def matrix(rows: int, cols: int) -> tuple[int, tuple, bytes]:
        if quantised:  # Q8_0
            return 8, (cols, rows), bytes(rows * cols // 32 * 34)
        return 1, (cols, rows), bytes(rows * cols * 2)

    vector = (0, (32,), bytes(32 * 4))
    return {
        "token_embd.weight": matrix(8, 32),
        "blk.0.attn_norm.weight": vector,
        "blk.0.attn_q.weight": matrix(32, 32),
        "blk.0.attn_k.weight": matrix(16, 32),
        "blk.0.attn_v.weight": matrix(16, 32),
        "blk.0.attn_output.weight": matrix(32, 32),
        "blk.0.ffn_norm.weight": vector,
        "blk.0.ffn_gate.weight": matrix(32, 32),
        "blk.0.ffn_up.weight": matrix(32, 32),
        "blk.0.ffn_down.weight": matrix(32, 32),
        "output_norm.weight": vector,
        "output.weight": matrix(8, 32),
    }


def gguf_seeds() -> list[bytes]:
    full = [gguf_bytes(gguf_metadata(), gguf_tensors(quantised)) for quantised in (False, True)]
    qwen = {key.replace("llama.", "qwen2."): value for key, value in gguf_metadata().items()}
    qwen |= {"general.architecture": "qwen2", "tokenizer.ggml.pre": "qwen2"}
    return [*full, gguf_bytes(qwen, gguf_tensors(False))]


GGUF_TOKENS = [key.encode() for key in gguf_metadata()] + [
    struct.pack("<I", kind) for kind in range(13)
]  # fmt: skip


def run_gguf(data: bytes) -> None:
    from allspark.model_loader.gguf import open_gguf, read_gguf

    file = read_gguf(file_with("model.gguf", data))
    read_all(tensor.raw for tensor in file.tensors.values())
    read_all(open_gguf(file)[1].tensors.values())


# pickle

# Opcodes that a table of weights uses, and some others.
PICKLE_TOKENS = [
    b"\x80\x02", b"}", b"]", b")", b"(", b"u", b"s", b"e", b"a", b"t", b"\x85", b"\x86", b"\x87",
    b"R", b"Q", b"b", b".", b"N", b"\x88", b"\x89", b"q\x00", b"h\x00", b"r\0\0\0\0", b"j\0\0\0\0",
    b"\x94", b"\x93", b"K\x01", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 8, b"2",
    b"0", b"1", b"X\x01\0\0\0a", b"G\0\0\0\0\0\0\0\0", b"ccollections\nOrderedDict\n",
    b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"cos\nsystem\n", b"I1\n",
    b"L1L\n", b"V\\ud800\n", b"S'a'\n", b"\x95" + b"\xff" * 8, b"\x8c\x01a", b"\x81", b"\x92", b"i",
]  # fmt: skip


def _pickle_text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _pickle_tensor(key: str, storage: str, shape: Sequence[int], offset: int = 0) -> bytes:
    def tuple_of(numbers: Sequence[int]) -> bytes:
        return b"(" + b"".join(b"K" + bytes([number]) for number in numbers) + b"t"

    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    count = int(np.prod(shape)) + offset
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + _pickle_text("storage")
        + f"ctorch\n{storage}\n".encode()
        + _pickle_text(key)
        + _pickle_text("cpu")
        + b"K" + bytes([count])
        + b"tQK" + bytes([offset])
        + tuple_of(shape)
        + tuple_of(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )  # fmt: skip


def pickle_programs() -> list[bytes]:
    """Tables of weights, as torch.save writes them."""
    plain = b"".join(
        (
            _pickle_text("a.weight"), _pickle_tensor("0", "FloatStorage", (2, 3)),
            _pickle_text("b"), _pickle_tensor("1", "HalfStorage", (4,), 2),
            _pickle_text("c"), _pickle_tensor("0", "FloatStorage", (3, 2)),
        )
    )  # fmt: skip
    ordered = b"\x80\x02ccollections\nOrderedDict\n)Rq\x00(" + plain + b"u"
    state = b"}q\x01X\x09\0\0\0_metadatah\x01sb."  # the versions of the modules
    return [b"\x80\x02}q\x00(" + plain + b"u.", ordered + state, b"\x80\x02}."]


def zipped(program: bytes, data: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"data.pkl": program, **data, "version": b"3\n"}.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return buffer.getvalue()


_PICKLE_DATA = {"data/0": bytes(24), "data/1": bytes(12), "byteorder": b"little"}


def pickle_seeds() -> list[bytes]:
    return [zipped(program, _PICKLE_DATA) for program in pickle_programs()]


def mutated_pickle(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    if rng.random() < 0.3:
        return mutated_bytes(rng, seeds, most=3)
    program = mutated_bytes(rng, pickle_programs(), PICKLE_TOKENS)
    data = _PICKLE_DATA
    if rng.random() < 0.2:
        data = {name: content[: rng.randrange(30)] for name, content in data.items()}
    return zipped(program, data)


def run_pickle(data: bytes) -> None:
    from allspark.model_loader.pickle_file import read_pickle

    # zipfile warns of every name that two members share.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_all(read_pickle(file_with("pytorch_model.bin", data)))
