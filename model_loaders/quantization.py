"""Weight quantisation: from the arguments of ``serialize`` to the weight_quant of a DecoderSpec.

The arguments are checked on their own first, then against the weights of a model; neither reads
data of the checkpoint. csrc/weights/README.md says how weights are quantised.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import UnsupportedModelError
from .spec import message_class

# Bits, and whether each group has a zero point.
_FORMATS = {"int8": (8, False), "uint8": (8, True), "int4": (4, False), "uint4": (4, True)}
_METHODS = ("instant_quant", "iq")
# Methods that keep the quantisation of a checkpoint (quantized/).
_KEEPING_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "auto-round", "gguf")
_COMPUTE_METHODS = ("weight_only", "activate_quant")
_GROUP_SIZES = (-1, 0, 32, 64, 128)  # -1 and 0: one scale per output feature
_ACTIVATION_GROUP_SIZES = (0, 32, 64, 128)  # 0: one scale per token
_DEFAULT_ACTIVATION_GROUP_SIZES = (64, 32, 0)  # the first that divides
# Weights that are quantised only if the configuration names them.
TABLES = ("lm_head", "embedding")
_KEEPING_KEYS = (
    "quant_method", "compute_method", "activate_format", "activation_group_size", *TABLES,
)  # fmt: skip
_KEYS = (
    "quant_method",
    "weight_format",
    "compute_method",
    "activate_format",
    "activation_group_size",
    "group_size",
    "group_settings",
    "format_settings",
    "modules_to_not_convert",
    "search",
    *TABLES,
)


@dataclass(frozen=True)
class MatrixWeight:
    """A weight that can be quantised. Patterns may match any of ``names``; the first is its own."""

    names: tuple[str, ...]
    in_features: int


@dataclass(frozen=True)
class Quantization:
    """What to quantise and how, as the caller set it. ``quant_method`` None: not set."""

    quant_method: str | None = None
    weight_format: str = "int8"
    quantize_activations: bool | None = False  # None: as the checkpoint says
    activation_group_size: int | None = None  # None: the default for the input features
    group_size: int = 0
    group_settings: Mapping[str, int] = field(default_factory=dict)  # by pattern, first match wins
    format_settings: Mapping[str, str] = field(default_factory=dict)  # the same
    modules_to_not_convert: tuple[str, ...] = ()
    search: bool = False  # for the scales of 4-bit groups
    tables: Mapping[str, str | None] = field(default_factory=dict)  # formats of lm_head, embedding

    @property
    def keeps_checkpoint(self) -> bool:
        """Whether weights of a quantised checkpoint are kept."""
        return self.quant_method not in _METHODS

    def searches(self, quants: Iterable[Any]) -> bool:
        """Whether scales are searched for weights of these WeightQuant messages."""
        return self.search and not self.keeps_checkpoint and any(q.bits == 4 for q in quants)

    def check_method(self, checkpoint_method: str | None, has_integers: bool) -> None:
        """Raises an error unless the checkpoint has the quantisation that is to be kept."""
        if self.quant_method not in _KEEPING_METHODS:
            return
        if self.quant_method != checkpoint_method or not has_integers:
            kind = "" if has_integers else ", without integers to keep"
            raise ValueError(
                f"customized_quant_config: quant_method is {self.quant_method!r}, but the "
                f"checkpoint's is {checkpoint_method!r}{kind}"
            )

    def check_kept(self, kept: Iterable[Any], tied: bool) -> None:
        """Raises an error if the caller asks by name for what weights that are kept cannot have:
        int8 activations, or another format."""
        if self.quant_method not in _KEEPING_METHODS:
            return
        for quant in kept:
            if quant.tensor in TABLES and self._table_format(quant.tensor, tied):
                raise ValueError(
                    f"customized_quant_config: lm_head or embedding is given, but {quant.tensor!r} "
                    "is quantised in the checkpoint, which quant_method "
                    f"{self.quant_method!r} keeps"
                )
            if quant.float8 and self.quantize_activations:
                raise UnsupportedModelError(
                    f"customized_quant_config: compute_method is 'activate_quant', but "
                    f"{quant.tensor!r} is float8, which is multiplied with floats alone"
                )

    def weight_quants(self, weights: Sequence[MatrixWeight], tied: bool) -> list[Any]:
        """The WeightQuant messages for a model's ``weights``. Errors name the weight or the key."""
        self._check_patterns(weights)
        quants = []
        for weight in weights:
            name = weight.names[0]
            weight_format = self._format(weight, tied)
            if weight_format is None or _matches(self.modules_to_not_convert, weight):
                continue
            bits, asymmetric = _FORMATS[weight_format]
            # Rows of an embedding that is not tied are looked up, not multiplied.
            activations = bool(self.quantize_activations) and (name != "embedding" or tied)
            quants.append(
                message_class("WeightQuant")(
                    tensor=name,
                    bits=bits,
                    group_size=self._group_size(weight, bits),
                    asymmetric=asymmetric,
                    quantize_activations=activations,
                    activation_group_size=self.activation_group(weight) if activations else 0,
                )
            )
        return quants

    def activation_group(self, weight: MatrixWeight) -> int:
        """How many input features of ``weight`` share a scale of int8 activations; 0: all."""
        size = self.activation_group_size
        if size is None:
            return next(
                size
                for size in _DEFAULT_ACTIVATION_GROUP_SIZES
                if size == 0 or weight.in_features % size == 0
            )
        if size and weight.in_features % size:
            raise ValueError(
                f"activation_group_size is {size}, which does not divide the {weight.in_features} "
                f"input features of {weight.names[0]!r}"
            )
        return size

    def set_activation_groups(self, kept: Iterable[Any], weights: Sequence[MatrixWeight]) -> None:
        """Of the WeightQuant messages of weights that keep their integers. A checkpoint that was
        made for int8 activations has a scale per token, unless the caller says otherwise."""
        if self.quantize_activations is None and self.activation_group_size is None:
            return
        by_name = {weight.names[0]: weight for weight in weights}
        for quant in kept:
            if quant.quantize_activations and not (
                quant.reordered and self.activation_group_size is None
            ):
                quant.activation_group_size = self.activation_group(by_name[quant.tensor])

    def _format(self, weight: MatrixWeight, tied: bool) -> str | None:
        for pattern, setting in self.format_settings.items():
            if _matches((pattern,), weight):
                return setting
        name = weight.names[0]
        return self._table_format(name, tied) if name in TABLES else self.weight_format

    def _table_format(self, name: str, tied: bool) -> str | None:
        if not tied:
            return self.tables.get(name)
        formats = set(self.tables.values())
        if len(formats) > 1:
            raise ValueError(
                f"customized_quant_config: lm_head is {self.tables['lm_head']!r} and embedding is "
                f"{self.tables['embedding']!r}; this model has one weight for both"
            )
        return formats.pop() if formats else None

    def _group_size(self, weight: MatrixWeight, bits: int) -> int:
        key, size = "group_size", self.group_size
        for pattern, setting in self.group_settings.items():
            if _matches((pattern,), weight):
                key, size = f"group_settings[{pattern!r}]", setting
                break
        size = max(size, 0)
        lane = 32 // bits
        if weight.in_features % lane:
            raise ValueError(
                f"{weight.names[0]!r} has {weight.in_features} input features, no multiple of "
                f"{lane} as {bits} bits need; exclude it with modules_to_not_convert"
            )
        if size and weight.in_features % size:
            raise ValueError(
                f"{key} is {size}, which does not divide the {weight.in_features} input features "
                f"of {weight.names[0]!r}; set another for it in group_settings"
            )
        return size

    def _check_patterns(self, weights: Iterable[MatrixWeight]) -> None:
        """A pattern that matches nothing is probably misspelt, and would spare no weight."""
        for key, patterns in (
            ("group_settings", tuple(self.group_settings)),
            ("format_settings", tuple(self.format_settings)),
            ("modules_to_not_convert", self.modules_to_not_convert),
        ):
            for pattern in patterns:
                if not any(_matches((pattern,), weight) for weight in weights):
                    raise ValueError(f"{key}: {pattern!r} matches no weight of this model")


