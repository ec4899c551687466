"""ServerSettings: the settings of the server, and which of them `allspark serve` has as flags."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from allspark.serve.parsers.registry import choose_reasoning_parser, choose_tool_parser


def flag(default: Any, text: str, name: str | None = None, metavar: str | None = None) -> Any:
    """A field that has a flag: `text` is its help, `name` its name if that is not the field's."""
    return field(default=default, metadata={"help": text, "name": name, "metavar": metavar})


# The names under which clients look for reasoning in messages.
REASONING_FIELDS = ("reasoning_content", "reasoning")


@dataclass
class ServerSettings:
    """What the server allows, and how it answers. Sizes in bytes, times in seconds."""

    server_name: str = flag("0.0.0.0", "address to listen on (default: all)")
    server_port: int = 23333
    # Keys that open every route but /health and the pages; none: the server is open.
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = flag(("*",), "of pages that may ask (default: any)")
    allow_methods: tuple[str, ...] = flag(("*",), "that such pages may use (default: any)")
    allow_headers: tuple[str, ...] = flag(("*",), "that such pages may send (default: any)")
    allow_credentials: bool = flag(False, "such pages may send cookies")
    max_concurrent_requests: int = flag(0, "requests that run at a time; more get 429; 0: no bound")
    max_body_bytes: int = flag(32 << 20, "of a request")
    max_header_bytes: int = flag(16 << 10, "of all headers of a request")
    max_stops: int = flag(64, "stop strings of a request")
    max_tools: int = flag(256, "tools of a request")
    # As JSON; the engine's own bound is 1,000,000 characters.
    max_schema_bytes: int = flag(1_000_000, "of one schema or grammar")
    schema_timeout: float = flag(10.0, "seconds of a processor that compiling one may take")
    max_sessions: int = flag(1000, "of /v1/chat/interactive; 0: no bound")
    max_session_bytes: int = flag(256 << 20, "of all sessions; 0: no bound")
    session_timeout: float = flag(3600.0, "seconds that an idle session is kept; 0: no bound")
    request_timeout: float = flag(0.0, "seconds of a request, whatever it asks for; 0: no bound")
    # A body may take as long, and longer the larger it is.
    client_timeout: float = flag(
        60.0, "seconds in which a client sends its headers, or takes what is sent; 0: no bound"
    )
    # Longer than proxies keep theirs.
    idle_timeout: float = flag(75.0, "seconds that a connection without request is kept")
    shutdown_timeout: float = flag(30.0, "seconds that running requests get at the end")
    # A comment is sent on a stream when nothing else was for so long.
    keep_alive_interval: float = 15.0
    response_store: str | None = flag(
        None, "keep /v1/responses here (default: in memory)", metavar="FILE"
    )
    max_stored_responses: int = flag(1000, "responses that are stored; 0: none")
    max_stored_response_bytes: int = flag(256 << 20, "of all of them")
    response_lifetime: float = flag(3600.0, "seconds after the last use; 0: no bound")
    files_dir: str | None = flag(
        None, "keep files and batches here (default: until the end)", metavar="DIR"
    )
    max_file_bytes: int = flag(200 << 20, "of an uploaded file")
    max_stored_bytes: int = flag(4 << 30, "of all files")
    max_files: int = flag(10_000, "that are kept")
    batch_window: int = 24 * 3600  # a batch that takes longer expires
    # Else they are named in a header.
    strict_fields: bool = flag(False, "refuse unknown fields of requests")
    allow_request_templates: bool = flag(False, "take chat templates of requests")
    allow_adapter_loading: bool = flag(False, "let clients load adapters by path")
    reasoning_fields: tuple[str, ...] = flag(
        REASONING_FIELDS,
        "names under which messages have reasoning (default: both)",
        "reasoning_field",
        metavar="NAME",
    )
    tool_call_parser: str | None = flag(None, "default: what the chat template shows")
    reasoning_parser: str | None = flag(None, "default: what the chat template shows")
    max_log_len: int | None = flag(
        None, "log so many characters of each prompt (default: none)", metavar="N"
    )
    disable_docs: bool = flag(False, "no page at / and no /openapi.json", "disable_fastapi_docs")
    # `/` leads to the page for people, /ui; the page of the OpenAPI document is then at /docs.
    home_is_page: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    # Values for sampling that a request does not set, over those of the model.
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError where a number is negative or not finite, or a name is unknown."""
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if self.server_port >= 1 << 16:
            raise ValueError(f"server_port is {self.server_port}; it must be in [0, 65535]")
        if "" in self.api_keys:
            raise ValueError("api_keys has an empty key, which every request would have")
        if self.schema_timeout == 0:
            raise ValueError("schema_timeout is 0; it must be more than 0")
        if unknown := set(self.reasoning_fields).difference(REASONING_FIELDS):
            names = " and ".join(REASONING_FIELDS)
            raise ValueError(f"reasoning_field is {min(unknown)!r}; the names are {names}")
        # By their names, before a request needs them.
        choose_tool_parser(None, self.tool_call_parser)
        choose_reasoning_parser(None, self.reasoning_parser)
