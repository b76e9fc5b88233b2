"""Ray Serve application of `jaxinfer serve` replicas: ``serve run jaxinfer.integrations.ray:app model=demo``.

Ray's proxies serve HTTP and gRPC; each replica has a front end and one engine in separate processes. An engine over
several processes uses a bundle of the replica's placement group for each. See docs/ray.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import ray
from google.protobuf.message import Message
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from jaxinfer.integrations.embedded import EmbeddedServer
from jaxinfer.integrations.replicas.calls import STRANGER, Calls, Encoded
from jaxinfer.integrations.replicas.health import Patience
from jaxinfer.integrations.replicas.scaling import RUNNING, WAITING
from jaxinfer.integrations.replicas.settings import deployment_options, parse
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.core.worker_node import Follower
from jaxinfer.serve.frontend.preflight import check_early
from jaxinfer.serve.http.errors import error_body
from jaxinfer.serve.runtime import logs
from jaxinfer.serve.settings import ServeConfig, is_loopback

_KEY_BYTES = 32
_ID = b"x-request-id"


def build_app(settings: Mapping[str, Any], command: Sequence[str] | None = None) -> serve.Application:
    """Build the application without starting it.

    Args:
        settings: see `jaxinfer.integrations.replicas.settings.parse`.
        command: command that starts an engine core (default: the real one).

    Raises:
        ServeConfigError: an invalid setting. The message names it and its value.
    """
    config, replicas = parse(settings)
    made = serve.deployment(**deployment_options(config, replicas))(serve.ingress()(Replica))
    return made.bind(config, command, replicas.num_cpus, replicas.num_gpus)


def app(settings: dict[str, Any]) -> serve.Application:
    """Build the application for ``serve run`` and ``import_path``, which pass one mapping; see `build_app`."""
    return build_app(settings)


class Replica:
    """A replica: the front end in this process, and the supervisor of its engine.

    The constructor returns when the engine is ready, so that Ray sends no requests before.

    Raises:
        ServeConfigError, KeysError: an invalid setting, before anything is started.
        RuntimeError: the start cannot succeed; the message gives the reason.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, config: ServeConfig, command: Sequence[str] | None, num_cpus: float, num_gpus: float
    ) -> None:
        logs.configure(config.log_format, config.log_level)
        check_early(config)
        self._group = None if config.num_processes == 1 else Group(config, command, num_cpus, num_gpus)
        self._config = config if self._group is None else self._group.config
        self._patience = Patience(config.startup_timeout)
        self._guarded = config.api_keys is not None or config.insecure
        self._server = server = EmbeddedServer(self._config, command)
        self._calls = Calls(server.rpcs(), config.limits.message_bytes, guarded=self._guarded)
        await server.start()
        self._failed = asyncio.create_task(self._until_failed())
        await self._until_ready()

    async def _until_ready(self) -> None:
        ready = asyncio.create_task(self._server.until_ready())
        await asyncio.wait({ready, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() or ready.exception() is not None:
            reason = await self._failed
            ready.cancel()
            await self._stop()
            raise RuntimeError(reason)

    async def _until_failed(self) -> str:
        """Wait until a process of the group fails for good, i.e. no restart fixes it; return the message."""
        waiting = {asyncio.ensure_future(self._server.until_failed())}
        if self._group is not None:
            waiting.add(asyncio.ensure_future(self._group.until_failed()))
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        return done.pop().result()

    async def _stop(self) -> None:
        self._failed.cancel()
        await self._server.stop()
        if self._group is not None:
            await self._group.stop()

    # ---- methods called by Ray

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Door(self._server.app(), guarded=self._guarded)

    async def check_health(self) -> None:
        """Raise `UnhealthyError` if the replica should be replaced."""
        failure = self._failed.result() if self._failed.done() else None
        self._patience.look(self._server.state, failure)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `jaxinfer.integrations.replicas.scaling.QueueLength`."""
        try:
            stats = await self._server.stats()
        except ServeError:  # the engine does not run: no load
            return {RUNNING: 0.0, WAITING: 0.0}
        return {RUNNING: float(stats.running), WAITING: float(sum(stats.waiting.values()))}

    async def __del__(self) -> None:
        """Stop the replica. Ray calls it when running requests have ended, or after the shutdown timeout."""
        with contextlib.suppress(AttributeError):  # the start was rejected
            await self._stop()

    # ---- jaxinfer.v1.Inference: Ray finds a method by the RPC's name

    async def Generate(  # noqa: N802
        self, request: Message, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Encoded]:
        return self._calls.streamed("Generate", request, grpc_context)

    async def GenerateBatch(  # noqa: N802
        self, requests: AsyncIterator[Message], grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Encoded]:
        return self._calls.streamed("GenerateBatch", requests, grpc_context)

    async def Tokenize(self, request: Message, grpc_context: RayServegRPCContext) -> Encoded:  # noqa: N802
        return await self._calls.single("Tokenize", request, grpc_context)

    async def Detokenize(self, request: Message, grpc_context: RayServegRPCContext) -> Encoded:  # noqa: N802
        return await self._calls.single("Detokenize", request, grpc_context)

    async def Score(self, request: Message, grpc_context: RayServegRPCContext) -> Encoded:  # noqa: N802
        return await self._calls.single("Score", request, grpc_context)

    async def GetModelInfo(self, request: Message, grpc_context: RayServegRPCContext) -> Encoded:  # noqa: N802
        return await self._calls.single("GetModelInfo", request, grpc_context)


class Door:
    """ASGI wrapper around the application of a replica. It removes Ray's route prefix from the path, and the
    application's request id header, because Ray's proxy adds its own.

    Args:
        guarded: whether callers from other machines are accepted, because they need keys or the network is trusted.
    """

    def __init__(self, inner: ASGIApp, *, guarded: bool) -> None:
        self._inner, self._guarded = inner, guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def answer(message: Event) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != _ID]
            await send(message)

        if self._guarded or is_loopback((scope.get("client") or [""])[0]):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            await self._inner({**scope, "path": path, "root_path": ""}, receive, answer)
        else:
            body = json.dumps(error_body(ServeError(Kind.FORBIDDEN, STRANGER)))
            await Response(body, 403, media_type="application/json")(scope, receive, answer)


# ---- replicas of several processes


class Group:
    """The other processes of a replica's engine: one in each further bundle of its placement group.

    Attributes:
        config: settings of process 0, which runs in the replica itself.
    """

    def __init__(self, config: ServeConfig, command: Sequence[str] | None, num_cpus: float, num_gpus: float) -> None:
        key = secrets.token_hex(_KEY_BYTES)
        shared = dataclasses.replace(config, coordinator_address=_free_address())
        self._folder = tempfile.TemporaryDirectory(prefix="jaxinfer-")
        self.config = with_key(shared, self._folder.name, key)
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0}
        self._members = [
            ray.remote(Member)
            .options(scheduling_strategy=_bundle(number), **options)
            .remote(dataclasses.replace(shared, process_id=number), key, command)
            for number in range(1, config.num_processes)
        ]
        self._lives = [member.live.remote() for member in self._members]

    async def until_failed(self) -> str:
        """Wait until a process has failed permanently; return the message."""
        lives = [asyncio.ensure_future(life) for life in self._lives]
        done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        number = lives.index(first := done.pop()) + 1
        return f"process {number}: {first.exception() or first.result()}"

    async def stop(self) -> None:
        """End the processes."""
        for member in self._members:
            ray.kill(member)
        self._folder.cleanup()


class Member:
    """A process of a group other than process 0, run in a Ray actor.

    Args:
        config: settings with the `process_id` of the process.
        key: secret of the group.
        command: command that starts an engine core (default: the real one).
    """

    def __init__(self, config: ServeConfig, key: str, command: Sequence[str] | None) -> None:
        logs.configure(config.log_format, config.log_level)
        check_early(config)
        self._folder = tempfile.TemporaryDirectory(prefix="jaxinfer-")
        self._follower = Follower(with_key(config, self._folder.name, key), command)

    async def live(self) -> str:
        """Follow process 0 until this process has failed permanently; return the message."""
        await self._follower.start()
        return await self._follower.until_failed()


def with_key(config: ServeConfig, folder: str, key: str) -> ServeConfig:
    """Return the settings with the group's key in a file, unless they already name a key file."""
    if config.group_key_file is not None:
        return config
    path = pathlib.Path(folder) / "key"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return dataclasses.replace(config, group_key_file=str(path))


def _free_address() -> str:
    """Return an address of this host with a port that is free now."""
    host = get_node_ip_address()
    with socket.create_server((host, 0)) as found:
        return f"{host}:{found.getsockname()[1]}"


def _bundle(number: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=number)