def parse_quantization(
    enable_quant: bool, weight_only_quant: bool, config: Mapping[str, Any] | None
) -> Quantization | None:
    """The arguments of ``serialize``, checked; None: nothing is quantised.

    ``weight_only_quant`` has an effect only with ``enable_quant`` and without a ``config``.
    """
    if not enable_quant:
        if config:
            raise ValueError(
                "customized_quant_config is given and enable_quant is False; set enable_quant=True "
                "to quantise"
            )
        return None
    if config is None:
        return Quantization(quantize_activations=not weight_only_quant)
    if not isinstance(config, Mapping):
        raise TypeError(
            f"customized_quant_config is a {type(config).__name__}, expected a dict or None"
        )
    for key in config:
        if key not in _KEYS:
            raise ValueError(
                f"customized_quant_config: unknown key {key!r}, expected {', '.join(_KEYS)}"
            )
    method = _checked_method(config.get("quant_method", _METHODS[0]))
    if method in _KEEPING_METHODS:
        for key in config:
            if key not in _KEEPING_KEYS:
                raise ValueError(
                    f"customized_quant_config: {key} is given, which the checkpoint decides with "
                    f"quant_method {method!r}"
                )
    weight_format = _checked_format("weight_format", config.get("weight_format", "int8"))
    compute_method = config.get("compute_method", _COMPUTE_METHODS[0])
    if compute_method not in _COMPUTE_METHODS:
        raise _error("compute_method", compute_method, _COMPUTE_METHODS)
    quantize_activations: bool | None = compute_method == "activate_quant"
    _check_activate_format(config.get("activate_format"), quantize_activations)
    if method in _KEEPING_METHODS and "compute_method" not in config:
        quantize_activations = None
    activation_group_size = _checked_activation_group_size(
        config.get("activation_group_size"), quantize_activations
    )
    return Quantization(
        quant_method=method,
        weight_format=weight_format,
        quantize_activations=quantize_activations,
        activation_group_size=activation_group_size,
        group_size=_checked_group_size("group_size", config.get("group_size", 0)),
        group_settings=_checked_settings(
            "group_settings", config, _checked_group_size, "group sizes"
        ),
        format_settings=_checked_settings(
            "format_settings", config, _checked_format, "weight formats"
        ),
        modules_to_not_convert=_checked_modules(config.get("modules_to_not_convert")),
        search=_checked_search(config.get("search", False)),
        tables={
            key: None if config[key] is None else _checked_format(key, config[key])
            for key in TABLES
            if key in config
        },
    )


