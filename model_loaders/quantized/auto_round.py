"""AutoRound's own format: the layouts of GPTQ and of AWQ, with settings of single modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import ModelConfig
from ..errors import UnsupportedModelError
from ..re2_patterns import ModulePattern, check_pattern_count
from ..storage import TensorEntry, Tensors
from .awq import AwqModule
from .gptq import GptqModule, overridden
from .modules import ModuleRule, replace_modules

# The number to add to a stored zero point of GPTQ, by packing_format.
_ZERO_OFFSETS = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round:gptqmodel": 0,
    "auto_round": 0,
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_FLOAT_BITS = 16
_ADVICE = "names of modules are"
# They would change what is computed.
_REFUSED = ("rotation_config", "spinquant_config", "super_bits")


@dataclass(frozen=True)
class AutoRound:
    rule: ModuleRule
    config: ModelConfig
    # "extra_config": settings by the name of a module, or by an expression for a part of it. None:
    # not quantised.
    extra: Mapping[str, ModuleRule | None]

    @classmethod
    def parse(cls, config: ModelConfig) -> AutoRound:
        layout = config.text("packing_format", "auto_round:gptq")
        if layout not in (*_ZERO_OFFSETS, *_AWQ):
            raise UnsupportedModelError(
                f"{config.source}: packing_format is {layout!r}, supported are "
                f"{', '.join((*_ZERO_OFFSETS, *_AWQ))}"
            )
        extra = config.part("extra_config")
        settings: dict[str, ModuleRule | None] = {}
        for name in extra:
            own = extra.part(name)
            if own:  # Without settings, it says nothing.
                settings[name] = _rule(overridden(config, own), layout)
        rule = _rule(config, layout)
        if rule is None:
            raise UnsupportedModelError(f"{config.source}: bits is 16, supported are 4 and 8")
        return cls(rule, config, settings)

    def view(self, tensors: Tensors) -> dict[str, TensorEntry]:
        return replace_modules(tensors, "qweight", self._rules(tensors))

    def _rules(self, tensors: Tensors) -> Callable[[str], ModuleRule | None]:
        modules = {name.rpartition(".")[0] for name in tensors}
        others = [name for name in self.extra if name not in modules]
        check_pattern_count(self.config, "extra_config", len(others))
        patterns = [
            (ModulePattern(self.config, "extra_config", name, _ADVICE), self.extra[name])
            for name in others
        ]

        def rule_of(name: str) -> ModuleRule | None:
            if name in self.extra:
                return self.extra[name]
            return next((own for found, own in patterns if found.is_in(name)), self.rule)

        return rule_of


def _rule(config: ModelConfig, layout: str) -> ModuleRule | None:
    """How modules with these settings are quantised; None: not at all."""
    if config.integer("bits") >= _FLOAT_BITS:
        return None
    for field in _REFUSED:
        if config.get(field):
            raise config.refuse(field, "null")
    if config.text("data_type", "int") != "int":
        raise config.refuse("data_type", "'int'")
    if config.integer("act_bits", _FLOAT_BITS) < _FLOAT_BITS:
        raise config.refuse("act_bits", _FLOAT_BITS)
    if layout in _AWQ:
        return AwqModule.parse(config).rule
    return GptqModule.parse(config, _ZERO_OFFSETS[layout]).rule
