"""APIClient: LMDeploy's client of the server, over the standard library alone."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from typing import Any

from allspark.remote.blocking import BlockingClient
from allspark.remote.errors import RemoteError
from allspark.remote.models import authorization


class APIClient:
    """Talks with a server. Answers of generators are the server's JSON as dicts; an error of the
    server is a dict whose `object` is "error", with `message` and the HTTP status as `code`.

    Args:
        api_server_url: http://HOST:PORT.
        api_key: a key of the server, if it asks for one.
        ssl_context: for https; None: the system's certificates.

    Raises:
        ValueError: the URL or the key cannot be one.
        ConnectionError: nothing answers there. RuntimeError: `available_models` or `encode` failed.
    """

    def __init__(
        self,
        api_server_url: str,
        api_key: str | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
    ):
        if not isinstance(api_server_url, str) or "://" not in api_server_url:
            raise ValueError(f"api_server_url is {api_server_url!r}; it must be http://HOST:PORT")
        self.api_server_url = api_server_url.rstrip("/")
        self.api_key = api_key
        self._client = BlockingClient(self.api_server_url, authorization(api_key), ssl_context)
        self.headers = self._client.headers
        self._models: list[str] | None = None
        # Ends the server that serve() started; None for any other.
        self._end: Callable[[], None] | None = None

    @property
    def available_models(self) -> list[str]:
        """The names of the models that are served; asked for once."""
        if self._models is None:
            self._models = self.get_model_list()
        return self._models

    def get_model_list(self) -> list[str]:
        """The names of the models that are served now."""
        answer = self._call("/v1/models")
        return [entry["id"] for entry in answer["data"]]

    def encode(
        self, input: str | list[str], do_preprocess: bool = False, add_bos: bool = True
    ) -> tuple[Any, Any]:
        """The token ids of a text or of each of a list, and how many they are."""
        body = {"input": input, "do_preprocess": do_preprocess, "add_bos": add_bos}
        answer = self._call("/v1/encode", body)
        return answer["input_ids"], answer["length"]

    def chat_completions_v1(
        self,
        model: str,
        messages: str | list[dict[str, Any]],
        temperature: float | None = 0.7,
        top_p: float | None = 1.0,
        n: int | None = 1,
        max_tokens: int | None = 512,
        stop: str | list[str] | None = None,
        stream: bool | None = False,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        user: str | None = None,
        repetition_penalty: float | None = 1.0,
        session_id: int | None = -1,
        ignore_eos: bool | None = False,
        skip_special_tokens: bool | None = True,
        **kwargs: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yields the answer, or with `stream` its chunks. Other keywords are fields of the
        request."""
        return self._items("/v1/chat/completions", _fields(locals()))

    def completions_v1(
        self,
        model: str,
        prompt: str | list[Any],
        suffix: str | None = None,
        temperature: float | None = 0.7,
        n: int | None = 1,
        max_tokens: int | None = 16,
        stream: bool | None = False,
        stop: str | list[str] | None = None,
        top_p: float | None = 1.0,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        user: str | None = None,
        repetition_penalty: float | None = 1.0,
        session_id: int | None = -1,
        ignore_eos: bool | None = False,
        skip_special_tokens: bool | None = True,
        **kwargs: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yields the answer, or with `stream` its chunks. Other keywords are fields of the
        request."""
        return self._items("/v1/completions", _fields(locals()))

    def chat_interactive_v1(
        self,
        prompt: str | list[dict[str, Any]],
        image_url: str | list[str] | None = None,
        session_id: int | None = -1,
        interactive_mode: bool | None = False,
        stream: bool | None = False,
        stop: str | list[str] | None = None,
        request_output_len: int | None = None,
        top_p: float | None = 0.8,
        top_k: int | None = 40,
        temperature: float | None = 0.8,
        repetition_penalty: float | None = 1.0,
        ignore_eos: bool | None = False,
        skip_special_tokens: bool | None = True,
        cancel: bool | None = False,
        adapter_name: str | None = None,
        **kwargs: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yields the answer of a turn, or with `stream` its pieces. With `interactive_mode` the
        server keeps the conversation under `session_id`; `cancel` ends the turn that runs. Other
        keywords are fields of the request."""
        return self._items("/v1/chat/interactive", _fields(locals()))

    def chat(
        self,
        prompt: str,
        session_id: int,
        request_output_len: int | None = 512,
        stream: bool = False,
        top_p: float = 0.8,
        top_k: int = 40,
        temperature: float = 0.8,
        repetition_penalty: float = 1.0,
        ignore_eos: bool = False,
    ) -> Iterator[tuple[str, int, str | None]]:
        """The next turn of a session that the server keeps: yields text, output tokens so far, and
        the finish reason.

        Raises:
            ValueError: session_id is -1. RuntimeError: the server refused the turn.
        """
        if session_id == -1:
            raise ValueError("session_id is -1; it must be another number")
        fields = {name: value for name, value in locals().items() if name != "self"}
        for item in self.chat_interactive_v1(interactive_mode=True, **fields):
            if "text" not in item:
                raise RuntimeError(f"/v1/chat/interactive: {_message(item)}")
            yield item["text"], item["tokens"], item["finish_reason"]

    def end_session(self, session_id: int) -> None:
        """Makes the server forget a session. Raises RuntimeError where it refuses."""
        for item in self.chat_interactive_v1(
            prompt="", session_id=session_id, request_output_len=0, interactive_mode=False
        ):
            if "text" not in item:
                raise RuntimeError(f"/v1/chat/interactive: {_message(item)}")

    def close(self) -> None:
        """Ends the server, if serve() started it for this client; a second call has no effect."""
        if self._end is not None:
            self._end()

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self._client.call(path, body)
        except RemoteError as error:
            raise RuntimeError(f"{path}: {error.status}: {error.message}") from None

    def _items(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            if body.get("stream"):
                yield from self._client.events(path, body)
            else:
                yield self._client.call(path, body)
        except RemoteError as error:
            yield {
                "object": "error",
                "message": error.message,
                "code": error.status,
                "error": error.error,
            }


def get_model_list(api_url: str, headers: dict[str, str] | None = None) -> list[str]:
    """The names of the models at http://HOST:PORT/v1/models."""
    client = APIClient(api_url.removesuffix("/v1/models"))
    client.headers.update(headers or {})
    return client.get_model_list()


def _fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """The body of a request: the arguments of a method that are not None."""
    given = {name: arguments[name] for name in arguments if name not in ("self", "kwargs")}
    given.update(arguments["kwargs"])
    return {name: value for name, value in given.items() if value is not None}


def _message(item: dict[str, Any]) -> str:
    """What an error says, of an answer or of a stream."""
    message: str = item["message"] if "message" in item else item["error"]["message"]
    return message
