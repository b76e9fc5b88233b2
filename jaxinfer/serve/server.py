"""Server: the gRPC and HTTP servers, the front end, and the supervisor of the engine core. No jax."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import pathlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence

from jaxinfer.config.images import ImageConfig
from jaxinfer.images.registry import source_of
from jaxinfer.serve.api.auth import Authoriser
from jaxinfer.serve.api.errors import unavailable
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.api.tenants import ALL, cache_scope
from jaxinfer.serve.core.link import CoreLink
from jaxinfer.serve.core.messages import StartupEvent
from jaxinfer.serve.core.supervisor import FAILED, READY, STARTING, STOPPED, Supervisor
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.images import Images
from jaxinfer.serve.frontend.loras import LoRAs
from jaxinfer.serve.frontend.operations import Operations
from jaxinfer.serve.frontend.parser_settings import model_parsers
from jaxinfer.serve.grpc import oip
from jaxinfer.serve.grpc.server import GrpcServers, Service
from jaxinfer.serve.grpc.vllm.service import Served, VllmEngine, service
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.server import HttpServer
from jaxinfer.serve.kv_events.door import KvEventsEndpoint
from jaxinfer.serve.runtime import descriptors
from jaxinfer.serve.runtime.background import Background
from jaxinfer.serve.runtime.fetch import FetchLimits, MediaFetcher
from jaxinfer.serve.settings import REASONING_FIELDS, ServeConfig, is_loopback
from jaxinfer.serve.telemetry.metrics import ServerMetrics
from jaxinfer.serve.telemetry.request_log import RequestLog
from jaxinfer.serve.telemetry.throughput import Throughput
from jaxinfer.serve.telemetry.tracing import Tracing
from jaxinfer.text.load import load_template, load_tokenizer
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.version import __version__

_CUT_SECONDS = 1.0
"""Seconds for streams that were cut to send their error to the clients."""

_log = logging.getLogger("jaxinfer.serve")


class Server:
    """The implementation of `jaxinfer serve`; must be used from one event loop.

    The ports are open from the start: until the engine is READY requests get UNAVAILABLE, and health reports it.

    Args:
        command: command line of an engine core (default: the real one).
        opened: called once, when the front end exists.

    Raises:
        ServeConfigError, KeysError: a file of keys or certificates cannot be used.

    Attributes:
        background: background tasks.
        frontend: front end; None until the engine is READY for the first time.
        kv_events: KV events of the engine.
        operations: what operators may change while it runs.
    """

    def __init__(
        self,
        config: ServeConfig,
        command: Sequence[str] | None = None,
        *,
        opened: Callable[[], None] | None = None,
    ) -> None:
        self.config = config = descriptors.within(config, descriptors.raise_limit())
        self._opened, self.background = opened, Background()
        self.frontend: Frontend | None = None
        replicas = config.engine.data_parallel_size * config.engine.dp_ranks
        self.kv_events = KvEventsEndpoint(config, replicas, lambda: self._supervisor.card.name)
        self._supervisor = Supervisor(config, command, prepare=self._prepare, kv_events=self.kv_events.take)
        self._loras = self._adapters()
        root = None if config.weights_root is None else pathlib.Path(config.weights_root)
        self.operations = Operations(self._supervisor, root)
        metrics = ServerMetrics(self)
        self._requests = RequestLog(config.log_requests)
        self._tracing = Tracing(config.otlp_endpoint, failed=metrics.failed, log=self._requests)
        self._authoriser = authoriser = Authoriser(config.api_keys)
        self._door = AppState(
            __version__,
            config.limits,
            authoriser,
            engine=lambda: self._supervisor.condition,
            metrics=metrics,
            requests=self._requests,
            reasoning_fields=REASONING_FIELDS[config.reasoning_field],
            operated=config.api_keys is not None or is_loopback(config.host),
            stream_ping_seconds=config.stream_ping_seconds,
            operations=self.operations,
            profiler=None if config.profile_dir is None else self,
        )
        self._grpc = GrpcServers(
            config,
            self._serving,
            self,
            authoriser,
            more=self._other_services(),
            observer=metrics.called,
            refused=self._requests.refused,
            cut=metrics.grpc_cut.inc,
            background=self.background,
        )
        http = functools.partial(HttpServer, config, self._door, background=self.background)
        self._http = http() if config.http_port is not None else None
        self._metrics = http(metrics=True) if config.metrics_port is not None else None
        self._throughput = Throughput()
        self._tasks: list[asyncio.Task[None]] = []

    def _other_services(self) -> list[Service]:
        """Return the services of third-party protocols."""
        found: list[Service] = [(oip.SERVICE, oip.OpenInference(self._serving, lambda: self.is_ready))]
        if self.config.vllm_grpc:
            served = Served(
                condition=lambda: self._door.condition,
                folder=lambda: pathlib.Path(self._supervisor.folder),
                model=self.config.model,
                profiler=self,
                profiling=self.config.profile_dir is not None,
                operated=self._door.operated,
                kv_events=self.kv_events.hub,
            )
            found.append((service(), VllmEngine(self._serving, served)))
        return found

    # ---- state

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    @property
    def control_port(self) -> int | None:
        return self._grpc.control_port

    @property
    def http_port(self) -> int | None:
        return None if self._http is None else self._http.port

    @property
    def metrics_port(self) -> int | None:
        return None if self._metrics is None else self._metrics.port

    @property
    def _https(self) -> list[HttpServer]:
        return [server for server in (self._http, self._metrics) if server is not None]

    @property
    def _doors(self) -> dict[str, int | None]:
        return {
            "gRPC": self.grpc_port,
            "HTTP": self.http_port,
            "metrics": self.metrics_port,
            "Control": self.control_port,
        }

    @property
    def _addresses(self) -> str:
        """Addresses of the endpoints, for the log."""
        config, http = self.config, "http" if self.config.tls_cert is None else "https"
        found = [f"gRPC at {_address(config.host, self.grpc_port)}"]
        if self.http_port is not None:
            url = f"{http}://{_address(config.host, self.http_port)}"
            found.append(f"the OpenAI API at {url}/v1, its page at {url}/docs")
        if self.metrics_port is not None:
            found.append(f"figures at {http}://{_address(config.metrics_host, self.metrics_port)}/metrics")
        if self.control_port is not None:
            found.append(f"Control at {_address(config.control_host, self.control_port)}")
        return "; ".join(found)

    @property
    def state(self) -> str:
        """State of the engine, see `Supervisor`; "starting" until the front end exists, too."""
        state = self._supervisor.state
        return STARTING if state == READY and self.frontend is None else state

    @property
    def is_ready(self) -> bool:
        """Whether a generation would be accepted."""
        open_ = self.frontend is not None and self.frontend.is_open
        return open_ and self.state == READY and not self.background.broken

    @property
    def active(self) -> int:
        """Generations in flight."""
        return 0 if self.frontend is None else self.frontend.active

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    def watch_startup(self) -> AsyncIterator[StartupEvent]:
        return self._supervisor.watch_startup()

    async def start_profile(self, steps: int) -> None:
        await self._supervisor.start_profile(steps)

    async def stop_profile(self) -> str:
        return await self._supervisor.stop_profile()

    # ---- lifecycle

    async def start(self) -> None:
        """Open the ports and begin to start the engine.

        Raises:
            ServeConfigError: a port is not available.
        """
        await self._open_doors()
        self.kv_events.start(self.background)
        self._supervisor.subscribe(self._log_state)
        self._supervisor.subscribe(self.kv_events.changed)
        await self._supervisor.start()
        self._tasks = [asyncio.create_task(self._open()), asyncio.create_task(self._report())]
        self._tasks.append(self.background.start("api_keys", self._authoriser.run))
        self._tasks.append(self.background.start("throughput", lambda: self._throughput.run(lambda: self.frontend)))

    async def _open_doors(self) -> None:
        await self._grpc.start()
        for server in self._https:
            await server.start()
        for door, port in self._doors.items():
            if port is not None:
                _log.info("%s listens on port %d", door, port)

    def reload(self) -> None:
        """Reload API keys and certificates if their files have changed. Only calls of revoked keys are ended."""
        self._authoriser.look()
        for server in self._https:
            server.reload()
        _log.info("API keys and certificates were looked at again; other settings need another start")

    async def until_ready(self) -> None:
        """Wait until the front end accepts requests.

        Raises:
            EngineDeadError: the server was stopped before, or its start failed permanently; the message has the reason.
            TokenizerError, TemplateError, ServeConfigError: files of the model cannot be used.
        """
        await asyncio.shield(self._tasks[0])

    async def until_failed(self) -> str:
        """Wait for a failure that no restart fixes (an invalid model or setting) and return its message."""
        opening, ended = self._tasks[0], asyncio.create_task(self._supervisor.until_stopped())
        await asyncio.wait({opening, ended}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done() and (error := opening.exception()) is not None:
            return str(error)
        return await ended or "the engine was stopped"

    async def drain(self) -> int:
        """Withdraw readiness, accept requests for ``drain_delay`` more seconds, then reject new ones and give the
        others ``drain_seconds``; return the number of requests that were ended after that."""
        if self.frontend is None:
            return 0
        if self.config.drain_delay:
            _log.info("not ready any more: requests are taken for %g s", self.config.drain_delay)
            await self.frontend.leave(self.config.drain_delay)
        _log.info("draining: %d requests run", self.frontend.active)
        return await self.frontend.drain(self.config.drain_seconds)

    async def stop(self) -> None:
        """End the running requests and close the ports."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.frontend is not None:
            await self.frontend.drain(0.0)
        await asyncio.gather(self._grpc.stop(_CUT_SECONDS), *(server.stop(_CUT_SECONDS) for server in self._https))
        await self._supervisor.stop()
        if self.frontend is not None:
            await self.frontend.aclose()
        await self.kv_events.stop()
        self._door.long.close()
        await asyncio.to_thread(self._tracing.close)

    # ---- the front end

    def _serving(self) -> Frontend:
        if self.frontend is None:
            raise unavailable("the model is loading: try again later")
        return self.frontend

    async def _open(self) -> None:
        """Create the front end when the model is known. It is kept across engine restarts."""
        config, card = self.config, await self._supervisor.until_ready()
        folder = pathlib.Path(self._supervisor.folder)
        tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        if tokenizer is not None and self._parted:
            await asyncio.to_thread(tokenizer.forget)
        template = await asyncio.to_thread(load_template, folder, config.chat_template)
        frontend = Frontend(
            self._supervisor.backend,
            card,
            tokenizer,
            template,
            config.limits,
            allow_request_templates=config.allow_request_templates,
            template_seconds=config.template_seconds,
            tracing=self._tracing,
            scope=self._scope,
            weight=self._authoriser.weight,
            folder=folder,
            parsers=await asyncio.to_thread(model_parsers, config, folder, template, tokenizer),
            loras=self._loras,
            images=await asyncio.to_thread(self._images, folder, card, tokenizer),
        )
        await frontend.warm()
        if self._opened is not None:
            self._opened()
        self.frontend = self._door.frontend = frontend
        _log.info("ready: %s, %s, context of %d tokens", card.name, card.dtype, card.max_model_len)
        _log.info("serving %s", self._addresses)

    def _images(self, folder: pathlib.Path, card: ModelCard, tokenizer: Tokenizer | None) -> Images | None:
        """Return what reads the images of requests; None: the model reads text only.

        Raises:
            ValueError: a file of the processor is invalid.
        """
        if not card.image_processor or tokenizer is None:
            return None
        limits, rows = self.config.limits, card.engine["encoder_sizes"][-1]
        source = source_of(folder, card.image_processor)
        source = dataclasses.replace(source, rows=rows, tokens=card.max_model_len)
        domains, bounds = self.config.allowed_media_domains, FetchLimits(bytes=limits.image_bytes)
        media = MediaFetcher(domains, bounds) if domains else None
        most = ImageConfig(limit_mm_per_prompt=card.engine.get("limit_mm_per_prompt", ())).mm_limits
        return Images(source, limits, tokenizer.token_to_id, most, card.max_model_len, media)

    def _adapters(self) -> LoRAs | None:
        config = self.config
        if not config.engine.enable_lora:
            return None
        root = None if config.lora_root is None else pathlib.Path(config.lora_root)
        return LoRAs(self._supervisor.backend, config.lora_modules, root)

    async def _prepare(self, link: CoreLink, card: ModelCard, get_on: Callable[[], None]) -> None:
        if self._loras is not None:
            await self._loras.restore(link, card.name, get_on)
        await self.operations.restore(link)

    @property
    def _parted(self) -> bool:
        """Whether there are separate tenants, which must not learn of each other's requests."""
        config = self.config
        return config.prefix_cache_sharing != ALL and (config.api_keys or config.tls_client_ca) is not None

    def _scope(self, tenant: str) -> str:
        """Return the cache scope of the tenants that share cached prefixes with ``tenant``; "" without tenants."""
        if not self._parted:
            return ""
        return cache_scope(tenant, self._authoriser.cache_group(tenant))

    # ---- logging

    def _log_state(self, state: str) -> None:
        if self.frontend is not None:
            _log.log(logging.INFO if state in (READY, STOPPED) else logging.WARNING, "the engine is %s", state)

    async def _report(self) -> None:
        """Log the phases of the first start."""
        last = ""
        async for event in self._supervisor.watch_startup():
            if event.phase not in (last, STARTING, READY, FAILED):
                _log.info("%s", event.phase.replace("_", " "))
            last = event.phase


def _address(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
