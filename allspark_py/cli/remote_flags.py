"""The flags about a server of OpenAI's protocol, which several commands have."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field

from allspark.remote.address import Address
from allspark.remote.blocking import BlockingClient
from allspark.remote.models import authorization, first_model

_KEY = "ALLSPARK_API_KEY"


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them; `to_remote` reads them."""
    parser.add_argument("--api-key", metavar="KEY", help=f"a key of the server; also in {_KEY}")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")


@dataclass(frozen=True)
class Remote:
    """A server, and the model that is asked for."""

    address: Address
    model: str
    headers: dict[str, str] = field(repr=False)  # with the key

    def client(self) -> BlockingClient:
        """A client of it."""
        return BlockingClient(self.address.url, self.headers)


def to_remote(url: str, options: argparse.Namespace) -> Remote:
    """The server at a URL, with the flags.

    Raises:
        ValueError: the URL or the key is none.
        ConnectionError, RemoteError: no model is named, and the server does not list one.
    """
    address = Address.parse(url)
    headers = authorization(options.api_key or os.environ.get(_KEY) or None)
    model = options.model or first_model(BlockingClient(address.url, headers))
    return Remote(address, model, headers)
