"""Which model to ask for."""

from __future__ import annotations

from allspark.remote.blocking import BlockingClient
from allspark.remote.errors import RemoteError

# Seconds in which a server must say something of its models.
_WAIT_S = 30.0


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers that show a key."""
    if api_key is None:
        return {}
    if not (api_key and api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key must be printable ASCII, of one character at least")
    return {"Authorization": f"Bearer {api_key}"}


def first_model(client: BlockingClient) -> str:
    """The first model that a server lists.

    Raises:
        ConnectionError: nothing answers, or not in time. RemoteError: it lists none, or refuses to.
    """
    try:
        answer = client.call("/models", timeout=_WAIT_S)
        name = answer["data"][0]["id"]
    except RemoteError as error:
        raise RemoteError(
            f"{client.url}/models: {error.status}: {error.message} (is it the right URL? --model "
            "names a model where a server lists none)",
            error.status,
        ) from None
    except (KeyError, IndexError, TypeError):
        raise RemoteError(f"{client.url} lists no models; name one with --model", 200) from None
    return str(name)
