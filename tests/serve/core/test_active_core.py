"""Tests of LoRA adapters in the current core: loaded over the link, and into each new core before it is ready."""

import asyncio
import contextlib
import pathlib
import signal

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.lora.store import LoRAError
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.core.supervisor import Supervisor
from jaxinfer.serve.frontend.loras import LoRAs
from jaxinfer.types import LoRARef
from tests.lora.fakes import write_number
from tests.serve.core.fake_core import command, make_config
from tests.serve.core.test_core import BOUND, QUICK, collect, make_request, process_of, ready, run, tokens, until

LORAS = EngineConfig(enable_lora=True, max_loras=2)


@contextlib.asynccontextmanager
async def adapted(root: pathlib.Path, *modules: str):
    """Yield a supervisor, which may not be ready, and the adapters of its cores."""
    made: list[LoRAs] = []

    async def prepare(link, card, get_on) -> None:
        await made[0].restore(link, card.name, get_on)

    supervisor = Supervisor(make_config(engine=LORAS), command(), QUICK, prepare)
    made.append(LoRAs(supervisor.backend, modules, root))
    await supervisor.start()
    try:
        yield supervisor, made[0]
    finally:
        await supervisor.stop()


async def serves(supervisor: Supervisor, ref: LoRARef) -> None:
    request = make_request(f"with {ref}", lora=ref)
    assert (await collect(supervisor.backend, request))[0][0] == tokens(request)


async def killed(supervisor: Supervisor) -> None:
    """Kill the core; return when the next one is ready."""
    before = supervisor.restarts
    process_of(supervisor).send_signal(signal.SIGKILL)
    await until(lambda: supervisor.restarts > before and supervisor.state == "ready")


def test_adapters_cross_to_the_core(tmp_path):
    async def main():
        async with adapted(tmp_path) as (supervisor, _):
            await asyncio.wait_for(supervisor.until_ready(), BOUND)
            core = supervisor.backend
            folder = str(write_number(tmp_path / "one", 10))
            loaded = await core.load_lora("a", folder)
            assert loaded == ("a", folder, "a", 1)
            await serves(supervisor, LoRARef("a", "a"))
            core.unload_lora("a")
            core.unload_lora("nobody")
            await serves(supervisor, LoRARef("a", "a"))  # not released yet
            core.release_lora(LoRARef("nobody", "b"))
            write_number(tmp_path / "two", 2)
            await core.load_lora("b", str(tmp_path / "two"))
            await core.load_lora("c", str(write_number(tmp_path / "three", 3)))
            await serves(supervisor, LoRARef("b", "2"))
            await serves(supervisor, LoRARef("c", "3"))  # now adapter a has left its slot
            for _ in range(2):
                core.release_lora(LoRARef("a", "a"))
            with pytest.raises(RequestError, match="lora='a' was unloaded or replaced"):
                await serves(supervisor, LoRARef("a", "a"))
            with pytest.raises(LoRAError, match=r"adapter 'd': .*nowhere"):
                await core.load_lora("d", str(tmp_path / "nowhere"))
            await supervisor.backend._link().check()

    run(main())


def test_a_core_without_adapters_says_so(tmp_path):
    async def main():
        async with ready() as supervisor:
            with pytest.raises(LoRAError, match="serves no adapters"):
                await supervisor.backend.load_lora("a", "/x")
            supervisor.backend.unload_lora("a")
            supervisor.backend.release_lora(LoRARef("a", "a"))
            assert supervisor.state == "ready"

    run(main())


def test_the_next_core_has_all_of_them_before_it_is_ready(tmp_path):
    async def main():
        module = write_number(tmp_path / "module", 1)
        async with adapted(tmp_path, f"module={module}") as (supervisor, loras):
            await asyncio.wait_for(supervisor.until_ready(), BOUND)
            write_number(tmp_path / "one", 2)
            await loras.load("one", "one")
            write_number(tmp_path / "one", 3)
            await killed(supervisor)
            assert [each.identity for each in loras.list()] == ["1", "3"]
            for name in ("module", "one"):
                await serves(supervisor, loras.resolve(name))
            (module / "adapter_config.json").unlink()
            await killed(supervisor)
            assert [each.name for each in loras.list()] == ["one"]
            assert supervisor.failure is None

    run(main())


def test_the_first_core_must_have_all_modules(tmp_path):
    async def main():
        async with adapted(tmp_path, f"module={tmp_path / 'nowhere'}") as (supervisor, _):
            with pytest.raises(EngineDeadError, match=r"adapter 'module': .*nowhere"):
                await asyncio.wait_for(supervisor.until_ready(), BOUND)
            assert "adapter 'module'" in await asyncio.wait_for(supervisor.until_stopped(), BOUND)
            assert (supervisor.state, supervisor.restarts) == ("stopped", 0)

    run(main())


def test_a_core_that_ends_while_it_is_prepared_is_started_again(tmp_path):
    async def main():
        write_number(tmp_path / "one", 1)
        async with adapted(tmp_path, f"one={tmp_path / 'one'}") as (supervisor, loras):
            load, ended = loras._load_modules, []

            async def ending(backend, get_on) -> None:
                if not ended:
                    ended.append(process_of(supervisor))
                    ended[0].send_signal(signal.SIGKILL)
                    await ended[0].wait()
                await load(backend, get_on)

            loras._load_modules = ending
            await asyncio.wait_for(supervisor.until_ready(), BOUND)
            assert supervisor.restarts == 1
            await serves(supervisor, loras.resolve("one"))

    run(main())


def test_while_there_is_no_core_names_go_and_none_come(tmp_path):
    async def main():
        for content, name in enumerate(("one", "two"), 1):
            write_number(tmp_path / name, content)
        async with adapted(tmp_path) as (supervisor, loras):
            await asyncio.wait_for(supervisor.until_ready(), BOUND)
            for name in ("one", "two"):
                await loras.load(name, name)
            process_of(supervisor).send_signal(signal.SIGKILL)
            await until(lambda: supervisor.state != "ready")
            with pytest.raises(ServeError) as refusal:
                await loras.load("three", "one")
            assert refusal.value.kind is Kind.UNAVAILABLE
            await loras.unload("one")
            await until(lambda: supervisor.state == "ready")
            assert [each.name for each in loras.list()] == ["two"]
            with pytest.raises(RequestError, match="unloaded or replaced"):
                await serves(supervisor, LoRARef("one", "1"))

    run(main())
