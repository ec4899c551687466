"""serve(), run_local() and client(): a server in a process of its own, and its client."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import inspect
import json
import os
import ssl as tls
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from allspark.chat_template import MODELS, BaseChatTemplate, ChatTemplateConfig
from allspark.lmdeploy_compat.api_client import APIClient
from allspark.not_served import not_served
from allspark.pipeline.configs import to_engine_config
from allspark.pipeline.log import check_level

# What the server's process prints, with its port, once it takes requests.
READY = "allspark.lmdeploy_compat: serving on port "
_NUM_LAST_LINES = 20
_END_TIMEOUT_S = 5
# Keywords that are settings of the server.
_SETTINGS = (
    "allow_origins", "allow_methods", "allow_headers", "allow_credentials", "max_log_len",
    "max_concurrent_requests", "tool_call_parser", "reasoning_parser", "request_timeout",
)  # fmt: skip


def client(
    api_server_url: str = "http://0.0.0.0:23333", api_key: str | None = None, **kwargs: Any
) -> APIClient:
    """The client of a server that runs."""
    return APIClient(api_server_url, api_key, **kwargs)


def serve(
    model_path: str,
    model_name: str | None = None,
    backend: str = "turbomind",
    backend_config: Any = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    server_name: str = "0.0.0.0",
    server_port: int = 23333,
    log_level: str = "ERROR",
    api_keys: str | Sequence[str] | None = None,
    ssl: bool = False,
    **kwargs: Any,
) -> APIClient:
    """Starts a server in a process of its own and returns its client once it answers. The process
    ends with this one, or by `close` of the client.

    Args:
        backend: "turbomind" or "pytorch"; the same engine is both.
        server_port: 0: any free one.
        ssl: TLS with SSL_KEYFILE and SSL_CERTFILE of the environment.
        kwargs: settings of the server: allow_origins, allow_methods, allow_headers,
            allow_credentials, max_log_len, max_concurrent_requests, request_timeout,
            tool_call_parser, reasoning_parser; also trust_remote_code and speculative_config.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: the server ended; the text has its last lines.
    """
    check_level(log_level)
    keys = [api_keys] if isinstance(api_keys, str) else list(api_keys or ())
    job = _job(model_path, model_name, backend, backend_config, chat_template_config, kwargs)
    job["log_level"] = log_level
    job["settings"].update(
        server_name=server_name, server_port=server_port, api_keys=keys, **_tls_files(ssl)
    )
    process = ServerProcess(job)
    context = _context() if ssl else None
    url = f"{'https' if ssl else 'http'}://{_host(server_name)}:{process.port}"
    try:
        made = APIClient(url, keys[0] if keys else None, ssl_context=context)
        made.get_model_list()
    except BaseException:
        process.end()
        raise
    made._end = process.end
    return made


def run_local(
    model_path: str,
    model_name: str | None = None,
    backend: str = "turbomind",
    backend_config: Any = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    server_name: str = "0.0.0.0",
    server_port: int = 6006,
    share: bool = False,
    **kwargs: Any,
) -> None:
    """Serves a model with a page at `/` on which people talk with it. Returns once the server has
    ended, as it does at Ctrl-C.

    Args:
        server_name: "huggingface-space" stands for all addresses.
        server_port: 0: any free one.
        kwargs: those of serve().

    Raises:
        NotImplementedError: `share` is asked for.
        TypeError, ValueError: an argument is wrong.
        RuntimeError: the server ended by itself; the text has its last lines.
    """
    if share:
        raise not_served("run_local with share", "no tunnel is opened")
    if server_name == "huggingface-space":
        server_name = "0.0.0.0"
    job = _job(model_path, model_name, backend, backend_config, chat_template_config, kwargs)
    job["settings"].update(server_name=server_name, server_port=server_port, home_is_page=True)
    process = ServerProcess(job)
    print(f"the page is http://{_host(server_name)}:{process.port}/ui", file=sys.stderr, flush=True)
    try:
        process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        process.end()


def _host(server_name: str) -> str:
    return f"[{server_name}]" if ":" in server_name else server_name


def _job(
    model_path: str,
    model_name: str | None,
    backend: str,
    backend_config: Any,
    chat_template_config: ChatTemplateConfig | str | None,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """What the process of a server is told (api_server.py)."""
    from allspark.pipeline.model_source import check_source

    check_source(model_path)
    if backend not in ("turbomind", "pytorch"):
        raise ValueError(f"backend is {backend!r}; it must be 'turbomind' or 'pytorch'")
    return {
        "model_path": model_path,
        "model_name": model_name,
        "engine": _engine_fields(backend_config, kwargs),
        "chat_template": _template_job(chat_template_config, model_name),
        "log_level": "ERROR",
        "settings": _settings(kwargs),
    }


def _settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("qos_config_path"):
        raise not_served("qos_config_path", "a request has a priority: `priority`")
    given = {name: value for name, value in kwargs.items() if name != "qos_config_path"}
    for name in given:
        if name not in _SETTINGS:
            raise TypeError(f"there is no parameter {name!r}")
    for name in ("allow_origins", "allow_methods", "allow_headers"):
        if isinstance(given.get(name), str):
            given[name] = [given[name]]
    return given


def _engine_fields(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The fields of the EngineConfig; takes what is about the engine out of `kwargs`."""
    own = to_engine_config(config)
    if (speculative := kwargs.pop("speculative_config", None)) is not None:
        speculative.apply(own)
    own.trust_remote_code = bool(kwargs.pop("trust_remote_code", own.trust_remote_code))
    return dataclasses.asdict(own)


