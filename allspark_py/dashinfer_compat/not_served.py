"""Names that a script may import but not use, and the messages for a script that uses one."""

from __future__ import annotations

import sys
import warnings

from allspark.not_served import placeholder


def warn(text: str) -> None:
    """A warning that names the line of the script."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("allspark"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


_QUANTISATION = "weights are quantised as the dict customized_quant_config says"
_FILES = "serialize_to_path of a model loader writes the files that the engine reads"

ClientEngine = placeholder(
    "ClientEngine", "there is no daemon for each NUMA node; Engine computes on all of them"
)
MultiMediaInfo = placeholder("MultiMediaInfo", "requests are of text alone")
GPTQSettings = placeholder("GPTQSettings", _QUANTISATION)
IQSettings = placeholder("IQSettings", _QUANTISATION)
QuantizationSettings = placeholder("QuantizationSettings", _QUANTISATION)
get_quant_settings_cls = placeholder("get_quant_settings_cls", _QUANTISATION)
QUANT_CONFIG_MAP = {"gptq": GPTQSettings, "iq": IQSettings, "instant_quant": IQSettings}
save_allsparky = placeholder("save_allsparky", _FILES)
save_allsparky_dltensor_tofile = placeholder("save_allsparky_dltensor_tofile", _FILES)
set_global_header = placeholder("set_global_header", _FILES)
