#!/usr/bin/env python3
"""Fails on any include or import that the layering does not allow (csrc/README.md has the map), and
if that map differs from the source tree or from the tables in this file.

usage: check_layers.py [ROOT]

The rules are the tables below: C++ by folder of csrc, Python by package folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# The layers that each layer is built on. A layer may include itself, these, and what these are
# built on in turn; the public headers (allspark/...) are open to all. "*": everything.
LAYERS: dict[str, tuple[str, ...]] = {
    "base": (),
    "memory": ("base",),
    "platform": ("base",),
    "tensor": ("memory", "base"),
    "kernels": (),  # and base/dtype.h, see EXTRA_HEADERS
    "proto": (),
    "sampling": ("kernels", "platform"),
    "kv_cache": ("base",),
    "ops": ("sampling", "kv_cache", "kernels", "tensor", "platform", "memory"),
    "weights": ("tensor", "proto", "platform"),
    "model": ("ops", "weights", "tensor"),
    "scheduler": ("kv_cache", "base"),
    "engine": ("*",),
    "python": (),  # and the headers below
    "bench": ("*",),
}
# Single headers that a layer may include beyond LAYERS.
EXTRA_HEADERS = {
    "kernels": {"base/dtype.h"},
    "python": {"base/json.h", "engine/testing.h", "platform/mapping_watch.h"},
}
# Layers that may not include public headers: kernels know only pointers.
NO_PUBLIC_HEADERS = {"kernels"}

# Sources compiled for one instruction set. They may include, directly or through our headers, only
# C headers and intrinsics: an inline function of the C++ library would be compiled for a CPU that
# some users do not have.
ISA_SOURCE = re.compile(r"kernels/cpu/[^/]*\.cc$")
ISA_SYSTEM = re.compile(r"(immintrin|arm_neon)\.h$|c(stdint|stddef|string)$")

CUDA_SYSTEM = re.compile(r"(cuda|cublas|cudnn|nccl|nvrtc|curand|cutlass|cub/|flashinfer)")
# A standard C++ header has no directory and no extension.
STANDARD_HEADER = re.compile(r"[a-z_0-9]+$")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SOURCE_SUFFIXES = {".h", ".inl", ".cc", ".cu", ".cuh"}

# Modules that a user may not have, or that cost seconds to import: never at import time.
HEAVY_MODULES = {"torch", "transformers", "modelscope", "tokenizers", "sentencepiece"}
# Packages of allspark above the SDK, and those that each is built on. It may import itself, these,
# and what these are built on in turn. The SDK is the files directly in allspark_py.
UPPER_PACKAGES: dict[str, tuple[str, ...]] = {
    "model_loader": (),
    "chat_template": ("model_loader",),
    "pipeline": ("chat_template",),
    "batch": ("pipeline",),
    "serve": ("batch",),
    "remote": (),
    "bench": ("remote", "pipeline"),
    "eval": ("batch",),
    "quantize": ("eval",),
    "cli": ("serve", "bench", "quantize"),
    "dashinfer_compat": ("model_loader",),
    "lmdeploy_compat": ("remote", "serve"),
}
# Packages that a single part knows, so that nothing else needs them.
ONLY_IN = {"lm_eval": "allspark_py/eval/lm_eval"}
# SDK modules that export names of the upper packages.
SDK_FACADES = {"__init__.py", "__init__.pyi"}


def below(name: str, table: Mapping[str, tuple[str, ...]]) -> set[str]:
    """What a layer or an upper package is built on by its table, and the name itself."""
    found = {name}
    for each in table[name]:
        found |= set(table) if each == "*" else below(each, table)
    return found


def check_include(path: str, quote: str, header: str) -> str | None:
    """Says what is wrong with one include of csrc/PATH; None if it is allowed."""
    folder = path.split("/")[0]
    is_public_header = folder == "include"
    if quote == "<":
        if CUDA_SYSTEM.match(header) and "/cuda/" not in path:
            return f"CUDA header <{header}> outside a cuda/ folder"
        if is_public_header and not STANDARD_HEADER.match(header):
            return f"public headers include the standard library only, not <{header}>"
        return None
    target = header.split("/")[0]
    if target == "allspark":
        if folder in NO_PUBLIC_HEADERS:
            return f'{folder} must not include public headers: "{header}"'
        return None
    if is_public_header:
        return f'public headers include the standard library only, not "{header}"'
    if ".." in header.split("/") or "/" not in header or target not in LAYERS:
        return f'"{header}" is not a path relative to csrc'
    if target in below(folder, LAYERS) or header in EXTRA_HEADERS.get(folder, ()):
        return None
    return f'{folder} must not include {target}: "{header}"'


def includes_of(file: Path) -> Iterator[tuple[int, str, str]]:
    """(line, quote, header) of every include in a file."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        found = INCLUDE.match(line)
        if found:
            yield number, found[1], found[2]


def check_isa_closure(csrc: Path, source: Path) -> Iterator[str]:
    """Follows an instruction-set source's includes down to the library headers they reach."""
    pending, seen = [source], {source}
    while pending:
        file = pending.pop()
        for number, quote, header in includes_of(file):
            if quote == "<" and not ISA_SYSTEM.match(header):
                yield (f"csrc/{file.relative_to(csrc).as_posix()}:{number}: <{header}> reaches "
                       f"{source.name}, which is compiled for one instruction set")
            target = csrc / header
            if quote == '"' and target.is_file() and target not in seen:
                seen.add(target)
                pending.append(target)


