"""Names that a script may import but not use, and the messages for a script that uses one."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def warn(text: str) -> None:
    """A warning that names the line of the script."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("allspark"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def not_served(name: str, instead: str) -> NotImplementedError:
    """The exception of a call that does not exist here."""
    return NotImplementedError(f"{name} is not served: {instead}")


def _placeholder(name: str, instead: str) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise not_served(name, instead)

    return type(name, (), {"__init__": refuse, "__doc__": f"Not served: {instead}."})


_QUANTISATION = "weights are quantised as the dict customized_quant_config says"
_FILES = "serialize_to_path of a model loader writes the files that the engine reads"

ClientEngine = _placeholder(
    "ClientEngine", "there is no daemon for each NUMA node; Engine computes on all of them"
)
MultiMediaInfo = _placeholder("MultiMediaInfo", "requests are of text alone")
GPTQSettings = _placeholder("GPTQSettings", _QUANTISATION)
IQSettings = _placeholder("IQSettings", _QUANTISATION)
QuantizationSettings = _placeholder("QuantizationSettings", _QUANTISATION)
get_quant_settings_cls = _placeholder("get_quant_settings_cls", _QUANTISATION)
QUANT_CONFIG_MAP = {"gptq": GPTQSettings, "iq": IQSettings, "instant_quant": IQSettings}
save_allsparky = _placeholder("save_allsparky", _FILES)
save_allsparky_dltensor_tofile = _placeholder("save_allsparky_dltensor_tofile", _FILES)
set_global_header = _placeholder("set_global_header", _FILES)
