"""Tests of adapter names of a server, over engines without a device."""

import asyncio
import contextlib
import logging
import pathlib
from collections.abc import AsyncIterator

import pytest

from jaxinfer.lora.store import LoRAError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.core.backend import LoRABackend
from jaxinfer.serve.core.link import CoreLink
from jaxinfer.serve.core.supervisor import CurrentCore
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.loras import LoRAs
from jaxinfer.types import LoRARef
from tests.lora.fakes import Folders, make_store
from tests.serve.fake_engine import FakeEngine, fake_card, fake_template, fake_tokenizer

BASE = "fake"


class World:
    """A front end over an engine that is replaced after it dies; adapter folders are entries of ``folders``."""

    def __init__(self, root: pathlib.Path, *modules: str) -> None:
        self.root, self.folders = root, Folders()
        for module in modules:
            self.folders.contents[module.partition("=")[2]] = 1
        self.loras = LoRAs(self, modules, root)
        self._left = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start an engine in place of the previous one."""
        self.store, self.now = make_store(self.folders)
        self.engine = FakeEngine(loras=self.store, enable_lora=True)
        self.backend = await self._left.enter_async_context(AsyncEngine(self.engine))
        await self.loras.restore(self, BASE)
        card = fake_card(self.engine.config)
        assert card.name == BASE
        self.frontend = Frontend(self.backend, card, fake_tokenizer(), fake_template(), loras=self.loras)

    def folder(self, name: str, content: int) -> str:
        """Add a folder below the root; return its name in requests."""
        (self.root / name).mkdir(exist_ok=True)
        self.folders.contents[str((self.root / name).resolve())] = content
        return name

    async def load_lora(self, name, path):
        return await self.backend.load_lora(name, path)

    def unload_lora(self, name):
        self.backend.unload_lora(name)

    def release_lora(self, ref):
        self.backend.release_lora(ref)

    @property
    def contents(self) -> set[str]:
        """Return the adapter identities in the engine's store."""
        return set(self.store._contents)


@contextlib.asynccontextmanager
async def world(root: pathlib.Path, *modules: str) -> AsyncIterator[World]:
    made = World(root, *modules)
    await made.start()
    async with made._left:
        yield made
        await made.frontend.aclose()


def refusal(kind: Kind, words: str):
    return pytest.raises(ServeError, match=words, check=lambda error: error.kind is kind)


def test_all_backends_are_ones(tmp_path):
    assert all(issubclass(each, LoRABackend) for each in (AsyncEngine, CoreLink, CurrentCore))


