"""The extension's stub names what the extension contains: classes, their members, functions."""

from __future__ import annotations

import ast
import enum
import inspect
from pathlib import Path

import pytest

native = pytest.importorskip("allspark._allspark")

STUB = Path(__file__).parents[2] / "allspark_py" / "_allspark.pyi"


def declared_names(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            names.update(ast.unparse(target) for target in node.targets)
    return {name for name in names if not name.startswith("_")}


def public_names(holder: object) -> set[str]:
    return {name for name in vars(holder) if not name.startswith("_")}


def test_stub_names_the_modules_names() -> None:
    tree = ast.parse(STUB.read_text())
    assert declared_names(tree.body) == public_names(native)


@pytest.mark.parametrize(
    "name", [name for name, value in vars(native).items() if inspect.isclass(value)]
)
def test_stub_names_the_members(name: str) -> None:
    tree = ast.parse(STUB.read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    value = getattr(native, name)
    members = set(value.__members__) if issubclass(value, enum.Enum) else public_names(value)
    assert declared_names(node.body) == members
