"""The process that serve() starts: a server whose settings come as a line of JSON on stdin.

It ends when stdin does, so it never outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from allspark.error_text import needs_extra


def main() -> int:
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        _serve(job)
    except Exception as error:  # serve() shows it
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _end_with_stdin() -> None:
    try:
        while os.read(0, 4096):
            pass
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _serve(job: dict[str, Any]) -> None:
    try:
        from allspark.serve.catalog import Catalog
        from allspark.serve.server import Server
    except ImportError as error:
        raise RuntimeError(f"{needs_extra('the server', 'serve')}: {error}") from None
    from allspark.lmdeploy_compat.serving import READY
    from allspark.pipeline.engine_config import EngineConfig
    from allspark.pipeline.log import set_log_level
    from allspark.pipeline.model_source import model_name_of
    from allspark.pipeline.served_model import ServedModel
    from allspark.serve.settings import ServerSettings

    set_log_level(job["log_level"])
    source = job["model_path"]
    settings = ServerSettings(shutdown_timeout=1.0)
    for name, value in job["settings"].items():
        setattr(settings, name, tuple(value) if isinstance(value, list) else value)
    model = ServedModel.open(
        source,
        EngineConfig(**job["engine"]),
        job["model_name"] or model_name_of(source),
        chat_template=_template(job["chat_template"]),
    )

    def started(port: int) -> None:
        print(f"{READY}{port}", flush=True)

    try:
        Server(Catalog([model]), settings, started).run()
    finally:
        model.close()


def _template(given: Any) -> Any:
    """The template of the job; fields of a class of the script are registered under its name."""
    if not isinstance(given, dict):
        return given
    from allspark.chat_template import MODELS, BaseChatTemplate, ChatTemplateConfig

    class Sent(BaseChatTemplate):
        def __init__(self) -> None:
            super().__init__(**given["fields"])

    MODELS.register_module(given["name"], force=True, module=Sent)
    return ChatTemplateConfig(given["name"])


if __name__ == "__main__":
    sys.exit(main())
