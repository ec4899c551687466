"""The flags of the server: one for each setting that has a help."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from allspark.pipeline.log import FORMAT, LEVELS
from allspark.serve.settings import ServerSettings
from allspark.unicode_text import read_text

from . import lmdeploy_flags

_TYPES = {"int": int, "int | None": int, "float": float}


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them. The port has no default: it depends on what is served."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--server-port", type=int, metavar="N", help="port (default: 23333, gradio: 6006; 0: any "
        "free one)")  # fmt: skip
    add("--model-name", metavar="NAME", help="the name of a single model")
    add("--api-keys", nargs="+", metavar="KEY", help="also in ALLSPARK_API_KEYS")
    add("--api-key-file", metavar="FILE", help="a key on each line")
    for name, setting in _flags():
        text, default = setting.metadata["help"], setting.default
        given: dict[str, Any] = {"help": text, "default": default}
        if setting.type == "bool":
            given["action"] = "store_true"
        else:
            given["type"] = _TYPES.get(str(setting.type), str)
            given["metavar"] = setting.metadata["metavar"] or "X"
        if isinstance(default, tuple):
            given.update(nargs="+", default=list(default))
        elif default and "default" not in text:
            given["help"] = f"{text} (default: {default})"
        add("--" + name.replace("_", "-"), **given)
    add(
        "--ssl",
        action="store_true",
        help="TLS with SSL_KEYFILE and SSL_CERTFILE of the environment",
    )
    add(
        "--generation-config",
        default="auto",
        metavar="auto|lmdeploy|PATH",
        help="where temperature, top_p, top_k and repetition_penalty come from if a request says "
        "nothing: the model, the server's own, or a generation_config.json (default: auto)",
    )
    add("--log-level", default="WARNING", type=str.upper, choices=LEVELS, metavar="LEVEL",
        help=f"one of {', '.join(LEVELS)} (default: WARNING)")  # fmt: skip
    lmdeploy_flags.add_flags(group, lmdeploy_flags.OF_SERVER)


def to_server_settings(options: argparse.Namespace) -> ServerSettings:
    """Raises ValueError where a setting is wrong, and OSError where a file cannot be read."""
    lmdeploy_flags.check(options, lmdeploy_flags.OF_SERVER)
    keyfile = certfile = None
    if options.ssl:
        keyfile, certfile = (os.environ.get(name) for name in ("SSL_KEYFILE", "SSL_CERTFILE"))
        if not keyfile or not certfile:
            raise ValueError("--ssl needs SSL_KEYFILE and SSL_CERTFILE in the environment")
        for name, path in (("SSL_KEYFILE", keyfile), ("SSL_CERTFILE", certfile)):
            if not Path(path).is_file():
                raise ValueError(f"{name} is {path!r}; there is no such file")
    given = {setting.name: getattr(options, name) for name, setting in _flags()}
    given = {key: tuple(each) if isinstance(each, list) else each for key, each in given.items()}
    if options.server_port is not None:
        given["server_port"] = options.server_port
    return ServerSettings(
        **given,
        api_keys=tuple(_keys(options)),
        ssl_keyfile=keyfile,
        ssl_certfile=certfile,
        sampling_defaults=_sampling_defaults(options.generation_config),
    )


def start_log(options: argparse.Namespace) -> None:
    """Lets the log go to stderr."""
    logging.basicConfig(format=FORMAT)
    logging.getLogger("allspark").setLevel(options.log_level)
    if options.max_log_len is not None:
        logging.getLogger("allspark.serve.prompts").setLevel(logging.INFO)


def _sampling_defaults(source: str) -> dict[str, float]:
    """What counts more than the model's own values."""
    from allspark.serve.fields import SAMPLING

    if source == "auto":
        return {}
    found = {**SAMPLING, "repetition_penalty": 1.0}
    if source == "lmdeploy":
        return found
    path = Path(source)
    path = path / "generation_config.json" if path.is_dir() else path
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: it is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path}: it is a {type(given).__name__}; it must be an object")
    for name in found:
        value = given.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ValueError(f"{path}: {name} is {value!r}; it must be a number of at least 0")
        found[name] = value
    return found


def _flags() -> Iterator[tuple[str, Field[Any]]]:
    """The settings with a flag, by its name in options."""
    for setting in fields(ServerSettings):
        if "help" in setting.metadata:
            yield setting.metadata["name"] or setting.name, setting


def _keys(options: argparse.Namespace) -> list[str]:
    """Raises ValueError where a source of keys has none: the server would be open."""
    given: dict[str, list[str]] = {}
    if options.api_keys is not None:
        given["--api-keys"] = options.api_keys
    if options.api_key_file is not None:
        given[options.api_key_file] = read_text(Path(options.api_key_file)).split("\n")
    if (listed := os.environ.get("ALLSPARK_API_KEYS")) is not None:
        given["ALLSPARK_API_KEYS"] = listed.split(",")
    found: list[str] = []
    for source, keys in given.items():
        own = [key.strip() for key in keys if key.strip()]
        if not own:
            raise ValueError(f"{source} has no key; each is a text of its own")
        found += own
    return found