def test_a_name_means_what_was_loaded_last(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as w:
            loaded = await w.loras.load("a", w.folder("one", 1))
            assert loaded == ("a", str((tmp_path / "one").resolve()), "1", 1)
            assert w.loras.resolve("a") == LoRARef("a", "1")
            await w.loras.load("a", w.folder("one", 2))
            await w.loras.load("b", w.folder("two", 3))
            assert w.loras.resolve("a") == LoRARef("a", "2")
            assert [each.name for each in w.loras.list()] == ["a", "b"]
            assert w.contents == {"2", "3"}, "nobody has the first any more"
            await w.loras.unload("a")
            assert w.contents == {"3"}
            with refusal(Kind.NOT_FOUND, "model='a' is not served here, only 'fake' and the adapters 'b'$"):
                w.loras.resolve("a")

    asyncio.run(run())


def test_the_same_content_again_is_kept_once(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as w:
            for _ in range(3):
                await w.loras.load("a", w.folder("one", 1))
            await w.loras.load("b", w.folder("two", 1))
            await w.loras.unload("a")
            assert w.contents == {"1"}
            await w.loras.unload("b")
            assert w.contents == set()

    asyncio.run(run())


@pytest.mark.parametrize("again", [2, None], ids=["replaced", "unloaded"])
def test_a_request_on_its_way_keeps_what_it_named(tmp_path, again):
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.loras.load("a", w.folder("one", 1))
            with w.frontend.meant(Call("x", model="a")) as call:
                await (w.loras.unload("a") if again is None else w.loras.load("a", w.folder("one", again)))
                assert "1" in w.contents
                async with await w.frontend.generate(call) as generation:
                    [delta async for delta in generation]
            assert w.store._contents["1"].live == 0, "it lies on the device, and nobody has it"

    asyncio.run(run())


def test_a_request_has_the_adapter_that_its_model_names(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.loras.load("a", w.folder("one", 1))
            for model, lora in (("a", LoRARef("a", "1")), (BASE, None), (None, None)):
                async with await w.frontend.generate(Call("x", model=model)) as generation:
                    assert generation._stream.request.lora == lora
            with refusal(Kind.NOT_FOUND, "model='c' is not served here"):
                await w.frontend.generate(Call("x", model="c"))

    asyncio.run(run())


def test_a_restart_loads_all_again(tmp_path, caplog):
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.loras.load("same", w.folder("one", 1))
            await w.loras.load("changed", w.folder("two", 2))
            await w.loras.load("gone", w.folder("three", 3))
            w.folders.contents[str(tmp_path / "two")] = 5
            del w.folders.contents[str(tmp_path / "three")]
            with caplog.at_level(logging.WARNING):
                await w.start()
            assert [each[:1] + each[2:3] for each in w.loras.list()] == [("changed", "5"), ("same", "1")]
            assert "two has changed since it was loaded" in caplog.text
            assert "three: no such folder: it was loaded before the engine was restarted" in caplog.text
            with refusal(Kind.NOT_FOUND, "model='gone' could not be loaded again"):
                w.loras.resolve("gone")
            await w.loras.load("gone", w.folder("three", 4))
            assert w.loras.resolve("gone") == LoRARef("gone", "4")
            assert w.contents == {"1", "5", "4"}
            for name in ("same", "changed", "gone"):
                await w.loras.unload(name)
            assert w.contents == set()

    asyncio.run(run())


def test_what_was_let_go_of_before_a_restart_is_no_matter_after_it(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.loras.load("a", w.folder("one", 1))
            with w.frontend.meant(Call("x", model="a")):
                await w.loras.unload("a")
                await w.loras.load("a", "one")
                await w.start()
            with w.frontend.meant(Call("x", model="a")):
                await w.loras.unload("a")
                assert w.contents == {"1"}
            assert w.contents == set()

    asyncio.run(run())


def test_modules_are_there_from_the_start(tmp_path):
    async def run() -> None:
        async with world(tmp_path, "a=/x", "b=/y") as w:
            assert [each[:2] for each in w.loras.list()] == [("a", "/x"), ("b", "/y")]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("modules", "words"),
    [(["fake=/x"], "lora_modules: 'fake=/x': 'fake' is the name of the model"), (["a=/nowhere"], "adapter 'a': /nowh")],
)
def test_a_start_with_a_module_that_cannot_be_served_ends(tmp_path, modules, words):
    async def run() -> None:
        made = World(tmp_path, *modules)
        made.folders.contents.pop("/nowhere", None)
        with pytest.raises(LoRAError, match=words):
            await made.start()
        await made._left.aclose()

    asyncio.run(run())


BAD = [
    ("", "one", "lora_name='' must have 1 to 128 printable characters"),
    ("a\nb", "one", "lora_name="),
    ("a" * 129, "one", "lora_name="),
    (BASE, "one", "lora_name='fake' is the name of the model itself"),
    ("a", "", "lora_path='' must have"),
    ("a", "o\0ne", "lora_path="),
    ("a", "\ud800", "lora_path="),
    ("a", "../one", "lora_path '../one' is not a path below"),
    ("a", "/etc", "lora_path '/etc' is no folder below"),
    ("a", "nothing", "lora_path 'nothing' is no folder below"),
    ("a", "out", "lora_path 'out' is no folder below"),
    ("a", "bad", "lora_path='.*bad': adapter 'a': .*bad: no such folder"),
]


@pytest.mark.parametrize(("name", "path", "words"), BAD)
def test_what_cannot_be_loaded_is_refused(tmp_path, name, path, words):
    async def run() -> None:
        async with world(tmp_path) as w:
            w.folder("one", 1)
            (tmp_path / "out").symlink_to("/etc")
            (tmp_path / "bad").mkdir()
            await w.loras.load("b", "one")
            with refusal(Kind.INVALID, words):
                await w.loras.load(name, path)
            assert [each.name for each in w.loras.list()] == ["b"]

    asyncio.run(run())


def test_without_a_root_none_is_loaded(tmp_path):
    async def run() -> None:
        async with world(tmp_path, "a=/x") as w:
            w.loras._root = None
            with refusal(Kind.PRECONDITION, "lora_path='one' is not read: this server was started without lora_root"):
                await w.loras.load("b", "one")
            await w.loras.unload("a")

    asyncio.run(run())


def test_a_name_in_use_is_replaced_only_where_that_is_meant(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.loras.load("a", w.folder("one", 1), replace=False)
            with refusal(Kind.INVALID, "lora_name='a' has already been loaded"):
                await w.loras.load("a", w.folder("one", 2), replace=False)
            assert w.loras.resolve("a").identity == "1"

    asyncio.run(run())


def test_a_load_whose_caller_has_gone_is_finished(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.loras._changing.acquire()
            loading = asyncio.ensure_future(w.loras.load("a", w.folder("one", 1)))
            await asyncio.sleep(0.05)
            loading.cancel()
            w.loras._changing.release()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            await asyncio.gather(*w.loras._loading)
            assert w.loras.resolve("a").identity == "1"
            await w.loras.unload("a")
            assert w.contents == set()

    asyncio.run(run())


def test_who_unloads_what_is_not_there_is_told(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as w:
            with refusal(Kind.NOT_FOUND, "lora_name='a' is not served here, only 'fake' and no adapters"):
                await w.loras.unload("a")

    asyncio.run(run())


def test_long_lists_of_names_are_cut(tmp_path):
    async def run() -> None:
        async with world(tmp_path, *(f"n{i}=/x" for i in range(12))) as w:
            with refusal(Kind.NOT_FOUND, "'n4', 'n5' and 4 more$"):
                w.loras.resolve("a")

    asyncio.run(run())
