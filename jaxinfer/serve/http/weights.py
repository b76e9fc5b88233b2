"""vLLM's routes for operators who change the engine while it serves: pauses, sleep, new weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serve.api.errors import Kind, ServeError, invalid, rename_fields
from jaxinfer.serve.core import operations
from jaxinfer.serve.core.operations import AnyOperation, WeightState
from jaxinfer.serve.frontend.operations import required
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.fields import Body
from jaxinfer.serve.http.operations import body_of

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class UpdateWeightsRequest(Body):
    """Serve new weights from a folder of safetensors below ``weights_root`` (``POST /update_weights``). For operators.

    ``version`` and ``weight_version`` are the same field.
    """

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"update_info": (None,)}

    path: str
    version: int | None = None
    weight_version: int | None = None
    mode: str | None = None


class StartUpdateRequest(Body):
    """Begin an update of several folders, one ``POST /update_weights`` each (``POST /start_weight_update``). For
    operators."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"is_checkpoint_format": (None, True)}


class FinishUpdateRequest(Body):
    """Serve the weights of a started update, as one version (``POST /finish_weight_update``). For operators."""

    version: int | None = None
    weight_version: int | None = None
    mode: str | None = None


class UpdateWeightVersionRequest(Body):
    """Number the served weights anew (``POST /update_weight_version``). For operators."""

    new_version: int | str


class WeightCheckerRequest(Body):
    """Digests of all parameters, or their comparison with a baseline (``POST /weight_checker``). For operators."""

    action: str = "checksum"
    baseline: dict[str, str] | None = None


async def pause(request: Request) -> Response:
    """Pause the engine; ``clear_cache=true`` drops the prefix cache, too."""
    asked = _query(request, "mode", "clear_cache")
    clear = _boolean("clear_cache", asked.get("clear_cache", "false"))
    mode: Any = asked.get("mode", "wait")
    state = await _run(request, operations.Pause(mode))
    if clear:
        await _door(request).serving().flush_prefix_cache()
    return _state(state)


async def resume(request: Request) -> Response:
    _query(request)
    return _state(await _run(request, operations.Resume()))


async def is_paused(request: Request) -> Response:
    _query(request)
    return _json({"is_paused": (await _run(request, operations.Look())).paused})


async def abort_requests(request: Request) -> Response:
    """Abort all requests and return their number."""
    _query(request)
    return _json({"aborted": (await _run(request, operations.AbortAll())).aborted})


async def sleep(request: Request) -> Response:
    """Free the memory of the KV cache and of the weights."""
    asked = _query(request, "level", "tags", "mode")
    level = asked.get("level", "1")
    if level not in ("1", "2"):
        raise invalid("level", level, "must be 1 or 2")
    mode: Any = asked.get("mode", "keep")
    return _state(await _run(request, operations.Sleep(int(level), _tags(request), mode)))


async def wake_up(request: Request) -> Response:
    """Take back the memory that sleep has freed."""
    _query(request, "tags")
    return _state(await _run(request, operations.WakeUp(_tags(request))))


async def is_sleeping(request: Request) -> Response:
    _query(request)
    state = await _run(request, operations.Look())
    return _json({"is_sleeping": bool(state.asleep), "asleep": list(state.asleep)})


async def update_weights(request: Request) -> Response:
    """Serve new weights and return their version, size and time."""
    body = await body_of(request, UpdateWeightsRequest)
    update = operations.UpdateWeights(body.path, _version(body), cast(Any, body.mode))
    return _updated(await _run(request, update))


async def start_weight_update(request: Request) -> Response:
    """Begin an update of several folders."""
    await body_of(request, StartUpdateRequest, optional=True)
    made = required(_door(request).operations)
    made.start_update()
    return _state(await made.run(operations.Look()))


async def finish_weight_update(request: Request) -> Response:
    """Serve the weights of all folders since the start, as `update_weights` does."""
    body = await body_of(request, FinishUpdateRequest, optional=True)
    made = required(_door(request).operations)
    return _updated(await made.finish_update(_version(body), cast(Any, body.mode)))


async def update_weight_version(request: Request) -> Response:
    """Change the version alone."""
    given = (await body_of(request, UpdateWeightVersionRequest)).new_version
    if isinstance(given, str) and not given.isdecimal():
        raise invalid("new_version", given, "must be an integer")
    with rename_fields({"version": "new_version"}):
        return _state(await _run(request, operations.SetVersion(int(given))))


async def weight_info(request: Request) -> Response:
    """Return the version of the weights; with ``checksums=true`` a digest of each parameter."""
    wanted = _boolean("checksums", _query(request, "checksums").get("checksums", "false"))
    state = await _run(request, operations.Look(wanted))
    return _json(_fields(state) | ({"checksums": dict(state.checksums)} if wanted else {}))


async def weight_checker(request: Request) -> Response:
    """Return a digest of each parameter ("checksum"), or the paths whose digest is not the given one ("compare")."""
    body = await body_of(request, WeightCheckerRequest)
    if body.action not in ("checksum", "compare"):
        raise invalid("action", body.action, "must be checksum or compare")
    if (body.baseline is None) == (body.action == "compare"):
        raise invalid("baseline", body.baseline, "belongs to the action compare")
    found = dict((await _run(request, operations.Look(checksums=True))).checksums)
    if body.baseline is None:
        return _json({"checksums": found})
    wrong = sorted(path for path in found.keys() | body.baseline.keys() if found.get(path) != body.baseline.get(path))
    return _json({"match": not wrong, "mismatches": wrong})


async def init_weight_transfer_engine(request: Request) -> Response:
    """Reject the transfer of weights from another process."""
    why = (
        "weights are not received from a trainer over NCCL: write them to a folder below weights_root, and name it in "
        "POST /update_weights"
    )
    raise ServeError(Kind.PRECONDITION, why)


async def _run(request: Request, operation: AnyOperation) -> WeightState:
    return await required(_door(request).operations).run(operation)


def _query(request: Request, *names: str) -> dict[str, str]:
    """Return the query's values; raise ServeError INVALID for another name."""
    for name, value in request.query_params.items():
        if name not in names:
            raise ServeError(Kind.INVALID, f"{name[:100]}={value[:100]!r} is not served", name[:100])
    return dict(request.query_params)


def _tags(request: Request) -> list[str]:
    given = [tag for value in request.query_params.getlist("tags") for tag in value.split(",")]
    return given or list(operations.TAGS)


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in _BOOLEANS:
        raise invalid(name, value, "must be true or false")
    return _BOOLEANS[value.lower()]


def _version(body: UpdateWeightsRequest | FinishUpdateRequest) -> int | None:
    if None not in (body.version, body.weight_version) and body.version != body.weight_version:
        raise invalid("weight_version", body.weight_version, f"is another one than version={body.version}")
    return body.version if body.weight_version is None else body.weight_version


def _updated(state: WeightState) -> Response:
    return _json(_fields(state) | {"bytes": state.bytes, "seconds": state.seconds})


def _fields(state: WeightState) -> dict[str, Any]:
    return {"weight_version": state.version, "is_paused": state.paused, "is_sleeping": bool(state.asleep)}


def _state(state: WeightState) -> Response:
    return _json(_fields(state))


def _door(request: Request) -> AppState:
    return request.app.state.door


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")
