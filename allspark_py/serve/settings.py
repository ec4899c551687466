"""ServerSettings: the settings of the server; `allspark serve` has a flag for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class ServerSettings:
    """What the server allows, and how it answers. Sizes in bytes, times in seconds."""

    server_name: str = "0.0.0.0"
    server_port: int = 23333
    # Keys that open every route but /health and the pages; none: the server is open.
    api_keys: tuple[str, ...] = ()
    # Cross-origin requests.
    allow_origins: tuple[str, ...] = ("*",)
    allow_methods: tuple[str, ...] = ("*",)
    allow_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    # Requests beyond this are answered with 429; 0: no bound.
    max_concurrent_requests: int = 0
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 16 << 10
    max_stop_strings: int = 64
    max_tools: int = 256
    # Of a schema or grammar in a request, as JSON; the engine's own bound is 1,000,000 characters.
    max_schema_bytes: int = 1_000_000
    # What compiling one may take of a processor.
    schema_timeout: float = 10.0
    # Of conversations that are kept for /v1/chat/interactive, whose last turn is no longer ago than
    # the timeout; 0: no bound.
    max_sessions: int = 1000
    max_session_bytes: int = 256 << 20
    session_timeout: float = 3600.0
    # How long a client may take to send the headers of a request, and to take what is sent to it; a
    # body may take as long, and longer the larger it is. 0: no bound.
    client_timeout: float = 60.0
    # How long a connection without a request is kept. Longer than proxies keep theirs.
    idle_timeout: float = 75.0
    # How long a shutdown waits for what still runs.
    shutdown_timeout: float = 30.0
    # A comment is sent on a stream when nothing else was for so long.
    keep_alive_interval: float = 15.0
    # Most time of a request, whatever it asks for; 0: no bound.
    request_timeout: float = 0.0
    # Responses are kept for clients that come back: so many, of so many bytes, for so many seconds
    # after their last use (0: without end). 0 responses: none is kept.
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 256 << 20
    response_lifetime: float = 3600.0
    # The file that they are kept in, which outlives the server; None: in memory.
    response_store: str | None = None
    # Unknown fields of a request are refused; else they are named in a header.
    strict_fields: bool = False
    # Clients may load adapters from the server's disk, and unload them.
    allow_adapter_loading: bool = False
    # A request may bring a chat template.
    allow_request_templates: bool = False
    # Names of fields for reasoning in messages.
    reasoning_fields: tuple[str, ...] = ("reasoning_content", "reasoning")
    # None: as the chat template says.
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    # Prompts in the log, at most so many characters of each; None: none.
    max_log_len: int | None = None
    # Where files and batches are kept; None: in a temporary folder, for as long as the server runs.
    files_dir: str | None = None
    max_file_bytes: int = 200 << 20  # of one that is uploaded
    max_stored_bytes: int = 4 << 30  # of all files
    max_files: int = 10_000
    batch_window: int = 24 * 3600  # a batch that takes longer expires
    disable_docs: bool = False
    # `/` leads to the page for people, /ui; the page of the OpenAPI document is then at /docs.
    home_is_page: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    # Values for sampling that a request does not set, over those of the model.
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError where a bound is none."""
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if self.schema_timeout == 0:
            raise ValueError("schema_timeout is 0; it must be more than 0")
