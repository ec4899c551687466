"""Where a server is: its base URL."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

_LOCAL = {"0.0.0.0", "::", "::1", "localhost"}


@dataclass(frozen=True)
class Address:
    """A base URL, taken apart."""

    scheme: str  # "http" or "https"
    host: str
    port: int
    path: str  # what every route begins with, without a slash at its end

    @classmethod
    def parse(cls, url: str, name: str = "the URL") -> Address:
        """Reads "http://host:8000", "https://host/some/path/v1" or "host:8000". A URL without a
        path gets OpenAI's, /v1.

        Raises:
            ValueError: it is no such URL; the message begins with `name`.
        """
        must = "it must be http://HOST:PORT, https://HOST or either with a path as /v1"
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urllib.parse.urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{name} is {url!r}: {error}; {must}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{name} is {url!r}; {must}")
        if parts.username is not None:
            raise ValueError(f"{name} has a user in it; a key is given by --api-key")
        default = 443 if parts.scheme == "https" else 80
        path = urllib.parse.quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~") or "/v1"
        return cls(parts.scheme, parts.hostname, default if port is None else port, path)

    @property
    def url(self) -> str:
        """The base URL, with its path."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port, as the header `Host` has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"


def is_local(host: str) -> bool:
    """Whether a host's name is that of this machine, which no proxy reaches."""
    return host in _LOCAL or host.startswith("127.")
