"""Tests of the operations of a server: folders that may be read, and weights that outlive an engine."""

import asyncio

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.core.link import RefusedError
from jaxinfer.serve.core.operations import Look, SetVersion, UpdateWeights, WeightState
from jaxinfer.serve.frontend.operations import Operations, required
from tests.serve.fake_weights import write_fake_weights


class Engine:
    """Records operations; ``error``: of the next one."""

    def __init__(self) -> None:
        self.seen, self.error, self.version = [], None, 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def operate(self, operation):
        self.seen.append(operation)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        if isinstance(operation, UpdateWeights | SetVersion):
            self.version = operation.version or self.version + 1
        return WeightState(version=self.version)


@pytest.fixture
def root(tmp_path):
    for name in ("a", "b"):
        write_fake_weights(tmp_path / "root" / name, name)
    return tmp_path / "root"


def test_the_next_engine_gets_the_last_weights(root):
    async def main():
        first, operations = Engine(), None
        operations = Operations(first, root)
        await operations.restore(first)
        assert first.seen == []
        await operations.run(UpdateWeights("a", None, "wait"))
        await operations.run(UpdateWeights("b", 5))
        await operations.run(SetVersion(9))
        await operations.run(Look())
        first.error = RequestError("params", "is wrong")
        with pytest.raises(ServeError) as refused:
            await operations.run(UpdateWeights("a"))
        assert (refused.value.kind, refused.value.field) == (Kind.INVALID, "params")
        await operations.restore(second := Engine())
        assert second.seen == [UpdateWeights(str((root / "b").resolve()), 9, "keep")]

    asyncio.run(main())


def test_the_next_engine_gets_all_parts_of_the_last_weights(root):
    async def main():
        operations = Operations(engine := Engine(), root)
        operations.start_update()
        for path in ("a", "b"):
            await operations.run(UpdateWeights(path))
        assert engine.seen == [Look(), Look()]
        engine.error = RequestError("params", "is wrong")
        with pytest.raises(ServeError):
            await operations.finish_update()
        await operations.restore(second := Engine())
        assert second.seen == []
        engine.error = None
        state = await operations.finish_update(7, "keep")
        first, other = (str((root / name).resolve()) for name in ("a", "b"))
        assert (state.version, engine.seen[-1]) == (7, UpdateWeights(first, 7, "keep", (other,)))
        await operations.restore(third := Engine())
        assert third.seen == [UpdateWeights(first, 7, "keep", (other,))]
        with pytest.raises(ServeError) as refused:
            await operations.finish_update()
        assert refused.value.kind is Kind.INVALID

    asyncio.run(main())


def test_the_next_engine_gets_a_version_alone(root):
    async def main():
        operations = Operations(Engine(), root)
        await operations.run(SetVersion(3))
        await operations.restore(second := Engine())
        assert second.seen == [SetVersion(3)]

    asyncio.run(main())


def test_an_update_ends_although_its_caller_leaves(root):
    async def main():
        engine = Engine()
        operations = Operations(engine, root)
        engine.may_end.clear()
        asked = asyncio.ensure_future(operations.run(UpdateWeights("a")))
        while not engine.seen:
            await asyncio.sleep(0.005)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        engine.may_end.set()
        await asyncio.sleep(0.01)
        await operations.restore(second := Engine())
        assert [each.version for each in second.seen] == [1]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RefusedError("no memory"), Kind.INVALID), (EngineDeadError("gone"), Kind.UNAVAILABLE)],
)
def test_errors_of_the_engine(root, error, kind):
    async def main():
        engine = Engine()
        engine.error = error
        with pytest.raises(ServeError) as refused:
            await Operations(engine, root).run(UpdateWeights("a"))
        assert refused.value.kind is kind

    asyncio.run(main())


def test_without_a_root_or_an_engine_there_is_nothing_to_change():
    async def main():
        with pytest.raises(ServeError) as refused:
            await Operations(Engine()).run(UpdateWeights("a"))
        assert (refused.value.kind, refused.value.field) == (Kind.PRECONDITION, "path")
        with pytest.raises(ServeError) as refused:
            required(None)
        assert refused.value.kind is Kind.PRECONDITION

    asyncio.run(main())