def check_cpp(root: Path) -> Iterator[str]:
    csrc = root / "csrc"
    for file in sorted(csrc.rglob("*")):
        if file.suffix not in SOURCE_SUFFIXES:
            continue
        path = file.relative_to(csrc).as_posix()
        folder = path.split("/")[0]
        if folder not in LAYERS and folder != "include":
            yield f"csrc/{path}:1: {folder} is no layer; scripts/check_layers.py has the table"
            continue
        for number, quote, header in includes_of(file):
            problem = check_include(path, quote, header)
            if problem:
                yield f"csrc/{path}:{number}: {problem}"
        if ISA_SOURCE.search(path):
            yield from check_isa_closure(csrc, file)


# A row of the map: `folder`, what it holds, what it may include.
MAP_ROW = re.compile(r"^\| `([^`]+)` \|[^|]*\| ([^|]*) \|$", re.MULTILINE)


def included_by_map(cell: str) -> set[str]:
    """The layers and headers that a row of the map allows."""
    if cell.startswith("everything"):
        return {"*"}
    parts = (part.strip().removesuffix(" alone").strip("`") for part in cell.split(","))
    return {part for part in parts if part not in ("public headers", "-")}


def check_map(root: Path) -> Iterator[str]:
    """Compares the table of csrc/README.md with the folders and with LAYERS."""
    readme = root / "csrc" / "README.md"
    if not readme.is_file():
        return
    rows = {folder: cell for folder, cell in MAP_ROW.findall(readme.read_text(encoding="utf-8"))}
    for folder, cell in rows.items():
        if not (root / "csrc" / folder).is_dir():
            yield f"csrc/README.md: the table names {folder}, which is no folder"
        if folder in LAYERS:
            allowed = {*LAYERS[folder], *EXTRA_HEADERS.get(folder, ())}
            if included_by_map(cell) != allowed:
                yield (f"csrc/README.md: {folder} may include {cell}, but the rules are "
                       f"{', '.join(sorted(allowed)) or 'public headers alone'}")
    for folder in [*LAYERS, *(p.name for p in sorted((root / "csrc").iterdir()) if p.is_dir())]:
        if folder not in rows and folder != "include":
            yield f"csrc/README.md: the table lacks {folder}"


class ImportVisitor(ast.NodeVisitor):
    """Collects (line, absolute module, is lazy) of every import except those for type checkers."""

    def __init__(self, package: str) -> None:
        self.package = package  # of the visited module, for relative imports
        self.imports: list[tuple[int, str, bool]] = []
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parts = self.package.split(".")
            base = parts[: len(parts) - node.level + 1]
            module = ".".join([*base, module] if module else base)
        for alias in node.names:  # `from allspark import cli` names a package too
            self._add(node, f"{module}.{alias.name}")

    def _add(self, node: ast.stmt, module: str) -> None:
        self.imports.append((node.lineno, module, self._depth > 0))


def check_import(path: str, module: str, lazy: bool) -> str | None:
    """Says what is wrong with one import of the file PATH; None if it is allowed."""
    top = module.split(".")[0]
    is_sdk_package = path.startswith("allspark_py/")
    if top == "torch" or module.startswith("safetensors.torch"):
        if is_sdk_package:
            return "only model_loaders may import torch"
        return None if lazy else "torch is imported inside the function that needs it"
    if top in HEAVY_MODULES and not lazy:
        return f"{top} is imported inside the function that needs it"
    if top in ONLY_IN and not path.startswith(ONLY_IN[top]):
        return f"only {ONLY_IN[top]}* may import {top}"
    if top == "allspark":
        return check_upper_import(path, (*module.split("."), "")[1])
    return None


def check_upper_import(path: str, target: str) -> str | None:
    """Says what is wrong with an import of allspark.TARGET; None if it is allowed."""
    if target not in UPPER_PACKAGES:
        return None
    folder, *parts = path.split("/")
    if folder == "allspark_py" and len(parts) == 1:
        if parts[0] in SDK_FACADES:
            return None
        return f"the SDK must not import allspark.{target}, which is built on it"
    package = "model_loader" if folder == "model_loaders" else parts[0]
    if package not in UPPER_PACKAGES:
        return f"{package} is no package of the table in scripts/check_layers.py"
    if target in below(package, UPPER_PACKAGES):
        return None
    return f"{package} must not import allspark.{target}, which it is not built on"


def check_python(root: Path) -> Iterator[str]:
    for folder, name in (("allspark_py", "allspark"), ("model_loaders", "allspark.model_loader")):
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            package = ".".join((name, *file.relative_to(root / folder).parent.parts))
            visitor = ImportVisitor(package)
            visitor.visit(ast.parse(file.read_text(encoding="utf-8"), filename=path))
            for line, module, lazy in visitor.imports:
                problem = check_import(path, module, lazy)
                if problem:
                    yield f"{path}:{line}: {problem}"


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    problems = list(dict.fromkeys([*check_cpp(root), *check_map(root), *check_python(root)]))
    for problem in problems:
        print(problem)
    print(f"check_layers: {len(problems)} problem(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
