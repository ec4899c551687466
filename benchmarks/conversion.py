"""How much memory the conversion of a checkpoint takes, for each format.

For one format after the other, a checkpoint of random values in a real model's shape is written,
converted to files in a process of its own, and removed. The memory of that process is watched:
anonymous memory is what it needs; the rest of its resident memory is pages of mapped files, which
the system can take back from a checkpoint on a disk.

The files are in memory (tmpfs) where there is room: writing them to a disk costs the kernel time,
which would count as work of other processes. Pages of such files that a process maps are shared
memory to the kernel (RssShmem instead of RssFile), so they are resident, and not anonymous, too.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
import tables
from bench_engine import Recorder, about_engine, add_recording
from checkpoints import SHAPES, Shape

# (name of the type, shape of the stored tensor)
Stored = tuple[str, tuple[int, ...]]
_SAFETENSORS = {
    "BF16": "<u2",
    "F16": "<f2",
    "F32": "<f4",
    "I32": "<i4",
    "I8": "i1",
    "F8_E4M3": "u1",
}
_GROUP = 64
_FP8_BLOCK = 128
_PIECE_BYTES = 1 << 24
_SAMPLE_S = 0.005
_FOLDER = "allspark-conversion-"
# Files besides the weights; what the processes need besides the files.
_SPARE_FILE_BYTES = 1 << 26
_SPARE_MEMORY_BYTES = 1 << 30
# Bytes of a GGUF block: (its elements, its bytes, where scales in it begin)
_GGUF_BLOCKS = {"Q8_0": (32, 34, (0,)), "Q4_0": (32, 18, (0,)), "Q4_K": (256, 144, (0, 2))}


@dataclass(frozen=True)
class Format:
    """A form of checkpoints: how one is written, how large its weights are, and the arguments of
    serialize_to_path."""

    write: Callable[[Path, Shape], None]
    weight_bytes: Callable[[Shape], int]
    arguments: Mapping[str, Any] = field(default_factory=dict)


def bytes_of(tensors: Mapping[str, Stored]) -> int:
    return sum(
        int(np.prod(dims)) * np.dtype(_SAFETENSORS[dtype]).itemsize
        for dtype, dims in tensors.values()
    )


def in_bf16(shape: Shape) -> dict[str, Stored]:
    return {name: ("BF16", dims) for name, dims in shape.tensors().items()}


def bf16_bytes(shape: Shape) -> int:
    return bytes_of(in_bf16(shape))


def values(dtype: str, count: int) -> np.ndarray:
    """Plausible values: small numbers, any integers."""
    rng = np.random.default_rng(0)
    if dtype == "BF16":
        return (values("F32", count).view("<u4") >> 16).astype("<u2")
    if dtype in ("F16", "F32"):
        return (rng.standard_normal(count, np.float32) * 0.02).astype(_SAFETENSORS[dtype])
    if dtype == "F8_E4M3":  # All codes but NaN.
        return rng.integers(0, 127, count, np.uint8)
    if dtype == "I8":
        return rng.integers(-128, 128, count, np.int8)
    # Fields of 4 bits with values from 0 to 7, so that they are valid zero points too.
    return (rng.integers(0, 1 << 31, count, np.int64) & 0x77777777).astype("<i4")


def pieces(dtype: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    left = int(np.prod(shape))
    piece = values(dtype, min(left, _PIECE_BYTES // np.dtype(_SAFETENSORS[dtype]).itemsize))
    while left > 0:
        yield piece[:left]
        left -= len(piece)


def write_safetensors(directory: Path, tensors: dict[str, Stored]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + int(np.prod(shape)) * np.dtype(_SAFETENSORS[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for dtype, shape in tensors.values():
            for piece in pieces(dtype, shape):
                file.write(piece.tobytes())


def write_config(directory: Path, shape: Shape, settings: dict[str, Any] | None) -> None:
    config = shape.config()
    if settings is not None:
        config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))


def write_plain(directory: Path, shape: Shape) -> None:
    write_config(directory, shape, None)
    write_safetensors(directory, in_bf16(shape))


Parts = Callable[[int, int], dict[str, Stored]]


def quantized(settings: dict[str, Any], parts: Parts) -> Format:
    """Checkpoints in which each module of the layers has ``parts``, sized by its shape."""

    def tensors_of(shape: Shape) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        for name, dims in shape.tensors().items():
            module = name.removesuffix("weight")
            if len(dims) == 2 and ".layers." in name:
                tensors |= {module + part: stored for part, stored in parts(*dims).items()}
            else:
                tensors[name] = ("BF16", dims)
        return tensors

    def write(directory: Path, shape: Shape) -> None:
        write_config(directory, shape, settings)
        write_safetensors(directory, tensors_of(shape))

    return Format(write, lambda shape: bytes_of(tensors_of(shape)))


def gptq(rows: int, cols: int) -> dict[str, Stored]:
    return {
        "qweight": ("I32", (cols // 8, rows)),
        "qzeros": ("I32", (cols // _GROUP, rows // 8)),
        "scales": ("F16", (cols // _GROUP, rows)),
    }


def awq(rows: int, cols: int) -> dict[str, Stored]:
    return {**gptq(rows, cols), "qweight": ("I32", (cols, rows // 8))}


def w8a8(rows: int, cols: int) -> dict[str, Stored]:
    return {"weight": ("I8", (rows, cols)), "weight_scale": ("BF16", (rows, 1))}


def fp8(rows: int, cols: int) -> dict[str, Stored]:
    blocks = (-(-rows // _FP8_BLOCK), -(-cols // _FP8_BLOCK))
    return {"weight": ("F8_E4M3", (rows, cols)), "weight_scale_inv": ("F32", blocks)}


def pickled(file: str) -> Format:
    def write(directory: Path, shape: Shape) -> None:
        import torch

        state = {}
        for name, dims in shape.tensors().items():
            if file.endswith(".pth"):
                name = meta_name(name)
            bits = np.concatenate(list(pieces("BF16", dims))).view("<i2").reshape(dims)
            state[name] = torch.from_numpy(bits).view(torch.bfloat16)
        if file.endswith(".pth"):
            params = {"dim": shape.hidden_size, "n_layers": shape.num_layers,
                      "n_heads": shape.q_heads, "n_kv_heads": shape.kv_heads,
                      "norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta}  # fmt: skip
            (directory / "params.json").write_text(json.dumps(params))
        else:
            write_config(directory, shape, None)
        torch.save(state, directory / file)

    return Format(write, bf16_bytes)


_META = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "tok_embeddings",
}  # fmt: skip


def meta_name(name: str) -> str:
    for own, metas in _META.items():
        name = name.replace(own, metas)
    return name.removeprefix("model.")


def gguf_file(kind: str) -> Format:
    elements, size, scales = _GGUF_BLOCKS[kind]

    def weight_bytes(shape: Shape) -> int:
        counts = [(len(dims), int(np.prod(dims))) for dims in shape.tensors().values()]
        return sum(4 * count if rank == 1 else count // elements * size for rank, count in counts)

    def write(directory: Path, shape: Shape) -> None:
        import gguf
        from peers.gguf_writer import add_metadata, target_name

        config = shape.config()
        writer = gguf.GGUFWriter(directory / "model.gguf", config["model_type"])
        add_metadata(writer, config)
        type_id = gguf.GGMLQuantizationType[kind]
        for name, dims in shape.tensors().items():
            if len(dims) == 1:
                array = np.concatenate(list(pieces("F32", dims)))
                writer.add_tensor(target_name(name), array)
                continue
            blocks = np.random.default_rng(0).integers(
                0, 256, (dims[0] * dims[1] // elements, size), np.uint8
            )
            for begin in scales:
                blocks[:, begin : begin + 2] = np.array([2.0**-12], "<f2").view(np.uint8)
            writer.add_tensor(target_name(name), blocks.reshape(dims[0], -1), raw_dtype=type_id)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return Format(write, weight_bytes)


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized",
            "config_groups": {"group_0": group}}  # fmt: skip


_INT4 = {"bits": 4, "group_size": _GROUP}
_PLAIN = Format(write_plain, bf16_bytes)
FORMATS = {
    "safetensors": _PLAIN,
    "safetensors to int8": replace(_PLAIN, arguments={"enable_quant": True}),
    ".bin": pickled("pytorch_model.bin"),
    "Meta .pth": pickled("consolidated.00.pth"),
    "GPTQ int4": quantized({"quant_method": "gptq", "sym": False, **_INT4}, gptq),
    "AWQ": quantized({"quant_method": "awq", **_INT4}, awq),
    "compressed-tensors int8": quantized(compressed(num_bits=8, strategy="channel"), w8a8),
    "FP8": quantized({"quant_method": "fp8", "weight_block_size": [_FP8_BLOCK] * 2}, fp8),
    "GGUF Q8_0": gguf_file("Q8_0"),
    "GGUF Q4_0": gguf_file("Q4_0"),
    "GGUF Q4_K": gguf_file("Q4_K"),
}


# Where the files are.


def has_room(folder: Path, form: Format, shape: Shape) -> bool:
    """Whether files in this folder in memory leave enough to the rest of the machine."""
    if not folder.is_dir():
        return False
    checkpoint = form.weight_bytes(shape)
    # No model has more than 16 bits for a weight.
    files = checkpoint + bf16_bytes(shape) + _SPARE_FILE_BYTES
    # Writers of other forms than safetensors hold all weights.
    memory = files + checkpoint + _SPARE_MEMORY_BYTES
    return files <= shutil.disk_usage(folder).free and memory <= machine.available_bytes()


@contextlib.contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    """A folder that is removed at the end. It is locked, so that a later run knows whether this one
    was killed before."""
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def remove_what_was_left(parent: Path) -> None:
    """Removes the folders of killed runs: in memory they would take it until the next boot."""
    for folder in parent.glob(f"{_FOLDER}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:  # Of another user, or removed just now.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # Of a run that goes on.
        finally:
            os.close(lock)


# Measuring.


def convert(source: str, target: str, options: dict[str, Any]) -> None:
    """Runs in the watched process."""
    import warnings

    from allspark import HuggingFaceModel

    warnings.simplefilter("ignore")
    loader = HuggingFaceModel(source, "m")
    loader.load_model()
    begin = time.perf_counter()
    loader.serialize_to_path(None, target, **options)
    print(time.perf_counter() - begin)


def watch(command: list[str]) -> tuple[float, int, int]:
    """Seconds of the conversion, and the peaks in bytes of anonymous and of all resident memory."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    anonymous = resident = 0
    status = Path(f"/proc/{process.pid}/status")
    try:
        while process.poll() is None:
            lines = status.read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            anonymous = max(anonymous, kilobytes(fields, "RssAnon"))
            resident = max(resident, kilobytes(fields, "VmHWM"))
            time.sleep(_SAMPLE_S)
    except BaseException:  # It would go on writing into a folder that is being removed.
        process.kill()
        process.wait()
        raise
    assert process.stdout is not None
    output = process.stdout.read()
    if process.returncode != 0:
        sys.exit(f"conversion.py: the conversion failed: {' '.join(command)}")
    return float(output), 1024 * anonymous, 1024 * resident


