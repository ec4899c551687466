"""Reads ``adapter_config.json`` of a PEFT LoRA adapter: which modules it changes, and the scale.

A field that would change what the adapter computes is either supported or refused, with an error
that names the field and the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .config import ModelConfig, read_json_object
from .errors import UnsupportedModelError
from .notices import notice
from .re2_patterns import check_pattern_count, compile_pattern

CONFIG_NAME = "adapter_config.json"

# Fields about training or storage. They do not affect the result, or their effect shows in the
# tensors: biases are tensors, and a transposed weight has another shape.
_WITHOUT_EFFECT = frozenset(
    """
    auto_mapping base_model_name_or_path bias corda_config eva_config fan_in_fan_out inference_mode
    lora_dropout lora_ga_config loftq_config megatron_config megatron_core peft_type peft_version
    qalora_group_size revision runtime_config task_type
    """.split()
)
# Fields that PeftConfig reads.
_READ = frozenset(
    """
    alpha_pattern ensure_weight_tying exclude_modules init_lora_weights layers_pattern
    layers_to_transform lora_alpha lora_r r rank_pattern target_modules use_rslora
    """.split()
)
# Fields that must be absent, null, false or empty.
_REFUSED = {
    "alora_invocation_tokens": "an adapter that begins within the text",
    "arrow_config": "routing between adapters",
    "layer_replication": "a model with repeated layers",
    "lora_bias": "a bias beside lora_B",
    "modules_to_save": "modules that were trained whole",
    "target_parameters": "parameters that are no module's weight",
    "trainable_token_indices": "embeddings that were trained whole",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
}
# Initialisations that keep the base model's weights. Others (PiSSA, OLoRA, LoftQ ...) change the
# weights, and the adapter fits only the changed ones.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


class PeftConfig:
    """One adapter's configuration, checked. Names of modules are those of the base model."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self._config = config = ModelConfig(fields, source)
        self.source = source
        self._check_kind()
        self._alpha = config.number("lora_alpha", above=-math.inf)
        pattern = config.part("alpha_pattern")
        check_pattern_count(self._config, "alpha_pattern", len(pattern))
        self._alpha_pattern = [
            (
                self._regex("alpha_pattern", rf"(.*\.)?({name})"),
                pattern.number(name, above=-math.inf),
            )
            for name in pattern
        ]
        self._rank_stabilized = config.flag("use_rslora", False)
        self.weight_tying = config.flag("ensure_weight_tying", False)
        rank_field = "r" if "r" in config else "lora_r"
        ranks = config.part("rank_pattern")
        self._ranks = {ranks.integer(name) for name in ranks}
        if config.get(rank_field) is not None:
            self._ranks.add(config.integer(rank_field))
        self._target = self._matcher("target_modules")
        self._exclude = self._matcher("exclude_modules")
        self._layers = self._layer_numbers()
        layers = self._names("layers_pattern") or [r"[^.]*"]
        check_pattern_count(self._config, "layers_pattern", len(layers))
        self._layer_patterns = [
            self._regex("layers_pattern", rf".*\.(?:{name})\.(?P<layer>\d+)\.") for name in layers
        ]

    @classmethod
    def read(cls, directory: Path) -> PeftConfig:
        path = directory / CONFIG_NAME
        return cls(read_json_object(path, "the configuration of an adapter"), str(path))

    def scale(self, module: str, rank: int) -> float:
        """The factor of the product of the two matrices."""
        if self._ranks and rank not in self._ranks:
            raise self._config.error(
                "r",
                f"and rank_pattern give the ranks {sorted(self._ranks)}; the tensors of {module!r} "
                f"have rank {rank}",
            )
        alpha = self._alpha
        for pattern, value in self._alpha_pattern:
            if pattern.fullmatch(module):
                alpha = value
                break
        return alpha / (math.sqrt(rank) if self._rank_stabilized else rank)

    def targets(self, module: str, is_output: bool) -> bool | None:
        """Whether the adapter must change ``module``; None if the configuration does not say.

        ``is_output``: the module is the embedding or the head, which "all-linear" leaves out.
        """
        if self._exclude is not None and self._exclude(module):
            return False
        if self._target is None:
            return None
        if self._config["target_modules"] == "all-linear":
            return not is_output
        if not self._target(module):
            return False
        if self._layers is None or isinstance(self._config["target_modules"], str):
            return True
        for pattern in self._layer_patterns:
            found = pattern.match(module)
            if found and found.group("layer") is not None:  # a pattern may have branches
                return int(found.group("layer")) in self._layers
        return False

    # Checks.

    def _check_kind(self) -> None:
        config = self._config
        kind = config.text("peft_type", "LORA")
        if kind.upper() != "LORA":
            raise self._unsupported("peft_type", "another kind of adapter than LORA")
        for field, what in _REFUSED.items():
            if config.get(field):
                raise self._unsupported(field, what)
        init = config.get("init_lora_weights")
        if init not in _INITS:
            raise self._unsupported(
                "init_lora_weights",
                "an adapter to base weights that its initialisation changed (PEFT's "
                "path_initial_model_for_weight_conversion saves one to the original weights)",
            )
        unknown = [
            field
            for field, value in config.items()
            if value and field not in _WITHOUT_EFFECT | _READ
        ]
        for field in unknown:
            if field.startswith("use_") or field.endswith("_config"):
                raise self._unsupported(field, "an unknown kind of adapter")
        if unknown:
            notice(f"{self.source}: unknown fields {', '.join(unknown)}")

    def _unsupported(self, field: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.source}: {field} is {self._config[field]!r}: {what} is not supported"
        )

    def _regex(self, field: str, pattern: str) -> Any:
        advice = "a list of modules' names is"
        return compile_pattern(self._config, field, pattern, advice)

    def _names(self, field: str) -> list[str] | None:
        value = self._config.get(field)
        if isinstance(value, str):
            return [value]
        if not value:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._config.error(field, f"is {value!r}, expected names")
        return value

    def _matcher(self, field: str) -> Callable[[str], bool] | None:
        """A string is a regular expression for whole names; a list has endings of names."""
        names = self._names(field)
        if names is None:
            return None
        if isinstance(self._config[field], str):
            pattern = self._regex(field, names[0])
            return lambda module: pattern.fullmatch(module) is not None
        ends = tuple(f".{name}" for name in names)
        return lambda module: f".{module}".endswith(ends)

    def _layer_numbers(self) -> set[int] | None:
        value = self._config.get("layers_to_transform")
        if value is None or value == []:
            return None
        numbers: Iterable[Any] = value if isinstance(value, list) else [value]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int):
                raise self._config.error(
                    "layers_to_transform", f"is {value!r}, expected numbers of layers"
                )
        return set(numbers)
