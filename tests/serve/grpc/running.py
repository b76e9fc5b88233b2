"""A real gRPC server on free ports, over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from jaxinfer.lora.store import LoRAStore
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.auth import Authoriser
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.images import Images
from jaxinfer.serve.frontend.loras import LoRAs
from jaxinfer.serve.frontend.operations import Operations
from jaxinfer.serve.grpc.server import GrpcServers
from jaxinfer.serve.settings import ServeConfig
from tests.lora.fakes import parts_of, read_number
from tests.serve.fake_engine import FakeEngine, Mischief, fake_card, fake_template, fake_tokenizer
from tests.serve.fake_weights import FakeWeights, Operable
from tests.serve.vision import NEEDS, vision_card, vision_template, vision_tokenizer

WELL = Mischief()
DETAILS = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo)
}


@dataclasses.dataclass
class Progress:
    phase: str
    bytes_done: int = 0
    bytes_total: int = 0
    compilations_done: int = 0
    compilations_total: int = 0
    message: str = ""


class FakeSupervisor:
    """A supervisor whose state the test sets."""

    def __init__(self) -> None:
        self.state, self.restarts = "ready", 0
        self.events = [Progress("STARTING"), Progress("LOADING_WEIGHTS", 1, 2), Progress("READY")]
        self.profiles: list[str] = []
        self.operations: Operations | None = None

    async def watch_startup(self) -> AsyncIterator[Progress]:
        for event in self.events:
            yield event

    async def start_profile(self, steps: int) -> None:
        self.profiles.append(f"start {steps}")

    async def stop_profile(self) -> str:
        self.profiles.append("stop")
        return "profiles/1"


@dataclasses.dataclass(frozen=True)
class Someone:
    name: str


class Keys:
    """Authentication with a dict of tokens, each with a name and scopes; None: everything is allowed."""

    def __init__(self, keys: dict[str, tuple[str, str]] | None = None) -> None:
        self._keys = keys

    def authorise(
        self, token: str | None, scope: str, certificate: Callable[[], bytes | None] = lambda: None
    ) -> Someone:
        if self._keys is None:
            return Someone(Authoriser(None).authorise(token, scope, certificate).name)
        if token not in self._keys:
            raise ServeError(Kind.UNAUTHENTICATED, "no such key")
        name, scopes = self._keys[token]
        if scope not in scopes.split(","):
            raise ServeError(Kind.FORBIDDEN, f"the key has no scope {scope}")
        return Someone(name)

    def during(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclasses.dataclass
class Running:
    """A running server and its parts."""

    servers: GrpcServers
    frontend: Frontend
    engine: FakeEngine
    supervisor: FakeSupervisor
    channel: aio.Channel
    control_channel: aio.Channel

    @property
    def inference(self) -> Any:
        return InferenceStub(self.channel)

    @property
    def control(self) -> Any:
        return ControlStub(self.control_channel)

    async def baseline(self) -> None:
        """Wait until nothing runs and no page is held."""
        async with asyncio.timeout(5):
            while True:
                stats = await self.frontend.stats()
                assert stats.kv is not None
                if not (stats.running or sum(stats.waiting.values()) or stats.kv.held or self.frontend.active):
                    return
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(
    mischief: Mischief = WELL,
    *,
    keys: dict[str, tuple[str, str]] | None = None,
    target: Callable[[int], aio.Channel] | None = None,
    frontend: Callable[[Frontend], Callable[[], Frontend]] = lambda made: lambda: made,
    settings: dict[str, Any] | None = None,
    more: Callable[[Callable[[], Frontend]], list[Any]] = lambda frontend: [],
    loras: Callable[[AsyncEngine], LoRAs] | None = None,
    vision: Images | None = None,
    **config: Any,
) -> AsyncIterator[Running]:
    """Yield a server and a client.

    Args:
        keys: see `Keys`.
        target: makes the client's channel from the port.
        frontend: wraps or replaces the front end of the server.
        settings: settings of the engine.
        loras: makes the server's adapters, with folders written by `tests.lora.fakes.write_number`; None: LoRA is off.
        vision: what reads images, see `tests.serve.vision`; None: the model reads text only.
        config: fields of `ServeConfig`.
    """
    store = None if loras is None else LoRAStore(read_number, parts_of, 8)
    own = {"enable_lora": store is not None, "images": vision and NEEDS, **(settings or {})}
    engine = FakeEngine(mischief, loras=store, **own)
    chosen = ServeConfig(**{"model": "fake", "grpc_port": 0, "control_port": 0, "drain_seconds": 5.0, **config})
    async with contextlib.AsyncExitStack() as stack:
        served = AsyncEngine(engine, weights=FakeWeights(engine))
        served.start()
        stack.push_async_callback(served.stop, drain=False)
        card, adapters = fake_card(engine.config), loras and loras(served)
        if adapters is not None:
            await adapters.restore(served, card.name)
        texts = (fake_tokenizer(), fake_template()) if vision is None else (vision_tokenizer(), vision_template())
        card = card if vision is None else vision_card(engine.config)
        made = Frontend(served, card, *texts, chosen.limits, loras=adapters, images=vision)
        stack.push_async_callback(made.aclose)
        supervisor, root = FakeSupervisor(), chosen.weights_root
        supervisor.operations = Operations(Operable(served), root and pathlib.Path(root))
        given = frontend(made)
        servers = GrpcServers(chosen, given, supervisor, Keys(keys), more=more(given))
        await servers.start()
        stack.push_async_callback(servers.stop, 0)
        assert servers.control_port is not None
        channel = await stack.enter_async_context((target or plain)(servers.port))
        control = await stack.enter_async_context((target or plain)(servers.control_port))
        yield Running(servers, made, engine, supervisor, channel, control)


def plain(port: int) -> aio.Channel:
    """Return a channel with default options on its own connection."""
    return aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


def request(**fields: Any) -> pb.GenerateRequest:
    """Return a request for four tokens after "Hi", unless other fields are given."""
    sampling = pb.SamplingParams(**{"max_tokens": 4, "seed": 1, **fields.pop("sampling", {})})
    given = fields if fields.keys() & {"prompt", "token_ids", "chat"} else {"prompt": "Hi", **fields}
    return pb.GenerateRequest(sampling=sampling, **given)


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error status, with its details by type."""

    code: grpc.StatusCode
    message: str
    details: dict[str, Any]
    trailers: dict[str, Any]

    @property
    def violations(self) -> dict[str, str]:
        found = self.details.get("BadRequest")
        return {v.field: v.description for v in found.field_violations} if found else {}


