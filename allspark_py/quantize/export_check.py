"""Whether a planned model fits a format for other programs; asked before any work is done."""

from __future__ import annotations

from typing import Any

from allspark.model_loader.convert import Plan
from allspark.model_loader.storage import OutputsFirst
from allspark.quantize.config import QuantizeConfig
from allspark.quantize.export_formats import SAVE_FORMATS, Scheme
from allspark.quantize.export_places import Place, affine, places_of
from allspark.quantize.grid import WeightFormat


def check_exportable(plan: Plan, config: QuantizeConfig, save_format: str) -> Scheme:
    """Refuses what a checkpoint of this format cannot hold. Returns the one format that all
    quantised weights have.

    Raises:
        ValueError: the message names the weight or the setting, its value, and what is possible.
    """
    if save_format not in SAVE_FORMATS:
        raise ValueError(
            f"save_format is {save_format!r}; it must be one of {', '.join(SAVE_FORMATS)}"
        )
    if config.target_bits is not None:
        raise ValueError(
            f"save_format is {save_format!r} and target_bits is {config.target_bits}, which mixes "
            "formats; it must be None there"
        )
    scheme = _scheme_of(plan, config, save_format)
    problem = SAVE_FORMATS[save_format].problem(scheme)
    if problem is not None:
        raise ValueError(f"save_format is {save_format!r}: {problem}")
    multiple = SAVE_FORMATS[save_format].row_multiple(scheme)
    quantized = {quant.tensor for quant in plan.spec.weight_quant}
    for place in places_of(plan):
        if place.target in quantized:
            problem = module_problem(place, multiple)
            if problem is not None:
                problem += "; leave it out with modules_to_not_convert"
        elif config.has_awq or config.smooth is not None:
            problem = _float_problem(place)
        if problem is not None:
            raise ValueError(
                f"save_format is {save_format!r}: {place.name!r} of {plan.spec.architecture} "
                f"{problem}"
            )
    return scheme


def _scheme_of(plan: Plan, config: QuantizeConfig, save_format: str) -> Scheme:
    """The format; ValueError if weights differ, or have none that can be written."""
    first = None
    for quant in plan.spec.weight_quant:
        if not quant.tensor.startswith("layers."):
            raise ValueError(
                f"save_format is {save_format!r} and {quant.tensor!r} is quantised; weights of "
                "layers alone can be, so lm_head and embedding must be None"
            )
        first = first or quant
        if _format(quant) != _format(first):
            raise ValueError(
                f"save_format is {save_format!r}, whose weights all have one format; "
                f"{first.tensor!r} has {_words(first)}, {quant.tensor!r} has {_words(quant)}"
            )
    if first is None:
        raise ValueError(
            f"save_format is {save_format!r}, and no weight is quantised; at least one must be"
        )
    if first.quantize_activations and config.activation_group_size:
        raise ValueError(
            f"save_format is {save_format!r} and activation_group_size is "
            f"{config.activation_group_size}; it has one scale per token (0, or None)"
        )
    bits, asymmetric, group_size, quantize_activations = _format(first)
    return Scheme(WeightFormat(bits, asymmetric, group_size), quantize_activations)


def _format(quant: Any) -> tuple[int, bool, int, bool]:
    return quant.bits, quant.asymmetric, quant.group_size, quant.quantize_activations


def _words(quant: Any) -> str:
    kind = "uint" if quant.asymmetric else "int"
    groups = f"groups of {quant.group_size}" if quant.group_size else "one scale per row"
    activations = " and int8 activations" if quant.quantize_activations else ""
    return f"{kind}{quant.bits} in {groups}{activations}"


def module_problem(place: Place, multiple: int) -> str | None:
    """Why a part of a quantised weight is no module's."""
    source, rule = place.part.source, place.part.rule
    if rule.transform is not None:
        return f"cannot be quantised, since {place.target!r} is computed from it"
    if rule.transposed or isinstance(source, OutputsFirst):
        return (
            "is a matrix whose module stores input features as rows; those of nn.Linear alone can "
            "be quantised"
        )
    if len(source.shape) != 2:
        return (
            f"has shape {list(source.shape)}, all experts in one tensor; matrices of single "
            "experts alone can be quantised"
        )
    if not place.is_module:
        return "is not the weight of a module in the checkpoint, and cannot be quantised"
    if source.shape[0] % multiple:
        return f"has {source.shape[0]} output features; they must be a multiple of {multiple}"
    return None


def _float_problem(place: Place) -> str | None:
    """Why a tensor that a method may scale cannot be written back."""
    transform = place.part.rule.transform
    if place.layer is None or transform is None or affine(transform) is not None:
        return None
    return (
        "is changed when it is read, in a way that has no inverse here, and method awq and smooth "
        "scale it; method rtn, search or gptq does not"
    )
