"""/v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from allspark.serve.batches.service import Batches
from allspark.serve.batches.upload import receive_form
from allspark.serve.errors import ApiError
from allspark.serve.field_names import check_fields
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol import answers
from allspark.serve.protocol.answers import Batch, DeletedFile, File, Files
from allspark.serve.protocol.batches import BatchBody
from allspark.serve.routes.common import Json, described, ignored_header
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request
from starlette.responses import FileResponse

_UPLOAD = {
    **described(None, File),
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}
_PAGE = {
    "limit": ("integer", "the most entries"),
    "after": ("string", "the id of the entry before the first"),
}
_FILES = {**_PAGE, "order": ("string", "desc or asc"), "purpose": ("string", "of the files")}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_CONTENT = {"responses": {"200": {"description": "the file", "content": _BYTES}}}


class _Listed(Protocol):
    @property
    def id(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


Item = TypeVar("Item", bound=_Listed)


def make_router(state: ServerState, batches: Batches) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["batches"])
    settings, files = state.settings, batches.files

    @router.post("/v1/files", openapi_extra=_UPLOAD)
    async def upload(request: Request) -> Any:
        """Keeps a file of requests, for a batch."""
        new = files.begin_upload()
        try:
            form = await receive_form(request, new, settings.max_file_bytes)
            purpose = form.fields.pop("purpose", None)
            if purpose != "batch":
                message = "purpose is missing" if purpose is None else f"purpose is {purpose!r}"
                message += "; it must be 'batch'"
                raise ApiError(400, message, param="purpose", code="invalid_value")
            for name in form.fields:
                if name.startswith("expires_after"):
                    message = "expires_after is not served: files stay until they are deleted"
                    raise ApiError(400, message, param=name, code="unsupported_feature")
            record = new.commit(form.filename or "upload", purpose)
        finally:
            new.discard()
        return Json(record.to_json())

    @router.get("/v1/files", openapi_extra=described(None, Files, query=_FILES))
    async def list_files(request: Request) -> Any:
        """The files, the newest first."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            message = f"order is {order[:100]!r}; it must be 'asc' or 'desc'"
            raise ApiError(400, message, param="order", code="invalid_value")
        purpose = query.get("purpose")
        found = [each for each in files.files if purpose in (None, each.purpose)]
        return _page(request, found if order == "asc" else found[::-1], 10_000, 10_000)

    @router.get("/v1/files/{file_id}", openapi_extra=described(None, File))
    async def file(file_id: str) -> Any:
        """What is known of a file."""
        return Json(files.get(file_id).to_json())

    @router.get("/v1/files/{file_id}/content", openapi_extra=_CONTENT)
    async def content(file_id: str) -> Any:
        """The content of a file."""
        record = files.get(file_id)
        path = files.path_of(file_id)
        return FileResponse(
            path, media_type="application/octet-stream", filename=record.filename
        )

    @router.delete("/v1/files/{file_id}", openapi_extra=described(None, DeletedFile))
    async def delete_file(file_id: str) -> Any:
        """Removes a file that no batch reads."""
        batches.delete_file(file_id)
        return Json({"id": file_id, "object": "file", "deleted": True})

    @router.post("/v1/batches", openapi_extra=described(BatchBody, Batch))
    async def create(request: Request) -> Any:
        """Begins to answer the requests of a file."""
        body = validate(BatchBody, await read_json(request, settings.max_body_bytes))
        headers = ignored_header(check_fields(body, settings, ("output_expires_after",)))
        return Json(batches.create(body).to_json(), headers=headers)

    @router.get("/v1/batches", openapi_extra=described(None, answers.Batches, query=_PAGE))
    async def list_batches(request: Request) -> Any:
        """The batches, the newest first."""
        return _page(request, batches.records[::-1], 20, 100)

    @router.get("/v1/batches/{batch_id}", openapi_extra=described(None, Batch))
    async def batch(batch_id: str) -> Any:
        """A batch: its status, what is done, and its files."""
        return Json(batches.get(batch_id).to_json())

    @router.post("/v1/batches/{batch_id}/cancel", openapi_extra=described(None, Batch))
    async def cancel(batch_id: str) -> Any:
        """Ends a batch; answers that are there stay."""
        return Json(batches.cancel(batch_id).to_json())

    return router


def _page(request: Request, items: Sequence[Item], default: int, most: int) -> Json:
    """The part of a list that a request's `after` and `limit` name."""
    query = request.query_params
    given = query.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        message = f"limit is {given[:100]!r}; it must be an integer in [1, {most}]"
        raise ApiError(400, message, param="limit", code="invalid_value")
    begin = 0
    if (after := query.get("after")) is not None:
        places = [index for index, item in enumerate(items) if item.id == after]
        if not places:
            message = f"after is {after[:100]!r}; there is no such entry"
            raise ApiError(400, message, param="after", code="invalid_value")
        begin = places[0] + 1
    page = items[begin : begin + int(given)]
    return Json(
        {
            "object": "list",
            "data": [item.to_json() for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": begin + len(page) < len(items),
        }
    )
