"""Says what this machine and installation are, for a report of a fault."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

_PACKAGES = (
    "allspark", "numpy", "transformers", "tokenizers", "llguidance", "protobuf", "fastapi",
    "uvicorn", "torch", "modelscope",
)  # fmt: skip
# What is in the name of a setting that may be a secret.
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dump-file", metavar="FILE",
        help="write it there instead, as JSON or YAML")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.dump_file is not None:
        _dump(Path(options.dump_file))
        return 0
    found = describe()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value}")
    return 0


def _dump(path: Path) -> None:
    if path.suffix == ".json":
        text = json.dumps(describe(), indent=2) + "\n"
    elif path.suffix in (".yml", ".yaml"):
        import yaml

        text = yaml.safe_dump(describe(), sort_keys=False)
    else:
        raise ValueError(f"--dump-file is {str(path)!r}; it must end in .json, .yml or .yaml")
    path.write_text(text)


def describe() -> dict[str, str]:
    """Facts by name."""
    from allspark._allspark import NativeEngine

    found = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": _memory(),
        "instruction sets": _instruction_sets(),
        "python": sys.version.split()[0],
        "engine": NativeEngine.version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    settings = ("ALLSPARK_", "BFC_", "CPU_CACHE_RATIO", "HIE_", "LMDEPLOY_")
    for name in sorted(os.environ):
        if name.startswith(settings):
            is_secret = any(word in name.upper() for word in _SECRETS)
            found[name] = "set" if is_secret else os.environ[name]
    return found


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _instruction_sets() -> str:
    """Those for which there are kernels."""
    known = ["avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"]
    known += ["asimd", "asimddp", "bf16", "i8mm"]
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return ", ".join(flag for flag in known if flag in value.split())
    return "unknown"


def _memory() -> str:
    fields = dict(line.split(":", 1) for line in _lines("/proc/meminfo") if ":" in line)
    total, free = (int(fields[name].split()[0]) >> 10 for name in ("MemTotal", "MemAvailable"))
    return f"{free} MiB free of {total}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
