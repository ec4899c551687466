"""/ui: the page on which people talk with the models. Its files are in serve/ui."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

PAGE = "/ui"
FOLDER = Path(__file__).resolve().parents[1] / "ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page loads its own files alone, talks with its own server alone, and is in no other's frame.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A browser asks each time whether a file has changed, so page and scripts are of one version.
    "cache-control": "no-cache",
}


def make_router() -> APIRouter:
    """The page and its files. They are read once; no path of a request reaches the disk."""
    router = APIRouter(include_in_schema=False)
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in _TYPES:
            route = PAGE if path.name == "index.html" else f"{PAGE}/{path.name}"
            router.add_api_route(route, _sender(path))
    return router


def make_home_router() -> APIRouter:
    """`/` leads to the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def home() -> Any:
        # Relative, for a server that stands below a path of another one.
        return RedirectResponse(PAGE.lstrip("/"), 307)

    return router


def _sender(path: Path) -> Any:
    data = path.read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag, "content-type": _TYPES[path.suffix]}

    async def send_file(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if etag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers)

    return send_file
