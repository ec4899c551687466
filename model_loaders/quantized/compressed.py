"""compressed-tensors: groups of modules with a scheme each (compressed_scheme.py).

A module has ``weight_scale`` and, if it is not symmetric, ``weight_zero_point``; the rest is the
scheme's. With a single group, tensors show which modules belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..storage import TensorEntry, Tensors
from .compressed_scheme import FORMATS, MARKER, parse_scheme
from .modules import ModuleRule, modules_with, replace_modules
from .targets import Targets, names_of

_MIXED = "mixed-precision"  # Each group has its own.


@dataclass(frozen=True)
class CompressedTensors:
    config: ModelConfig
    rules: tuple[tuple[list[str], ModuleRule], ...]  # of the groups, with their targets

    @classmethod
    def parse(cls, config: ModelConfig) -> CompressedTensors:
        layout = config.text("format")
        if layout not in (*FORMATS, _MIXED):
            raise _unsupported_format(config, layout)
        groups = config.section("config_groups")
        if not groups:
            raise UnsupportedModelError(
                f"{config.source}: config_groups has 0 groups, expected 1 or more"
            )
        rules = []
        for name in groups:
            group = groups.part(name)
            own = group.text("format", layout)
            if own not in FORMATS:
                raise _unsupported_format(group, own)
            rules.append((names_of(group, "targets"), parse_scheme(group, own)))
        names_of(config, "ignore")
        return cls(config, tuple(rules))

    def view(self, tensors: Tensors) -> dict[str, TensorEntry]:
        return replace_modules(tensors, MARKER, self._rules_of(tensors).get)

    def _rules_of(self, tensors: Tensors) -> dict[str, ModuleRule]:
        modules = modules_with(tensors, MARKER)
        if len(self.rules) == 1:
            return dict.fromkeys(modules, self.rules[0][1])
        ignored = Targets(
            self.config, "ignore", dict.fromkeys(names_of(self.config, "ignore"), True)
        )
        by_target = {name: rule for names, rule in self.rules for name in names}
        targets = Targets(self.config, "config_groups", by_target)
        rules = {}
        for module in modules:
            if ignored.find(module):
                continue  # A checkpoint that has its scales nevertheless is refused for them.
            rule = targets.find(module)
            if rule is None:
                raise CheckpointError(
                    f"{tensors[f'{module}.{MARKER}'].where}: no target in config_groups is "
                    f"{module!r}"
                )
            rules[module] = rule
        return rules


def _unsupported_format(config: ModelConfig, layout: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.source}: format is {layout!r}, supported are {', '.join(FORMATS)}"
    )
