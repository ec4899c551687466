"""What a Jinja chat template does with the messages, read from its syntax tree."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


@dataclass(frozen=True)
class TemplateFacts:
    strings: frozenset[str]  # its string constants and attributes: roles and fields
    variables: frozenset[str]  # the names of what it reads
    iterates_content: bool  # loops over the parts of a content
    joins_arguments: bool  # joins the arguments of a tool call with other text, as they are
    compares_content: bool  # asks whether a content is None


class _Generation(Extension):
    """The block by which templates mark an assistant's text, for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])

# Filters that take the parts of a content one by one.
_PART_FILTERS = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))


@functools.lru_cache(maxsize=16)
def template_facts(text: str) -> TemplateFacts:
    """Of what is no template, and of syntax that only transformers knows, little is said;
    transformers decides. Raises ValueError for the operator `**`: a power of numbers can take hours
    and cannot be interrupted.
    """
    try:
        tree = _environment.parse(text)
    except TemplateSyntaxError:
        words = frozenset(re.findall(r"\w+", text))
        return TemplateFacts(
            words,
            words,
            iterates_content=False,
            joins_arguments=False,
            compares_content=False,
        )
    power = tree.find(nodes.Pow)
    if power is not None:
        raise ValueError(f"the chat template has the operator ** in line {power.lineno}")
    strings = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    strings.update(node.attr for node in tree.find_all(nodes.Getattr))
    return TemplateFacts(
        frozenset(strings),
        frozenset(name.name for name in tree.find_all(nodes.Name)),
        _Field(tree, "content").is_iterated(),
        _Field(tree, "arguments").is_joined(),
        _Field(tree, "content").is_compared(),
    )


class _Field:
    """The expressions that stand for one field of the messages, also under other names."""

    def __init__(self, tree: nodes.Template, name: str) -> None:
        self._tree = tree
        self._name = name
        self._aliases: set[str] = set()
        before = -1
        while len(self._aliases) > before:  # An alias may be given another name.
            before = len(self._aliases)
            self._aliases.update(self._found_aliases())

    def is_iterated(self) -> bool:
        loops = (loop.iter for loop in self._tree.find_all(nodes.For))
        filters = (each for each in self._tree.find_all(nodes.Filter) if each.name in _PART_FILTERS)
        return any(self._is_field(_unfiltered(node)) for node in (*loops, *filters))

    def is_joined(self) -> bool:
        tests = (test for test in self._tree.find_all(nodes.Test) if test.name in _TYPE_TESTS)
        if any(self._is_field(test.node) for test in tests):
            return False  # It takes both forms.
        return any(self._is_field(node) for node in self._joined())

    def is_compared(self) -> bool:
        tests = (test for test in self._tree.find_all(nodes.Test) if test.name == "none")
        if any(self._is_field(test.node) for test in tests):
            return True
        return any(
            self._is_field(compare.expr) and nodes.Const(None) in [op.expr for op in compare.ops]
            for compare in self._tree.find_all(nodes.Compare)
        )

    def _joined(self) -> Iterator[nodes.Node]:
        for add in self._tree.find_all(nodes.Add):
            yield from (add.left, add.right)
        for concat in self._tree.find_all(nodes.Concat):
            yield from concat.nodes
        for output in self._tree.find_all(nodes.Output):
            yield from output.nodes

    def _is_field(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == self._name
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == self._name
        if isinstance(node, nodes.CondExpr):
            return self._is_field(node.expr1) or self._is_field(node.expr2)
        return isinstance(node, nodes.Name) and node.name in self._aliases

    def _found_aliases(self) -> Iterator[str]:
        for assign in self._tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self._is_field(assign.node):
                yield assign.target.name
        macros = {macro.name: macro.args for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            if not (isinstance(call.node, nodes.Name) and call.node.name in macros):
                continue
            for parameter, value in zip(macros[call.node.name], call.args, strict=False):
                if self._is_field(value):
                    yield parameter.name
            for keyword in call.kwargs:
                if self._is_field(keyword.value):
                    yield keyword.key


_TYPE_TESTS = frozenset(("mapping", "string"))


def _unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node
