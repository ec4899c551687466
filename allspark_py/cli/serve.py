"""Serves models over HTTP, with OpenAI's protocol."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path
from typing import Any

from . import engine_flags

# The two forms of LMDeploy's command line, with their ports.
_FORMS = {"api_server": 23333, "gradio": 6006}
# The flags that the page has where another server answers.
_PAGE_FLAGS = {
    "command", "parser", "config", "models", "server_name", "server_port", "max_body_bytes",
    "shutdown_timeout", "ssl", "log_level",
}  # fmt: skip
MAX_FILES = 1 << 16
_INSTALL = "the server needs the extra: pip install 'allspark[serve]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        nargs="*",
        metavar="MODEL[=NAME]",
        help="what to serve, and under which name; 'gradio MODEL' opens the page /ui at port 6006, "
        "and 'gradio URL' the page alone, for the server at URL",
    )
    add("--config", metavar="FILE", help="YAML or JSON whose keys are flags (docs/cli.md)")
    parser.set_defaults(parser=parser)
    server = parser.add_argument_group("server")
    add = server.add_argument
    add("--server-name", default="0.0.0.0", help="address to listen on (default: all)")
    add("--server-port", type=int, help="port (default: 23333, gradio: 6006; 0: any free one)")
    add("--model-name", help="the name of a single model")
    add("--api-keys", nargs="+", default=[], metavar="KEY", help="also in ALLSPARK_API_KEYS")
    add("--api-key-file", metavar="FILE", help="a key on each line")
    add("--allow-origins", nargs="+", default=["*"])
    add("--allow-methods", nargs="+", default=["*"])
    add("--allow-headers", nargs="+", default=["*"])
    add("--allow-credentials", action="store_true")
    add("--max-concurrent-requests", type=int, default=0, help="0: no bound")
    add("--max-body-bytes", type=int, default=32 << 20)
    add("--max-sessions", type=int, default=1000, help="of /v1/chat/interactive; 0: no bound")
    add("--max-session-bytes", type=int, default=256 << 20, help="of all sessions; 0: no bound")
    add("--session-timeout", type=float, default=3600.0, help="seconds an idle one is kept; 0: any")
    add("--max-stops", type=int, default=64, help="stop strings of a request")
    add("--max-tools", type=int, default=256, help="tools of a request")
    add("--max-schema-bytes", type=int, default=1_000_000, help="of one schema or grammar")
    add("--schema-timeout", type=float, default=10.0, help="seconds that compiling one may take")
    add("--files-dir", metavar="DIR", help="keeps files and batches (default: until the end)")
    add("--max-file-bytes", type=int, default=200 << 20, help="of an uploaded file")
    add("--max-stored-bytes", type=int, default=4 << 30, help="of all files")
    add("--max-files", type=int, default=10_000)
    add("--request-timeout", type=float, default=0.0, help="seconds of a request; 0: no bound")
    add("--client-timeout", type=float, default=60.0, help="seconds to send headers and to read")
    add("--idle-timeout", type=float, default=75.0, help="seconds of a connection without request")
    add("--shutdown-timeout", type=float, default=30.0, help="seconds that running requests get")
    add("--response-store", metavar="FILE", help="keep /v1/responses here (default: in memory)")
    add("--max-stored-responses", type=int, default=1000, help="0: none is kept")
    add("--max-stored-response-bytes", type=int, default=256 << 20, help="of all of them")
    add("--response-lifetime", type=float, default=3600.0, help="seconds unused; 0: no bound")
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
        from allspark.serve import relay, server  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"{_INSTALL} ({error})") from None
    form, given = _form(options)
    if options.server_port is None:
        options.server_port = _FORMS[form]
    url = given[0] if form == "gradio" and _is_url(given[0]) else None
    if url is not None:
        return _run_page(options, url, given[1:])
    return _run_models(options, _sources(options, given), form)


def _run_models(
    options: argparse.Namespace, sources: list[tuple[str, str | None]], form: str
) -> int:
    from allspark.engine import Engine
    from allspark.pipeline.model_source import model_name_of
    from allspark.pipeline.served_model import ServedModel
    from allspark.serve.catalog import Catalog
    from allspark.serve.server import Server
    from allspark.serve.text_work import is_reading

    settings = _settings(options)
    settings.home_is_page = form == "gradio"
    config = engine_flags.to_engine_config(options)
    template = engine_flags.to_chat_template(options)
    engine = Engine()
    models = [
        ServedModel.open(source, config, name or model_name_of(source), engine, template)
        for source, name in sources
    ]
    _allow_many_connections()

    def started(port: int) -> None:
        names = ", ".join(model.name for model in models)
        _say(f"serving {names} on {_address(options, port)}")
        if settings.home_is_page:
            _say(f"the page is {_address(options, port)}/ui")

    try:
        Server(Catalog(models), settings, started).run()
    finally:
        for model in models:
            model.close()
    if is_reading():  # a text, for nobody now; Python would wait for it
        os._exit(0)
    return 0


def _run_page(options: argparse.Namespace, url: str, others: list[str]) -> int:
    """The page alone, whose requests go to the server at `url`."""
    from allspark.serve.catalog import Catalog
    from allspark.serve.relay import make_page_app, server_url
    from allspark.serve.server import Server

    target = server_url(url)
    if others:
        raise ValueError(f"{others[0]} is given beside {url}; the page is of one server")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(options).items():
        if name not in _PAGE_FLAGS and value != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is for a server of models; {url} has its own settings")
    settings = _settings(options)
    settings.api_keys = ()  # the other server's are asked for
    _allow_many_connections()

    def started(port: int) -> None:
        _say(f"serving the page {_address(options, port)}/ui for {target}")

    Server(Catalog([]), settings, started, lambda state: make_page_app(state, target)).run()
    return 0


def _allow_many_connections() -> None:
    """Raises the bound of open files, which is often 1,024, as far as the process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _address(options: argparse.Namespace, port: int) -> str:
    return f"{'https' if options.ssl else 'http'}://{options.server_name}:{port}"


def _form(options: argparse.Namespace) -> tuple[str, list[str]]:
    """api_server or gradio, as LMDeploy's command line has them, and what follows."""
    form, given = "api_server", options.models
    if given and given[0] in _FORMS and not Path(given[0]).exists():
        form, given = given[0], given[1:]
    if not given:
        raise ValueError("no model is named")
    return form, given


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _sources(options: argparse.Namespace, given: list[str]) -> list[tuple[str, str | None]]:
    """The models with their names."""
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
        max_stop_strings=options.max_stops,
        max_tools=options.max_tools,
        max_schema_bytes=options.max_schema_bytes,
        schema_timeout=options.schema_timeout,
        max_sessions=options.max_sessions,
        max_session_bytes=options.max_session_bytes,
        session_timeout=options.session_timeout,
        files_dir=options.files_dir,
        max_file_bytes=options.max_file_bytes,
        max_stored_bytes=options.max_stored_bytes,
        max_files=options.max_files,
        request_timeout=options.request_timeout,
        client_timeout=options.client_timeout,
        idle_timeout=options.idle_timeout,
        shutdown_timeout=options.shutdown_timeout,
        response_store=options.response_store,
        max_stored_responses=options.max_stored_responses,
        max_stored_response_bytes=options.max_stored_response_bytes,
        response_lifetime=options.response_lifetime,
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
