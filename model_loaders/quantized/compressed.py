"""compressed-tensors: groups of modules with a scheme each (compressed_scheme.py).

A module has ``weight_scale`` and, if it is not symmetric, ``weight_zero_point``; the rest is the
scheme's. With a single group, tensors show which modules belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..storage import TensorEntry
from .compressed_scheme import FORMATS, MARKER, Scheme, parse_scheme
from .modules import Tensors, modules_with, replace_modules
from .targets import Targets, names_of

_MIXED = "mixed-precision"  # Each group has its own.


@dataclass(frozen=True)
class CompressedTensors:
    config: ModelConfig
    schemes: tuple[tuple[list[str], Scheme], ...]  # with their targets

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
        schemes = []
        for name in groups:
            group = groups.part(name)
            own = group.text("format", layout)
            if own not in FORMATS:
                raise _unsupported_format(group, own)
            schemes.append((names_of(group, "targets"), parse_scheme(group, own)))
        names_of(config, "ignore")
        return cls(config, tuple(schemes))

    def view(self, tensors: Tensors) -> dict[str, TensorEntry]:
        schemes = self._schemes_of(tensors)
        return replace_modules(
            tensors,
            MARKER,
            lambda module: schemes[module].rule if module in schemes else None,
        )

    def _schemes_of(self, tensors: Tensors) -> dict[str, Scheme]:
        modules = modules_with(tensors, MARKER)
        if len(self.schemes) == 1:
            return dict.fromkeys(modules, self.schemes[0][1])
        ignored = Targets(
            self.config, "ignore", dict.fromkeys(names_of(self.config, "ignore"), True)
        )
        by_target = {name: scheme for names, scheme in self.schemes for name in names}
        targets = Targets(self.config, "config_groups", by_target)
        schemes = {}
        for module in modules:
            if ignored.find(module):
                continue  # A checkpoint that has its scales nevertheless is refused for them.
            scheme = targets.find(module)
            if scheme is None:
                raise CheckpointError(
                    f"{tensors[f'{module}.{MARKER}'].where}: no target in config_groups is "
                    f"{module!r}"
                )
            schemes[module] = scheme
        return schemes


def _unsupported_format(config: ModelConfig, layout: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.source}: format is {layout!r}, supported are {', '.join(FORMATS)}"
    )