async def failure(call: Any) -> Failure:
    """Return the failure of a call; streams are read to their end."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not aio.EOF:
                pass
        await call
    except TypeError:  # a stream is not awaitable
        pass
    except aio.AioRpcError as error:
        return failure_of(error)
    return Failure(grpc.StatusCode.OK, "", {}, {})


async def refusal(make: Callable[[], Any]) -> Failure:
    """Return the server's own error for a stream that may end before the request is written: gRPC's asyncio client then
    replaces the status by its own error (grpc/grpc#36066), and the call is repeated."""
    for _ in range(20):
        found = await failure(make())
        if found.message != "Internal error from Core":
            break
    return found


def failure_of(error: aio.AioRpcError) -> Failure:
    trailers = dict(error.trailing_metadata() or ())
    found = unpacked(status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b"")).details)
    return Failure(error.code(), error.details() or "", found, trailers)


def unpacked(details: Any) -> dict[str, Any]:
    found = {}
    for packed in details:
        kind = DETAILS[packed.TypeName()]
        found[kind.DESCRIPTOR.name] = kind.FromString(packed.value)
    return found


async def collected(call: Any) -> tuple[list[str], list[list[int]], pb.Finished]:
    """Return texts and tokens of all outputs of a Generate stream; check its first and last events."""
    events = [response async for response in call]
    assert events[0].WhichOneof("event") == "started"
    assert events[-1].WhichOneof("event") == "finished"
    assert len({event.request_id for event in events}) == 1
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    ended = set()
    for event in events[1:-1]:
        delta = event.delta
        assert delta.output_index not in ended
        texts[delta.output_index] = texts.get(delta.output_index, "") + delta.text
        tokens.setdefault(delta.output_index, []).extend(delta.token_ids)
        if delta.HasField("finish_reason"):
            ended.add(delta.output_index)
    assert ended == set(texts)
    return [texts[k] for k in sorted(texts)], [tokens[k] for k in sorted(tokens)], events[-1].finished
