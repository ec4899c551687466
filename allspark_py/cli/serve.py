"""Serves models over HTTP, with OpenAI's protocol."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path
from typing import Any

from . import engine_flags

MAX_FILES = 1 << 16
_INSTALL = "the server needs the extra: pip install 'allspark[serve]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL[=NAME]", help="what to serve, and under which name")
    server = parser.add_argument_group("server")
    add = server.add_argument
    add("--server-name", default="0.0.0.0", help="address to listen on (default: all)")
    add("--server-port", type=int, default=23333, help="port (default: 23333; 0: any free one)")
    add("--model-name", help="the name of a single model")
    add("--api-keys", nargs="+", default=[], metavar="KEY", help="also in ALLSPARK_API_KEYS")
    add("--api-key-file", metavar="FILE", help="a key on each line")
    add("--allow-origins", nargs="+", default=["*"])
    add("--allow-methods", nargs="+", default=["*"])
    add("--allow-headers", nargs="+", default=["*"])
    add("--allow-credentials", action="store_true")
    add("--max-concurrent-requests", type=int, default=0, help="0: no bound")
    add("--max-body-bytes", type=int, default=32 << 20)
    add("--request-timeout", type=float, default=0.0, help="seconds of a request; 0: no bound")
    add("--client-timeout", type=float, default=60.0, help="seconds to send headers and to read")
    add("--idle-timeout", type=float, default=75.0, help="seconds of a connection without request")
    add("--shutdown-timeout", type=float, default=30.0, help="seconds that running requests get")
    add("--strict-fields", action="store_true", help="refuse unknown fields of requests")
    add("--allow-request-templates", action="store_true", help="take chat templates of requests")
    add("--allow-adapter-loading", action="store_true", help="let clients load adapters by path")
    add("--tool-call-parser", help="default: what the chat template shows")
    add("--reasoning-parser", help="default: what the chat template shows")
    add("--disable-fastapi-docs", action="store_true", help="no page at / and no /openapi.json")
    add(
        "--ssl",
        action="store_true",
        help="TLS with SSL_KEYFILE and SSL_CERTFILE of the environment",
    )
    add("--max-log-len", type=int, help="log so many characters of each prompt (default: none)")
    add("--log-level", default="WARNING", type=str.upper)
    engine_flags.add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    try:
        from allspark.serve.catalog import Catalog
        from allspark.serve.server import Server
        from allspark.serve.text_work import is_reading
    except ImportError as error:
        raise RuntimeError(f"{_INSTALL} ({error})") from None
    from allspark.engine import Engine
    from allspark.pipeline.model_source import model_name_of
    from allspark.pipeline.served_model import ServedModel

    sources = _sources(options)
    settings = _settings(options)
    config = engine_flags.to_engine_config(options)
    template = engine_flags.to_chat_template(options)
    engine = Engine()
    models = [
        ServedModel.open(source, config, name or model_name_of(source), engine, template)
        for source, name in sources
    ]
    _allow_many_connections()
    scheme = "https" if options.ssl else "http"

    def started(port: int) -> None:
        names = ", ".join(model.name for model in models)
        print(f"serving {names} on {scheme}://{options.server_name}:{port}", file=sys.stderr)

    try:
        Server(Catalog(models), settings, started).run()
    finally:
        for model in models:
            model.close()
    if is_reading():  # a text, for nobody now; Python would wait for it
        os._exit(0)
    return 0


def _allow_many_connections() -> None:
    """Raises the bound of open files, which is often 1,024, as far as the process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _sources(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The models with their names. `api_server MODEL` of LMDeploy's command line is MODEL."""
    given = options.models
    if given[0] == "api_server" and not Path(given[0]).exists():
        given = given[1:]
    if not given:
        raise ValueError("no model is named")
    pairs = [each.rpartition("=")[::2] if "=" in each else (each, None) for each in given]
    sources = [(source, name or None) for source, name in pairs]
    if options.model_name is not None:
        if len(sources) > 1:
            raise ValueError("--model-name is for a single model; say MODEL=NAME")
        sources = [(sources[0][0], options.model_name)]
    return sources


def _settings(options: argparse.Namespace) -> Any:
    from allspark.serve.settings import ServerSettings

    keyfile = certfile = None
    if options.ssl:
        keyfile, certfile = (os.environ.get(name) for name in ("SSL_KEYFILE", "SSL_CERTFILE"))
        if not keyfile or not certfile:
            raise ValueError("--ssl needs SSL_KEYFILE and SSL_CERTFILE in the environment")
    return ServerSettings(
        server_name=options.server_name,
        server_port=options.server_port,
        api_keys=tuple(_keys(options)),
        allow_origins=tuple(options.allow_origins),
        allow_methods=tuple(options.allow_methods),
        allow_headers=tuple(options.allow_headers),
        allow_credentials=options.allow_credentials,
        max_concurrent_requests=options.max_concurrent_requests,
        max_body_bytes=options.max_body_bytes,
        request_timeout=options.request_timeout,
        client_timeout=options.client_timeout,
        idle_timeout=options.idle_timeout,
        shutdown_timeout=options.shutdown_timeout,
        strict_fields=options.strict_fields,
        allow_adapter_loading=options.allow_adapter_loading,
        allow_request_templates=options.allow_request_templates,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        max_log_len=options.max_log_len,
        disable_docs=options.disable_fastapi_docs,
        ssl_keyfile=keyfile,
        ssl_certfile=certfile,
    )


def _keys(options: argparse.Namespace) -> list[str]:
    keys = [*options.api_keys, *os.environ.get("ALLSPARK_API_KEYS", "").split(",")]
    if options.api_key_file is not None:
        keys += Path(options.api_key_file).read_text().split("\n")
    return [key.strip() for key in keys if key.strip()]
