"""Endpoint ``/v1/models``, and vLLM's routes to load and unload LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxinfer.lora.store import LoadedLoRA
from jaxinfer.serve.api.json_bodies import read_json
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.loras import LoRAs, required
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.fields import Body, checked


class LoadLoRARequest(Body):
    """Load a LoRA adapter from a folder below ``lora_root`` (``POST /v1/load_lora_adapter``). For operators."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (None, False)}

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoRARequest(Body):
    """Unload a LoRA adapter (``POST /v1/unload_lora_adapter``); running requests finish with it. For operators."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"lora_int_id": (None,)}

    lora_name: str


async def list_models(request: Request) -> Response:
    """Return the model and the LoRA adapters that requests may name instead."""
    frontend = _door(request).serving()
    adapters = frontend.loras.list() if frontend.loras is not None else []
    found = [_model_json(frontend.card), *(_adapter_json(frontend.card, each) for each in adapters)]
    return _json({"object": "list", "data": found})


async def describe_model(request: Request) -> Response:
    """Return the model or one adapter."""
    frontend, name = _door(request).serving(), request.path_params["model"]
    frontend.check_model(name)
    return _json(_model_json(frontend.card) if name == frontend.card.name else _adapter_named(frontend, name))


async def load_lora(request: Request) -> Response:
    """Load an adapter; replace an adapter of the same name only if ``load_inplace`` is set."""
    body, loras = await _asked(request, LoadLoRARequest)
    await loras.load(body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora(request: Request) -> Response:
    """Unload an adapter, so that new requests can no longer name it."""
    body, loras = await _asked(request, UnloadLoRARequest)
    await loras.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _asked[B: Body](request: Request, kind: type[B]) -> tuple[B, LoRAs]:
    door = _door(request)
    body = checked(kind, await read_json(request, door.limits, door.long.read))
    return body, required(door.serving().loras)


def _adapter_named(frontend: Frontend, name: str) -> dict[str, Any]:
    loras = required(frontend.loras)
    return next(_adapter_json(frontend.card, each) for each in loras.list() if each.name == name)


def _model_json(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "jaxinfer",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def _adapter_json(card: ModelCard, adapter: LoadedLoRA) -> dict[str, Any]:
    """Return an adapter in vLLM's format: its root is its folder, its parent the model."""
    return _model_json(card) | {"id": adapter.name, "root": adapter.path, "parent": card.name}


def _door(request: Request) -> AppState:
    return request.app.state.door


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")
