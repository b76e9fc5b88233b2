"""Tests of `Generation` over a scripted backend."""

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

import pytest

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Usage
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason, Request, SequenceDelta
from tests.serve.fake_engine import FIRST_BYTE, fake_tokenizer


@dataclasses.dataclass
class Script:
    """A scripted `Backend` and its stream."""

    request: Request
    deltas: Sequence[SequenceDelta]
    dead: bool = False
    aborted: list[int | None] = dataclasses.field(default_factory=list)

    async def __aiter__(self) -> AsyncIterator[SequenceDelta]:
        for delta in self.deltas:
            yield delta

    @property
    def idle(self) -> bool:
        return False

    def listen(self, listener: Callable[[], None]) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def aclose(self) -> None: ...

    async def submit(self, request: Request) -> "Script":
        return self

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append(index)
        if self.dead:
            raise EngineDeadError("gone")

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> int:
        return 0


def delta(index: int, text: str, finish: FinishReason | None = None, cached: int | None = None) -> SequenceDelta:
    ids = [FIRST_BYTE + byte for byte in text.encode()]
    return SequenceDelta("me", index, ids, finish_reason=finish, cached_tokens=cached)


def generation_of(script: Script, seconds: float | None = None) -> Generation:
    return Generation(script, script, fake_tokenizer(), lambda request_id, reasons: None, seconds)


def scripted(*deltas: SequenceDelta, dead: bool = False, **params: object) -> Script:
    request = Request("me", (5, 6), SamplingParams(**{"seed": 1, "max_tokens": 9, **params}), frozenset(), ())
    return Script(request, deltas, dead)


def test_cached_tokens_are_told_once_and_kept():
    async def run() -> Usage:
        first, last = delta(0, "a", cached=2), delta(0, "bc", FinishReason.LENGTH)
        generation = generation_of(scripted(first, last))
        assert [piece.text async for piece in generation] == ["a", "bc"]
        return generation.usage

    assert asyncio.run(run()) == Usage(prompt=2, completion=3, cached=2)


def test_what_came_before_the_deadline_is_told():
    pieces: list[OutputDelta] = []

    async def run() -> None:
        async for piece in generation_of(scripted(delta(0, "a"), delta(0, "bc", FinishReason.DEADLINE))):
            pieces.append(piece)

    with pytest.raises(ServeError) as caught:
        asyncio.run(run())
    assert caught.value.kind is Kind.DEADLINE
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("a", None), ("bc", None)]


def test_a_grammar_that_fails_on_its_way_is_the_request_s_error():
    pieces: list[OutputDelta] = []
    failed = delta(0, "bc", FinishReason.ERROR)
    failed.stop_reason = "it took too long"

    async def run() -> None:
        async for piece in generation_of(scripted(delta(0, "a"), failed)):
            pieces.append(piece)

    with pytest.raises(ServeError, match="structured_outputs: it took too long") as caught:
        asyncio.run(run())
    assert (caught.value.kind, caught.value.field) == (Kind.INVALID, "structured_outputs")
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("a", None), ("bc", None)]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (FinishReason.UNAVAILABLE, Kind.UNAVAILABLE),
        (FinishReason.NOT_FINITE, Kind.INTERNAL),
        (FinishReason.DEADLINE, Kind.DEADLINE),
    ],
)
def test_a_failure_of_the_server_is_not_the_request_s_error(reason: FinishReason, kind: Kind, caplog):
    failed = delta(0, "", reason)
    failed.stop_reason = "adapter 'a': /srv/a has changed since it was loaded: load it again"
    ended: list[FinishReason] = []

    async def run() -> None:
        script = scripted(failed)
        async for _ in Generation(script, script, fake_tokenizer(), lambda _, reasons: ended.extend(reasons), None):
            pass

    with pytest.raises(ServeError) as caught:
        asyncio.run(run())
    assert (caught.value.kind, caught.value.field, ended) == (kind, None, [reason])
    assert "/srv/a" not in caught.value.message
    assert ("/srv/a" in caplog.text) == (reason is FinishReason.UNAVAILABLE)


def test_reasons_are_told_in_the_order_of_the_outputs():
    class Trace:
        reasons: Sequence[str] = ()

        def accepted(self, request: Request) -> None: ...
        def token(self) -> None: ...
        def failed(self, error: ServeError) -> None: ...
        def finished(self, usage: Usage, reasons: Sequence[str]) -> None:
            self.reasons = reasons

    async def run() -> Sequence[str]:
        generation = generation_of(scripted(delta(1, "a", FinishReason.STOP), delta(0, "b", FinishReason.LENGTH), n=2))
        generation.trace = trace = Trace()
        assert [piece.index async for piece in generation] == [1, 0]
        return trace.reasons

    assert asyncio.run(run()) == ["length", "stop"]


def test_an_engine_that_died_need_not_hear_of_a_stop_string():
    async def run() -> None:
        script = scripted(delta(0, "ab"), delta(1, "c", FinishReason.LENGTH), dead=True, n=2, stop=["b"])
        generation = generation_of(script)
        reasons = [piece.finish_reason async for piece in generation]
        results = await asyncio.gather(*generation._aborting, return_exceptions=True)
        assert (reasons, script.aborted, results) == (["stop", "length"], [0], [None])

    asyncio.run(run())


def test_what_has_ended_is_not_kept_until_its_deadline():
    async def run() -> None:
        generation = generation_of(scripted(delta(0, "a", FinishReason.LENGTH)), seconds=3600.0)
        assert len([piece async for piece in generation]) == 1
        left = weakref.ref(generation)
        del generation
        gc.collect()
        assert left() is None

    asyncio.run(run())


def test_the_last_delta_of_an_output_has_the_versions_of_all_its_tokens():
    def of(index: int, text: str, *versions: tuple[int, int], end: bool = False) -> SequenceDelta:
        made = delta(index, text, FinishReason.LENGTH if end else None)
        return dataclasses.replace(made, weight_versions=versions)

    async def main():
        request = Request("me", (1,), SamplingParams(max_tokens=9, n=4, seed=1))
        script = Script(
            request,
            [
                *(of(0, "ab"), of(1, "a"), of(0, "c", (2, 1)), of(1, "b", (2, 1)), of(0, "de", (2, 1), (3, 1))),
                *(of(0, "f", (3, 1), end=True), of(1, "", (3, 0), end=True), of(2, "a", (3, 1), end=True)),
                of(3, "", (3, 0), end=True),
            ],
        )
        ends = {each.index: each async for each in generation_of(script) if each.finish_reason is not None}
        assert {index: each.weight_versions for index, each in ends.items()} == {
            0: ((0, 2), (2, 2), (3, 2)),
            1: ((0, 1), (2, 1)),
            2: ((3, 1),),
            3: ((3, 0),),
        }

    asyncio.run(main())