def weight_formats(spec: Any) -> list[str]:
    """The formats of quantised weights, the most frequent first."""
    found = Counter(
        (
            "float8" if quant.float8 else f"{quant.bits} bits",
            quant.group_size,
            quant.quantize_activations,
            quant.activation_group_size,
        )
        for quant in spec.weight_quant
    )
    return [
        f"{count} weights of {numbers}, {_scales(group_size, 'output feature')}"
        + (f", activations of 8 bits, {_scales(activation_group, 'token')}" if is_activated else "")
        for (numbers, group_size, is_activated, activation_group), count in found.most_common()
    ]


def _scales(group_size: int, otherwise: str) -> str:
    return f"groups of {group_size}" if group_size else f"one scale per {otherwise}"


def _error(key: str, value: Any, expected: Iterable[Any]) -> ValueError:
    return ValueError(
        f"customized_quant_config: {key} is {value!r}, expected {', '.join(map(str, expected))}"
    )


def _checked_method(method: Any) -> str:
    if isinstance(method, str) and method in (*_METHODS, *_KEEPING_METHODS):
        return method
    if isinstance(method, str) and method.startswith("fp8"):
        raise UnsupportedModelError(
            f"customized_quant_config: quant_method {method!r} is not available yet; "
            "'instant_quant' quantises a checkpoint in float16, bfloat16 or float32"
        )
    raise _error("quant_method", method, (*_METHODS, *_KEEPING_METHODS))


def _checked_format(key: str, value: Any) -> str:
    if isinstance(value, str) and value in _FORMATS:
        return value
    if isinstance(value, str) and value.startswith("fp8"):
        raise UnsupportedModelError(
            f"customized_quant_config: {key} {value!r} is not available yet, "
            f"supported are {', '.join(_FORMATS)}"
        )
    raise _error(key, value, _FORMATS)


def _checked_search(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _error("search", value, (False, True))
    return value


def _check_activate_format(value: Any, quantize_activations: bool | None) -> None:
    expected = ("int8",) if quantize_activations else ("bfloat16", "float16", "float32")
    if value is not None and value not in expected:
        raise _error("activate_format", value, expected)


def _checked_activation_group_size(
    value: Any, quantize_activations: bool | None
) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or value not in _ACTIVATION_GROUP_SIZES:
        raise _error("activation_group_size", value, _ACTIVATION_GROUP_SIZES)
    if value and quantize_activations is False:
        raise ValueError(
            f"customized_quant_config: activation_group_size is {value!r}, but activations are "
            "quantised with compute_method 'activate_quant' alone"
        )
    return int(value)


def _checked_group_size(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in _GROUP_SIZES:
        raise _error(key, value, _GROUP_SIZES)
    return value


_Setting = TypeVar("_Setting")


def _checked_settings(
    key: str, config: Mapping[str, Any], checked: Callable[[str, Any], _Setting], values: str
) -> dict[str, _Setting]:
    """``config[key]``, a dict from patterns to ``values``, each of which is ``checked``."""
    settings = config.get(key)
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise _error(key, settings, [f"a dict from patterns to {values}"])
    return {
        _checked_pattern(key, pattern): checked(f"{key}[{pattern!r}]", value)
        for pattern, value in settings.items()
    }


def _checked_modules(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _error("modules_to_not_convert", value, ["a list of patterns"])
    return tuple(_checked_pattern("modules_to_not_convert", pattern) for pattern in value)


def _checked_pattern(key: str, pattern: Any) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise _error(key, pattern, ["regular expressions"])
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"customized_quant_config: {key}: {pattern!r} is no regular expression: {error}"
        ) from None
    return pattern


def _matches(patterns: Iterable[str], weight: MatrixWeight) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in weight.names)
