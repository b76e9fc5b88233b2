"""Operators' changes of a running engine, in the engine core's process. No jax."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.core import operations
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.core.operations import AnyOperation, WeightState

ReadWeights = Callable[..., Any]
"""Reads the weights of a folder, and of further ones, in any thread; raises RequestError if they cannot be served."""

_log = logging.getLogger("jaxinfer.serve.core")


async def operate(engine: AsyncEngine, operation: AnyOperation, read: ReadWeights | None = None) -> WeightState:
    """Run an operation and return the state of the engine after it. Raises RequestError if it is rejected."""
    found = dict[str, Any]()
    match operation:
        case operations.Pause(mode):
            await engine.pause(mode)
        case operations.Resume():
            await engine.resume()
        case operations.AbortAll():
            found = {"aborted": await engine.abort_all()}
        case operations.Sleep(level, tags, mode):
            await engine.sleep(level, tags, mode)
        case operations.WakeUp(tags):
            await engine.wake_up(tags)
        case operations.UpdateWeights():
            found = await _update(engine, operation, read)
        case operations.SetVersion(version):
            await engine.set_weight_version(version)
        case operations.Look(checksums):
            found = {"checksums": await engine.weight_checksums()} if checksums else {}
    return WeightState(version=engine.weight_version, paused=engine.is_paused, asleep=engine.asleep, **found)


async def _update(
    engine: AsyncEngine, update: operations.UpdateWeights, read: ReadWeights | None
) -> dict[str, float | int]:
    if read is None:
        raise RequestError("path", "is not read: the weights of this engine do not change while it serves")
    weights = functools.partial(read, update.path, *update.parts)
    made = await engine.update_weights(weights, version=update.version, mode=update.mode)
    _log.info("weights %d: %d bytes of %s, placed in %.3f s", made.version, made.bytes, update.path, made.seconds)
    return {"bytes": made.bytes, "seconds": made.seconds}
