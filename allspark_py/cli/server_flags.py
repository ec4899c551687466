"""The flags of the server: one for each setting that has a help."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from allspark.serve.settings import ServerSettings

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TYPES = {"int": int, "int | None": int, "float": float}


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them. The port has no default: it depends on what is served."""
    add = parser.add_argument_group("server").add_argument
    add("--server-port", type=int, metavar="N", help="port (default: 23333, gradio: 6006; 0: any "
        "free one)")  # fmt: skip
    add("--model-name", metavar="NAME", help="the name of a single model")
    add("--api-keys", nargs="+", default=[], metavar="KEY", help="also in ALLSPARK_API_KEYS")
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
    add("--log-level", default="WARNING", type=str.upper, choices=LOG_LEVELS, metavar="LEVEL",
        help=f"one of {', '.join(LOG_LEVELS)} (default: WARNING)")  # fmt: skip


def to_server_settings(options: argparse.Namespace) -> ServerSettings:
    """Raises ValueError where a setting is wrong, and OSError where the file of keys is."""
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
        **given, api_keys=tuple(_keys(options)), ssl_keyfile=keyfile, ssl_certfile=certfile
    )


def _flags() -> Iterator[tuple[str, Field[Any]]]:
    """The settings with a flag, by its name in options."""
    for setting in fields(ServerSettings):
        if "help" in setting.metadata:
            yield setting.metadata["name"] or setting.name, setting


def _keys(options: argparse.Namespace) -> list[str]:
    keys = [*options.api_keys, *os.environ.get("ALLSPARK_API_KEYS", "").split(",")]
    if options.api_key_file is not None:
        keys += Path(options.api_key_file).read_text().split("\n")
    return [key.strip() for key in keys if key.strip()]
