"""OpenAPI page at /docs: Swagger UI, with all files served by this server."""

from __future__ import annotations

import importlib.resources
import pathlib
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

FILES: Mapping[str, str] = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
"""Static files of the page and their media types."""

# The browser blocks resources from other origins.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)


def add_page(app: FastAPI) -> None:
    """Serve the page at /docs and its static files below that path."""
    app.add_api_route("/docs", _page, include_in_schema=False)
    app.add_api_route("/docs/{file}", _file, include_in_schema=False)


async def _page(request: Request) -> Response:
    """Return the Swagger UI page. URLs are relative because a proxy may serve the API under a path prefix."""
    answer = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
    )
    answer.headers["content-security-policy"] = _POLICY
    return answer


async def _file(request: Request) -> Response:
    name = request.path_params["file"]
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(_folder() / name, media_type=FILES[name])


def _folder() -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("fastapi_swagger"))) / "resources"
