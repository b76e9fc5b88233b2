"""vLLM's routes for operators that are no adapter's."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serve.errors import Kind, ServeError

_UNSERVED = ("reset_running_requests", "reset_external")
"""vLLM's parameters of its reset: to stop what runs, and to empty caches elsewhere. Their default is served."""


async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached page, and answer with how many there were."""
    for name, value in request.query_params.items():
        if name not in _UNSERVED or value.lower() not in ("false", "0"):
            raise ServeError(Kind.INVALID, f"{name}={value[:100]!r} is not served", name)
    pages = await request.app.state.door.serving().flush_prefix_cache()
    return Response(json.dumps({"pages": pages}), media_type="application/json")
