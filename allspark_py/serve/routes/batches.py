"""/v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from allspark.serve.batches.service import Batches
from allspark.serve.batches.upload import receive_form
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.field_names import check_fields
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol import answers
from allspark.serve.protocol.answers import Batch, DeletedFile, File, Files
from allspark.serve.protocol.batches import BatchBody
from allspark.serve.routes.common import Json, described, ignored_header, in_order, page_of
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
                raise invalid_value(message, "purpose")
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
        purpose = request.query_params.get("purpose")
        found = [each for each in files.files if purpose in (None, each.purpose)]
        return _page(request, in_order(request, found), 10_000, 10_000)

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
        check_fields(body, settings, ("output_expires_after",))
        return Json(batches.create(body).to_json(), headers=ignored_header(body))

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


def _page(request: Request, items: Sequence[_Listed], default: int, most: int) -> Json:
    """The part of a list that a request's `after` and `limit` name."""
    page, has_more = page_of(request, items, lambda item: item.id, default, most)
    return Json(
        {
            "object": "list",
            "data": [item.to_json() for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": has_more,
        }
    )