def kilobytes(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0])


def size_of(directory: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def measure(form: Format, source: Path, target: Path) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)  # Of a try that was disturbed.
    command = [sys.executable, __file__, "--convert", str(source), str(target)]
    seconds, anonymous, resident = watch([*command, json.dumps(dict(form.arguments))])
    return {
        "checkpoint_mb": size_of(source) / 1e6,
        "model_mb": size_of(target, "m.as*") / 1e6,
        "anonymous_mb": anonymous / 1e6,
        "resident_mb": resident / 1e6,
        "convert_s": seconds,
    }


def measure_all(options: argparse.Namespace, recorder: Recorder) -> None:
    shape = SHAPES[options.shape]
    for number in range(1, options.rounds + 1):
        for name in options.formats:
            form = FORMATS[name]
            is_in_memory = has_room(options.memory_dir, form, shape)
            of = {"format": name, "files": "in memory" if is_in_memory else "on disk"}
            print(f"{name}, {of['files']}", file=sys.stderr, flush=True)
            with new_folder(options.memory_dir if is_in_memory else options.work_dir) as folder:
                source, target = folder / "in", folder / "out"
                source.mkdir()
                # Before the measurement, since this process works for it, too.
                form.write(source, shape)
                recorder.measure(number, of, functools.partial(measure, form, source, target))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", default="1B", choices=SHAPES)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument(
        "--memory-dir", type=Path, default=Path("/dev/shm"),
        help="of a tmpfs; what has no room there is in --work-dir",
    )  # fmt: skip
    add_recording(parser, rounds=1, work_dir=Path(tempfile.gettempdir()))
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        source, target, arguments = options.convert
        convert(source, target, json.loads(arguments))
        return
    # On SIGTERM the stack unwinds, so that the files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for parent in (options.memory_dir, options.work_dir):
        remove_what_was_left(parent)
    shape = SHAPES[options.shape]
    elements = max(int(np.prod(dims)) for dims in shape.tensors().values())
    recorder = Recorder("conversion", options, about_engine(options.work_dir))
    measure_all(options, recorder)
    print(f"{shape.title}; the largest tensor has {elements / 1e6:.1f} million elements. In MB:\n")
    print("\n".join(tables.conversion(recorder.finish())))


if __name__ == "__main__":
    main()
