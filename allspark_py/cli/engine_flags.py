"""The flags about a model and its engine, which several commands have.

They are the fields of EngineConfig and of LMDeploy's two configs, so what a flag means, or why it
is refused, stands there alone. The help shows those that do something.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from . import lmdeploy_flags

# Fields that are not set by a flag: a flag of another form sets them, or none does.
_OTHERS = {
    "adapters", "cudagraph_capture_batch_sizes", "custom_module_map", "devices", "hf_overrides",
    "trust_remote_code",
}  # fmt: skip
# Further names of flags.
_ALIASES = {"device_type": "--device"}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them; `to_engine_config` reads them."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--adapters", nargs="+", metavar="[NAME=]PATH", default=[], help="LoRA adapters"
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python files of the checkpoint's tokenizer",
    )
    for name, (field, rule) in _fields().items():
        flags = ["--" + name.rstrip("_").replace("_", "-"), *filter(None, [_ALIASES.get(name)])]
        text = _help(name, rule.note) if rule.treatment == "mapped" else argparse.SUPPRESS
        if isinstance(field.default, bool):
            group.add_argument(*flags, dest=name, action="store_true", default=None, help=text)
        else:
            # A revision may look like a number.
            kind = str if str(field.type).startswith("str") else _value
            metavar = "N" if str(field.type).startswith("int") else "X"
            group.add_argument(*flags, dest=name, type=kind, metavar=metavar, help=text)
    lmdeploy_flags.add_flags(group, lmdeploy_flags.OF_ENGINE)
    lmdeploy_flags.add_speculative_flags(group)
    template = parser.add_argument_group("chat template")
    add = template.add_argument
    add("--chat-template", metavar="X", help="a name that `allspark list` shows, a JSON file or "
        "JSON text (default: the tokenizer's own)")  # fmt: skip
    add("--meta-instruction", metavar="TEXT", help="the system prompt of a builtin chat template")
    add("--cap", choices=("completion", "infilling", "chat", "python"),
        help="what a builtin chat template is used for")  # fmt: skip


def _help(name: str, note: str) -> str:
    """What EngineConfig says of its field; of a field that stands for one, which flag that has."""
    from allspark.pipeline.engine_config import EngineConfig
    from allspark.pipeline.fields import rules

    own = rules(EngineConfig)
    if name in own:
        return own[name].note.replace("`", "")

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}" if found[1] in own else found[1]

    return "as " + re.sub(r"`(?:EngineConfig\.)?([a-z_]+)`", flag, note).replace("`", "")


def _fields() -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """The fields by name: of EngineConfig, then what only LMDeploy's configs have."""
    from allspark.pipeline.configs import PytorchEngineConfig, TurbomindEngineConfig
    from allspark.pipeline.engine_config import EngineConfig
    from allspark.pipeline.fields import rules

    found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for config_class in (TurbomindEngineConfig, PytorchEngineConfig, EngineConfig):
        for field in dataclasses.fields(config_class):
            if field.name not in _OTHERS and field.name != "model_name":
                found.setdefault(field.name, (field, rules(config_class)[field.name]))
    return found


def _value(text: str) -> Any:
    """A number where the text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def to_engine_config(options: argparse.Namespace) -> Any:
    """The EngineConfig of the flags. Raises ValueError or TypeError for a refused value."""
    from allspark.pipeline.configs import PytorchEngineConfig, TurbomindEngineConfig
    from allspark.pipeline.engine_config import EngineConfig

    lmdeploy_flags.check(options, lmdeploy_flags.OF_ENGINE)
    given = {name: getattr(options, name) for name in _fields()}
    given = {name: value for name, value in given.items() if value is not None}
    turbomind = _take(given, TurbomindEngineConfig)
    config = TurbomindEngineConfig(**turbomind).to_engine_config()
    if turbomind.keys().isdisjoint(("cache_max_entry_count",)):
        config.kv_cache_memory = None
    if "cache_block_seq_len" not in turbomind:
        config.block_size = EngineConfig.block_size
    pytorch = _take(given, PytorchEngineConfig)
    other = PytorchEngineConfig(**pytorch).to_engine_config()
    if "num_gpu_blocks" in pytorch:
        config.kv_cache_blocks = other.kv_cache_blocks
    if "block_size" in pytorch:
        config.block_size = other.block_size
    lmdeploy_flags.apply_speculative(options, config)
    own = {**dataclasses.asdict(config), **given}
    own["adapters"] = dict(map(_adapter, options.adapters)) or None
    own["trust_remote_code"] = options.trust_remote_code
    return EngineConfig(**own)


def _take(given: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """Removes the fields of a config class from `given`."""
    names = [field.name for field in dataclasses.fields(config_class) if field.name in given]
    return {name: given.pop(name) for name in names}


def _adapter(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if separator and not Path(text).exists():  # a folder's name may have an "="
        return name, path
    return text.rstrip("/").rpartition("/")[2], text


def choose_adapter(options: argparse.Namespace, config: Any) -> None:
    """Sets --adapter-name where it is not given: the only adapter is the one that is meant.

    Raises:
        ValueError: --adapter-name names none of --adapters, or there are several and it is missing.
    """
    names = list(config.adapters or ())
    if options.adapter_name is None and len(names) == 1:
        options.adapter_name = names[0]
    check_adapter_name(options, config)
    if options.adapter_name is None and names:
        raise ValueError(f"--adapters has {', '.join(names)}; --adapter-name must say which one")


def check_adapter_name(options: argparse.Namespace, config: Any) -> None:
    """Raises ValueError where --adapter-name names none of --adapters."""
    names = list(config.adapters or ())
    if options.adapter_name is not None and options.adapter_name not in names:
        raise ValueError(
            f"--adapter-name is {options.adapter_name!r}; it must be one of --adapters, "
            f"{', '.join(names) or 'of which there are none'}"
        )


def to_chat_template(options: argparse.Namespace) -> Any:
    """The chat template of the flags; None: the tokenizer's own."""
    from allspark.chat_template import ChatTemplateConfig

    if options.meta_instruction is None and options.cap is None:
        return options.chat_template
    if options.chat_template is None:
        raise ValueError("--meta-instruction and --cap need --chat-template with a builtin's name")
    fields = {"meta_instruction": options.meta_instruction, "capability": options.cap}
    given = {key: value for key, value in fields.items() if value is not None}
    return ChatTemplateConfig(options.chat_template, **given)
