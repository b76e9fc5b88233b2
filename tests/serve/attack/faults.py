"""Fault injection for a server. Each fault undoes itself after a random time; several may overlap."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
from collections.abc import Awaitable, Callable

from tests.serve import fuzz
from tests.serve.attack.victim import STEP_TIMEOUT, Victim
from tests.serve.crowd import BreakingProxy
from tests.serve.doors import Doors

_IDLE_CONNECTIONS = 200
_MALFORMED = 60


class Faults:
    """All kinds of faults.

    Args:
        proxies: proxies between some of the clients and the API servers.
        client: client for malformed requests.

    Attributes:
        kinds: relative frequency of each kind.
    """

    def __init__(
        self, victim: Victim, proxies: tuple[BreakingProxy, ...], client: Doors, chance: random.Random
    ) -> None:
        self._victim, self._proxies, self._client, self._chance = victim, proxies, client, chance
        self._server = asyncio.Lock()  # exclusive access for faults that end or stop the server
        self._disk = asyncio.Lock()
        self.kinds: dict[Callable[[], Awaitable[None]], float] = {
            self.core_killed: 3,
            self.core_stopped: 3,
            self.server_stopped: 2,
            self.server_killed: 0.7,
            self.server_drained: 0.7,
            self.descriptors_lost: 3,
            self.connections_reset: 4,
            self.idle_connections: 2,
            self.malformed_requests: 2,
            self.busy_processor: 2,
        }
        if victim.disk.is_small:
            self.kinds |= {self.disk_full: 3, self.disk_frozen: 3}

    async def one(self) -> str:
        """Inject a random fault; return its name after it is undone."""
        fault = self._chance.choices([*self.kinds], [*self.kinds.values()])[0]
        await fault()
        return fault.__name__

    # ---- processes

    async def core_killed(self) -> None:
        self._signal_core(signal.SIGKILL)

    async def core_stopped(self) -> None:
        """Stop the core for a moment, or for longer than the watchdog allows."""
        async with self._server:  # the core of a server that was killed would not be resumed
            core = self._victim.process.core
            self._signal_core(signal.SIGSTOP)
            try:
                await self._some(0.05, 2 * STEP_TIMEOUT)
            finally:
                if core is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(core, signal.SIGCONT)

    async def server_stopped(self) -> None:
        async with self._server:
            self._victim.process.signal(signal.SIGSTOP)
            try:
                await self._some(0.05, 3.0)
            finally:
                self._victim.process.signal(signal.SIGCONT)

    async def server_killed(self) -> None:
        async with self._server, self._disk:  # a server that starts on a full disk reports it and exits, as it should
            self._victim.process.end()
            await self._victim.restart()

    async def server_drained(self) -> None:
        async with self._server, self._disk:
            await self._victim.drained()
            await self._victim.restart()

    async def busy_processor(self) -> None:
        hogs = [await asyncio.create_subprocess_exec("sh", "-c", "while :; do :; done") for _ in range(2)]
        try:
            await self._some(0.5, 2.0)
        finally:
            for hog in hogs:
                hog.kill()
                await hog.wait()

    # ---- disks

    async def disk_full(self) -> None:
        async with self._disk:
            try:
                await asyncio.to_thread(self._victim.disk.fill)
                await self._with_a_new_core()
                await self._some(0.3, 3.0)
            finally:
                self._victim.disk.drain()

    async def disk_frozen(self) -> None:
        async with self._disk:
            try:
                await asyncio.to_thread(self._victim.disk.freeze)
                await self._with_a_new_core()
                await self._some(0.3, 3.0)
            finally:
                await asyncio.to_thread(self._victim.disk.thaw)

    # ---- connections

    async def descriptors_lost(self) -> None:
        """Limit the server's file descriptors to the open ones and at most 30 more."""
        async with self._server:
            pid = self._victim.process.process.pid
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            most = self._victim.process.open_files() + self._chance.choice((0, 0, 3, 30))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, limits[1]))
            try:
                await self._with_a_new_core()
                await self._some(0.3, 3.0)
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    async def connections_reset(self) -> None:
        for _ in range(self._chance.randrange(1, 20)):
            self._chance.choice(self._proxies).break_one(self._chance)
            await asyncio.sleep(0.03)

    async def idle_connections(self) -> None:
        opened = list[socket.socket]()
        try:
            for _ in range(_IDLE_CONNECTIONS):
                opened.append(made := socket.socket())
                made.setblocking(False)
                port = self._chance.choice((self._victim.grpc_port, self._victim.http_port))
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(0.2):
                        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
            await self._some(0.1, 2.0)
        finally:
            for made in opened:
                made.close()

    async def malformed_requests(self) -> None:
        """Send malformed requests and ignore the responses, which other tests check."""
        for request in fuzz.requests(self._chance.randrange(1 << 30), _MALFORMED):
            with contextlib.suppress(OSError, TimeoutError):
                if isinstance(request, fuzz.RpcRequest):
                    await self._client.rpc(request.path, *request.messages, timeout=5.0)
                else:
                    await self._client.http(request.method, request.path, request.body, request.headers)

    # ----

    async def _with_a_new_core(self) -> None:
        """Kill the core in half of the cases, so that it has to restart during the fault."""
        if self._chance.random() < 0.5:
            self._signal_core(signal.SIGKILL)

    def _signal_core(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            if (core := self._victim.process.core) is not None:
                os.kill(core, number)

    async def _some(self, least: float, most: float) -> None:
        await asyncio.sleep(self._chance.uniform(least, most))
