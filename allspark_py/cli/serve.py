"""Serves models over HTTP, with OpenAI's protocol."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import resource
import sys
from pathlib import Path

from allspark.error_text import needs_extra

from . import engine_flags, interrupt, server_flags

# The two forms of LMDeploy's command line, with their ports.
_FORMS = {"api_server": 23333, "gradio": 6006}
# Its further forms, which are other commands here, or none.
_OTHER_FORMS = {
    "api_client": "`allspark client URL` talks with a server",
    "proxy": "nginx or another proxy spreads requests over servers (docs/server.md)",
    "triton_client": "there is no Triton server",
}
# The flags that the page has where another server answers.
_PAGE_FLAGS = {
    "command", "parser", "fail", "config", "models", "server_name", "server_port", "max_body_bytes",
    "shutdown_timeout", "ssl", "log_level",
}  # fmt: skip
MAX_FILES = 1 << 16


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
    server_flags.add_server_flags(parser)
    engine_flags.add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    try:
        from allspark.serve import relay, server  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"{needs_extra('the server', 'serve')}: {error}") from None
    form, given = _form(options)
    if options.server_port is None:
        options.server_port = _FORMS[form]
    server_flags.start_log(options)
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
    from allspark.serve.server import Server, bind
    from allspark.serve.text_work import is_working

    settings = server_flags.to_server_settings(options)
    settings.home_is_page = form == "gradio"
    config = engine_flags.to_engine_config(options)
    template = engine_flags.to_chat_template(options)
    named = [(source, name or model_name_of(source)) for source, name in sources]
    adapters = _adapters_of([name for _, name in named], config.adapters or {})
    sockets = bind(settings)  # before models, which may take long
    engine = Engine()
    models = [
        ServedModel.open(
            source, dataclasses.replace(config, adapters=adapters[name]), name, engine, template
        )
        for source, name in named
    ]
    _allow_many_connections()
    _spare_the_collector()

    def started(port: int) -> None:
        names = ", ".join(model.name for model in models)
        _say(f"serving {names} on {_address(options, port)}")
        if settings.home_is_page:
            _say(f"the page is {_address(options, port)}/ui")

    try:
        server = Server(Catalog(models), settings, started)
        interrupt.check()
        server.run(sockets)
    finally:
        for model in models:
            model.close()
    if is_working():  # for nobody now; Python would wait for it
        os._exit(0)
    return 0


def _spare_the_collector() -> None:
    """Python's garbage collector need not look again at what stays for good, modules and models,
    and need not look at each thousand of streams that begins."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


def _adapters_of(models: list[str], given: dict[str, str]) -> dict[str, dict[str, str]]:
    """The adapters of each model: with several models they are named MODEL:NAME."""
    found: dict[str, dict[str, str]] = {name: {} for name in models}
    if len(found) < len(models):
        double = next(name for name in models if models.count(name) > 1)
        raise ValueError(f"two models have the name {double!r}; say MODEL=NAME")
    for given_name, path in given.items():
        model, separator, name = given_name.partition(":")
        if not separator or model not in found:
            model, name = models[0], given_name
            if len(models) > 1:
                listed = ", ".join(models)
                raise ValueError(
                    f"--adapters has {given_name!r} beside {len(models)} models; say "
                    f"MODEL:{name}={path} with one of {listed}"
                )
        found[model][name] = path
    return found


def _run_page(options: argparse.Namespace, url: str, others: list[str]) -> int:
    """The page alone, whose requests go to the server at `url`."""
    from allspark.serve.catalog import Catalog
    from allspark.serve.relay import make_page_app, server_url
    from allspark.serve.server import Server, bind

    target = server_url(url)
    if others:
        raise ValueError(f"{others[0]} is given beside {url}; the page is of one server")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(options).items():
        if name not in _PAGE_FLAGS and value != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is for a server of models; {url} has its own settings")
    settings = server_flags.to_server_settings(options)
    settings.api_keys = ()  # the other server's are asked for
    sockets = bind(settings)
    _allow_many_connections()
    _spare_the_collector()

    def started(port: int) -> None:
        _say(f"serving the page {_address(options, port)}/ui for {target}")

    make_app = functools.partial(make_page_app, url=target)
    server = Server(Catalog([]), settings, started, make_app)
    interrupt.check()
    server.run(sockets)
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
        # A form is no model: those of --config stay.
        of_file = options.parser.get_default("models")
        if not given and of_file != options.models:
            given = of_file or []
    if not given:
        raise ValueError("no model is named")
    if given[0] in _OTHER_FORMS and not Path(given[0]).exists():
        raise ValueError(f"serve {given[0]} is not served: {_OTHER_FORMS[given[0]]}")
    return form, given


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _source(given: str) -> tuple[str, str | None]:
    """A model with its name; None: it is not given one."""
    if Path(given).expanduser().exists():  # a folder's name may have an "="
        return given, None
    source, separator, name = given.rpartition("=")
    return (source, name or None) if separator else (given, None)


def _sources(options: argparse.Namespace, given: list[str]) -> list[tuple[str, str | None]]:
    """The models with their names."""
    sources = [_source(each) for each in given]
    if options.model_name is not None:
        if len(sources) > 1:
            raise ValueError("--model-name is for a single model; say MODEL=NAME")
        sources = [(sources[0][0], options.model_name)]
    return sources