def _template_job(config: ChatTemplateConfig | str | None, model_name: str | None) -> Any:
    """The template for the server's process: None, a file or JSON text, or for a class of the
    script, which that process does not know, {"name": its name, "fields": what it sets}."""
    if config is None and model_name in MODELS:
        config = model_name  # as in LMDeploy's older releases
    if isinstance(config, str) and config in MODELS:
        config = ChatTemplateConfig(config)
    if config is None or isinstance(config, str):
        return config
    cls = MODELS.get(config.model_name)
    if cls is None or cls is BaseChatTemplate or cls.__module__.startswith("allspark."):
        return config.to_json()
    if (own := _own_code(cls)) is not None:
        raise not_served(
            f"serve() with {cls.__name__}.{own}",
            "a server takes the fields of a template, not its code; a pipeline takes both",
        )
    template = config.chat_template
    names = list(inspect.signature(BaseChatTemplate).parameters)
    return {"name": template.name, "fields": {name: getattr(template, name) for name in names}}


def _own_code(cls: type) -> str | None:
    """What a template's class has beyond the fields of a BaseChatTemplate; None: nothing."""
    if not issubclass(cls, BaseChatTemplate):
        return "__init__"
    for each in cls.__mro__[: cls.__mro__.index(BaseChatTemplate)]:
        for name in vars(each):
            if name not in ("__init__", "match") and hasattr(BaseChatTemplate, name):
                if callable(getattr(cls, name)) or not name.startswith("__"):
                    return name
    return None


def _tls_files(ssl: bool) -> dict[str, Any]:
    if not ssl:
        return {}
    found = {name: os.environ.get(name.upper()) for name in ("ssl_keyfile", "ssl_certfile")}
    if not all(found.values()):
        raise ValueError("ssl needs SSL_KEYFILE and SSL_CERTFILE in the environment")
    return found


def _context() -> tls.SSLContext:
    """Trusts the certificate of the server that was started, whatever name it is for."""
    context = tls.create_default_context(cafile=os.environ["SSL_CERTFILE"])
    context.check_hostname = False
    return context


class ServerProcess:
    """The process of a server (api_server.py), which ends when this one does.

    Raises RuntimeError if it ends before it takes requests.
    """

    def __init__(self, job: dict[str, Any]):
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._ready = threading.Event()
        self.port = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "allspark.lmdeploy_compat.api_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        atexit.register(self.end)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()
        try:
            self._start(job)
        except BaseException:
            self.end()
            raise

    def _start(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            # The pipe stays open: its end tells the process that this one has ended.
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the lines below say why it ended
        while not self._ready.wait(0.05):
            if self._process.poll() is not None:
                raise self._failure()

    def _failure(self) -> RuntimeError:
        """Why the process, which has ended, did so."""
        for reader in self._readers:
            reader.join(_END_TIMEOUT_S)
        lines = "\n".join(self._lines)
        return RuntimeError(f"the server ended with status {self._process.returncode}:\n{lines}")

    def wait(self) -> None:
        """Returns once the process has ended. Raises RuntimeError where it failed."""
        if self._process.wait() != 0:
            raise self._failure()

    def _read(self, source: IO[str], target: IO[str]) -> None:
        for line in source:
            if line.startswith(READY):
                self.port = int(line.removeprefix(READY))
                self._ready.set()
                continue
            self._lines.append(line.rstrip("\n"))
            try:
                target.write(line)
                target.flush()
            except ValueError:  # this process is ending
                pass

    def end(self) -> None:
        """Ends the process; a second call has no effect."""
        atexit.unregister(self.end)
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdin is not None:
            try:
                process.stdin.close()
            except OSError:
                pass
