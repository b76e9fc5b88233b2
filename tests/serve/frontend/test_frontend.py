"""Tests of `Frontend` over the fake engine: outputs, rejections, and no leaked state."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Conversation, ServeLimits, Usage
from jaxinfer.serve.core.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.text.output import OutputDelta
from tests.serve.fake_engine import (
    EOS,
    FIRST_BYTE,
    VOCAB,
    FakeEngine,
    Mischief,
    expected_logprobs,
    expected_text,
    expected_tokens,
    fake_card,
    fake_template,
    fake_tokenizer,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
FINE = Mischief()
PROMPT = [FIRST_BYTE + byte for byte in b"Hello"]


@dataclasses.dataclass
class Served:
    engine: FakeEngine
    backend: AsyncEngine
    frontend: Frontend

    async def pages_are_free(self) -> None:
        """Wait until all pages are free; aborts are processed between two steps."""
        async with asyncio.timeout(20):
            while (stats := await self.backend.stats()).kv.held or stats.running or any(stats.waiting.values()):
                await asyncio.sleep(0.001)
        await self.backend.check()
        assert self.frontend.active == 0


@contextlib.asynccontextmanager
async def served(mischief: Mischief = FINE, tokenizer: bool = True, **options: Any) -> AsyncIterator[Served]:
    settings = options.pop("settings", {})
    engine = FakeEngine(mischief, **settings)
    async with AsyncEngine(engine) as backend:
        texts = (fake_tokenizer(), fake_template()) if tokenizer else (None, None)
        frontend = Frontend(backend, fake_card(engine.config), *texts, **options)
        try:
            yield Served(engine, backend, frontend)
        finally:
            engine.release()
            await frontend.aclose()


async def whole(frontend: Frontend, call: Call) -> tuple[Generation, dict[int, OutputDelta]]:
    """Return the generation and its outputs, assembled."""
    outputs: dict[int, OutputDelta] = {}
    async with await frontend.generate(call) as generation:
        async for delta in generation:
            output = outputs.setdefault(delta.index, OutputDelta(delta.index, "", []))
            assert output.finish_reason is None
            output.text += delta.text
            output.token_ids += delta.token_ids
            output.logprobs = [*output.logprobs, *delta.logprobs]
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            output.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
    return generation, outputs


async def refusal(frontend: Frontend, call: Call) -> ServeError:
    with pytest.raises(ServeError) as caught:
        await whole(frontend, call)
    return caught.value


# ---- outputs


@pytest.mark.parametrize("prompt", ["Hello", PROMPT])
def test_outputs_are_those_of_the_engine(prompt):
    async def run() -> None:
        async with served() as s:
            sampling = {"n": 3, "seed": 5, "max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1}
            generation, outputs = await whole(s.frontend, Call(prompt, sampling))
            assert (generation.n, generation.seed, list(generation.prompt_token_ids)) == (3, 5, PROMPT)
            assert generation.usage == Usage(5, 120, 0)
            for index in range(3):
                tokens = expected_tokens(PROMPT, 5, index, 40)
                assert outputs[index].token_ids == tokens
                assert outputs[index].text == expected_text(PROMPT, 5, index, 40)
                assert outputs[index].finish_reason == "length"
                assert outputs[index].logprobs == [expected_logprobs(t, 5 + i, 2) for i, t in enumerate(tokens)]
            wanted = [None, *(expected_logprobs(token, i, 1) for i, token in enumerate(PROMPT[1:], 1))]
            assert outputs[0].prompt_logprobs == wanted
            assert outputs[1].prompt_logprobs is None
            await s.pages_are_free()

    asyncio.run(run())


def test_max_tokens_is_what_the_context_leaves():
    async def run() -> None:
        async with served(settings={"max_model_len": 64}) as s:
            _, outputs = await whole(s.frontend, Call("Hello"))
            assert len(outputs[0].token_ids) == 64 - 5

    asyncio.run(run())


def test_a_conversation_becomes_a_prompt():
    async def run() -> None:
        async with served(allow_request_templates=True) as s:
            ids = await s.frontend.tokenize(Conversation(MESSAGES))
            assert await s.frontend.detokenize(ids) == "[user] Hi\n[a] "
            generation, _ = await whole(s.frontend, Call(Conversation(MESSAGES), {"max_tokens": 1}))
            assert list(generation.prompt_token_ids) == ids
            own = Conversation(MESSAGES, template="{{ messages | length }}")
            assert await s.frontend.tokenize(own) == [FIRST_BYTE + ord("1")]

    asyncio.run(run())


def test_stop_strings_end_one_output_and_the_engine_hears_of_it():
    async def run() -> None:
        async with served(Mischief(seconds=0.001)) as s:
            call = Call(PROMPT, {"n": 2, "seed": 5, "max_tokens": 1000, "stop": ["狐", "lazy"]})
            generation, outputs = await whole(s.frontend, call)
            for index in range(2):
                text = expected_text(PROMPT, 5, index, 400)
                stop = min((text.index(stop), stop) for stop in ("狐", "lazy"))
                assert outputs[index].text == text[: stop[0]]
                assert (outputs[index].finish_reason, outputs[index].stop_reason) == ("stop", stop[1])
            used = sum(len(output.token_ids) for output in outputs.values())
            assert generation.usage.completion == used < 400
            await s.pages_are_free()
            assert s.engine.steps < 500

    asyncio.run(run())


@pytest.mark.parametrize("tail", [4, 0], ids=["before the end", "at the last token"])
def test_outputs_are_counted_as_their_clients_see_them_end(tail: int) -> None:
    async def run() -> None:
        async with served() as run:
            text, length = expected_text(PROMPT, 5, 0, 30), 12
            stop = {"max_tokens": length + tail, "stop": text[length - 3 : length]}
            assert text.index(stop["stop"]) == length - 3
            for params in (stop, {"max_tokens": 3}):
                await whole(run.frontend, Call(PROMPT, {"seed": 5, **params}))
            async with await run.frontend.generate(Call(PROMPT, {"seed": 5, "n": 2, "max_tokens": 1000})):
                pass
            finished = (await run.frontend.stats()).finished
            counted = {reason.value: count for reason, count in finished.items() if count}
            assert counted == {"stop": 1, "length": 1, "abort": 2}

    asyncio.run(run())


def test_the_engine_stops_an_output_whose_stop_string_has_come():
    async def run() -> None:
        async with served(Mischief(seconds=0.005)) as s:
            stop = expected_text(PROMPT, 5, 0, 30)[8:16]
            call = Call(PROMPT, {"n": 2, "seed": 5, "max_tokens": 60, "stop": stop})
            running: list[int] = []
            async with await s.frontend.generate(call) as generation:
                async for delta in generation:
                    if running or delta.stop_reason == stop:
                        running.append((await s.backend.stats()).running)
            assert len(running) > 9
            assert 1 in running[:6]

    asyncio.run(run())


@pytest.mark.parametrize("sampling", [{"stop": "o"}, {"max_tokens": 5}])
def test_the_last_piece_is_the_end(sampling):
    async def run() -> None:
        async with served() as s, await s.frontend.generate(Call(PROMPT, {"seed": 5, **sampling})) as generation:
            while (await anext(generation)).finish_reason is None:
                pass
            await s.pages_are_free()

    asyncio.run(run())


def test_eos_and_own_stop_tokens():
    async def run() -> None:
        async with served(Mischief(eos_after=7)) as s:
            _, outputs = await whole(s.frontend, Call(PROMPT, {"seed": 1}))
            assert (outputs[0].finish_reason, outputs[0].stop_reason) == ("stop", None)
            assert outputs[0].text == expected_text(PROMPT, 1, 0, 7)
            own = expected_tokens(PROMPT, 1, 0, 4)[3]
            _, outputs = await whole(s.frontend, Call(PROMPT, {"seed": 1, "stop_token_ids": [own]}))
            assert outputs[0].stop_reason == own == outputs[0].token_ids[-1]
            assert outputs[0].text == expected_text(PROMPT, 1, 0, 3)

    asyncio.run(run())


def test_cached_tokens_are_told():
    async def run() -> None:
        async with served() as s:
            long = PROMPT * 20
            for cached in (False, True):
                generation, _ = await whole(s.frontend, Call(long, {"max_tokens": 2}))
                assert (generation.usage.cached > 0) is cached
            assert await s.frontend.flush_prefix_cache() > 0
            generation, _ = await whole(s.frontend, Call(long, {"max_tokens": 2}))
            assert generation.usage.cached == 0

    asyncio.run(run())


def test_a_model_without_tokenizer_speaks_ids():
    async def run() -> None:
        async with served(tokenizer=False) as s:
            _, outputs = await whole(s.frontend, Call(PROMPT, {"seed": 1, "max_tokens": 9}))
            assert (outputs[0].text, outputs[0].token_ids) == ("", expected_tokens(PROMPT, 1, 0, 9))
            for call in (Call("Hello"), Call(Conversation(MESSAGES)), Call(PROMPT, {"stop": "x"})):
                assert (await refusal(s.frontend, call)).kind is Kind.INVALID
            with pytest.raises(ServeError):
                await s.frontend.detokenize(PROMPT)

    asyncio.run(run())


def test_texts_become_ids_and_back():
    async def run() -> None:
        async with served() as s:
            for text in ("", "naïve 狐", "x" * 5000):
                ids = await s.frontend.tokenize(text)
                assert ids == [FIRST_BYTE + byte for byte in text.encode()]
                assert await s.frontend.detokenize(ids) == text
            assert s.frontend.token_text(FIRST_BYTE + 0xC3) == "�"
            assert s.frontend.token_bytes(FIRST_BYTE + 0xC3) == b"\xc3"
            assert await s.frontend.detokenize([EOS], skip_special_tokens=True) == ""
            for ids in ([-1], [VOCAB], [True]):
                with pytest.raises(ServeError, match="token_ids"):
                    await s.frontend.detokenize(ids)

    asyncio.run(run())


# ---- scores


def test_scores_are_those_of_the_prompt():
    async def run() -> None:
        async with served() as s:
            scored = await s.frontend.score("Hello", [" fox", PROMPT, "é"] * 10)
            first = [FIRST_BYTE + b for b in b" fox"]
            assert list(scored[0].tokens) == [expected_logprobs(t, 5 + i, 0) for i, t in enumerate(first)]
            assert scored[0].is_greedy
            assert scored[0].logprob == pytest.approx(sum(p.chosen.logprob for p in scored[0].tokens))
            assert [len(score.tokens) for score in scored[:3]] == [4, 5, 2]
            await s.pages_are_free()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "continuations", "field"),
    [
        ("", ["a"], "prompt"),
        ("a", [], "continuations"),
        ("a", ["a"] * 65, "continuations"),
        ("a", ["a", ""], "continuations"),
        ("a", [[VOCAB]], "continuations"),
        ("a", ["a", "b" * 5000], "continuations"),
        ("a" * 2047, ["a"], "prompt_token_ids"),
        ([VOCAB], ["a"], "prompt_token_ids"),
    ],
)
def test_bad_scores_are_refused(prompt, continuations, field):
    async def run() -> None:
        async with served() as s:
            with pytest.raises(ServeError) as caught:
                await s.frontend.score(prompt, continuations)
            assert (caught.value.kind, caught.value.field) == (Kind.INVALID, field)
            await s.pages_are_free()

    asyncio.run(run())


# ---- rejections


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"n": 10**6}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logit_bias": dict.fromkeys(range(10**5), 0.0)}, "logit_bias"),
    ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 2**20}, "stop"),
    ({"stop": ["x"] * 10**4}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": ["x"] * 33}, "bad_words"),
    ({"bad_words": ["\ud800"]}, "bad_words"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"beam_width": 4}, "beam_width"),
]


@pytest.mark.parametrize(("sampling", "field"), BAD, ids=lambda value: str(value)[:30])
def test_bad_sampling_is_refused_by_name(sampling, field):
    async def run() -> None:
        async with served() as s:
            error = await refusal(s.frontend, Call("Hello", sampling))
            assert (error.kind, error.field) == (Kind.INVALID, field)
            assert len(error.message) <= 501
            assert s.frontend.active == 0

    asyncio.run(run())


def test_the_first_thing_wrong_does_not_depend_on_the_order():
    async def run() -> None:
        async with served() as s:
            both = {"temperature": -1, "n": 0}
            errors = [
                await refusal(s.frontend, Call("", dict(pairs))) for pairs in (both.items(), [*both.items()][::-1])
            ]
            assert errors[0].message == errors[1].message

    asyncio.run(run())


@pytest.mark.parametrize(
    ("call", "kind", "field"),
    [
        (Call(""), Kind.INVALID, "prompt_token_ids"),
        (Call([]), Kind.INVALID, "prompt_token_ids"),
        (Call([-1]), Kind.INVALID, "prompt_token_ids"),
        (Call([VOCAB]), Kind.INVALID, "prompt_token_ids"),
        (Call([True]), Kind.INVALID, "prompt_token_ids"),
        (Call([3] * 2048), Kind.INVALID, "prompt_token_ids"),
        (Call("x" * 3000), Kind.INVALID, "prompt_token_ids"),
        (Call("x" * 5001), Kind.INVALID, "prompt"),
        (Call("\ud800"), Kind.INVALID, "prompt"),
        (Call("a", model="other"), Kind.NOT_FOUND, "model"),
        (Call("a", model="x" * 10**6), Kind.NOT_FOUND, "model"),
        (Call("a", request_id=""), Kind.INVALID, "request_id"),
        (Call("a", request_id="x" * 129), Kind.INVALID, "request_id"),
        (Call("a", request_id="a\nb"), Kind.INVALID, "request_id"),
        (Call("a", timeout=0), Kind.DEADLINE, None),
        (Call("a", timeout=-1.0), Kind.DEADLINE, None),
        (Call("a", timeout=math.nan), Kind.INVALID, "timeout"),
        (Call("a", timeout=math.inf), Kind.INVALID, "timeout"),
        (Call("a", priority=2**31), Kind.INVALID, "priority"),
        (Call("a", cache_salt="\ud800"), Kind.INVALID, "cache_salt"),
        (Call(Conversation(MESSAGES, template="x")), Kind.INVALID, "template"),
        (Call(Conversation([{"role": "u", "content": ["x" * 5001]}])), Kind.INVALID, "messages"),
        (Call(Conversation(MESSAGES, variables={"messages": 1})), Kind.INVALID, "variables"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_calls_are_refused(call, kind, field):
    async def run() -> None:
        async with served(limits=ServeLimits(prompt_characters=5000)) as s:
            error = await refusal(s.frontend, call)
            assert (error.kind, error.field) == (kind, field)
            assert len(error.message) <= 501
            await s.pages_are_free()

    asyncio.run(run())


def test_an_id_is_taken_until_its_generation_has_ended():
    async def run() -> None:
        async with served() as s:
            async with await s.frontend.generate(Call("a", request_id="me")):
                assert (await refusal(s.frontend, Call("a", request_id="me"))).kind is Kind.EXISTS
            for _ in range(3):
                generation, _ = await whole(s.frontend, Call("a", {"max_tokens": 3}, request_id="me"))
                assert generation.request_id == "me"

    asyncio.run(run())


def test_a_full_queue_says_when_to_come_back():
    async def run() -> None:
        async with (
            served(Mischief(seconds=0.01), settings={"max_waiting_requests": 1, "max_num_seqs": 2}) as s,
            contextlib.AsyncExitStack() as stack,
        ):

            async def fill() -> None:
                for _ in range(20):
                    await stack.enter_async_context(await s.frontend.generate(Call("a")))

            with pytest.raises(ServeError) as caught:
                await fill()
            assert caught.value.kind is Kind.QUEUE_FULL
            assert caught.value.retry_after is not None

    asyncio.run(run())


# ---- ends


@pytest.mark.parametrize("after", range(0, 30, 3))
def test_leaving_frees_the_pages(after):
    async def run() -> None:
        async with served(Mischief(seconds=0.001)) as s:
            for how in ("break", "cancel"):
                task = asyncio.ensure_future(read(s.frontend, after))
                got = await task if how == "break" else await cancelled(task, after)
                assert got <= after
                await s.pages_are_free()

    async def read(frontend: Frontend, deltas: int) -> int:
        async with await frontend.generate(Call("Hello", {"n": 2, "max_tokens": 2000})) as generation:
            for _ in range(deltas):
                await anext(generation)
        return deltas

    async def cancelled(task: asyncio.Future[int], turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return 0

    asyncio.run(run())


def test_abort_ends_with_a_last_piece():
    async def run() -> None:
        async with served(Mischief(seconds=0.001)) as s:
            async with await s.frontend.generate(Call("Hello", {"n": 2, "seed": 1})) as generation:
                reasons = {}
                async for delta in generation:
                    if not reasons:
                        await s.frontend.abort(generation.request_id)
                    if delta.finish_reason:
                        reasons[delta.index] = delta.finish_reason
                assert reasons == {0: "abort", 1: "abort"}
            await s.frontend.abort("unknown")
            await s.pages_are_free()

    asyncio.run(run())


@pytest.mark.parametrize("mischief", [Mischief(seconds=0.01), Mischief(hang_at=3), Mischief(hang_at=1)])
def test_a_deadline_ends_it_whatever_the_engine_does(mischief):
    async def run() -> None:
        async with served(mischief) as s:
            begun = asyncio.get_running_loop().time()
            error = await refusal(s.frontend, Call("Hello", {"n": 2}, timeout=0.2))
            assert error.kind is Kind.DEADLINE
            assert asyncio.get_running_loop().time() - begun >= 0.19
            s.engine.release()
            await s.pages_are_free()

    asyncio.run(run())


def test_a_deadline_holds_in_the_queue():
    async def run() -> None:
        async with served(Mischief(seconds=0.005), settings={"max_num_seqs": 2}) as s:
            async with await s.frontend.generate(Call("Hello", {"n": 2})):
                error = await refusal(s.frontend, Call("Hello", timeout=0.1))
                assert error.kind is Kind.DEADLINE
            await s.pages_are_free()

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_unavailable():
    async def run() -> None:
        async with served(Mischief(fault_at=5)) as s:
            for call in (Call("Hello"), Call("again")):
                error = await refusal(s.frontend, call)
                assert error.kind is Kind.UNAVAILABLE
                assert error.retry_after is not None
                assert "ZeroDivisionError" not in error.message
                assert s.frontend.active == 0

    asyncio.run(run())


def test_a_fault_is_opaque_and_the_log_explains_it(caplog, monkeypatch):
    async def broken(*_: object) -> None:
        raise KeyError("a secret")

    async def run() -> ServeError:
        async with served() as s:
            monkeypatch.setattr(s.backend, "submit", broken)
            return await refusal(s.frontend, Call("Hello"))

    error = asyncio.run(run())
    assert error.kind is Kind.INTERNAL
    assert "secret" not in error.message
    assert error.fault is not None
    assert error.fault in caplog.text
    assert "a secret" in caplog.text


def test_a_stream_that_ends_too_early_is_a_fault(monkeypatch):
    async def run() -> None:
        async with served(Mischief(seconds=0.001)) as s, await s.frontend.generate(Call("Hello")) as generation:
            await anext(generation)
            await generation._stream.aclose()
            with pytest.raises(ServeError) as caught:
                await anext(generation)
            assert caught.value.kind is Kind.INTERNAL

    asyncio.run(run())


# ---- draining


def test_draining_waits_for_those_that_run_and_takes_no_more():
    async def run() -> None:
        async with served(Mischief(seconds=0.001)) as s:
            running = asyncio.ensure_future(whole(s.frontend, Call("Hello", {"max_tokens": 50})))
            while not s.frontend.active:
                await asyncio.sleep(0)
            drained = asyncio.ensure_future(s.frontend.drain(30.0))
            await asyncio.sleep(0)
            error = await refusal(s.frontend, Call("Hello"))
            assert (error.kind, error.retry_after is None) == (Kind.UNAVAILABLE, False)
            async with asyncio.timeout(20):  # shorter than the drain limit: draining ends when nothing runs
                assert await drained == 0
            _, outputs = await running
            assert len(outputs[0].token_ids) == 50

    asyncio.run(run())


@pytest.mark.parametrize("mischief", [Mischief(seconds=0.001), Mischief(hang_at=2)])
def test_draining_ends_what_takes_too_long(mischief):
    async def run() -> None:
        async with served(mischief) as s:
            tasks = [asyncio.ensure_future(refusal(s.frontend, Call("Hello"))) for _ in range(3)]
            while s.frontend.active < 3:
                await asyncio.sleep(0)
            second = asyncio.ensure_future(s.frontend.drain(30.0))
            await asyncio.sleep(0.05)
            assert await s.frontend.drain(0.0) <= 3
            s.engine.release()
            assert [error.kind for error in await asyncio.gather(*tasks)] == [Kind.UNAVAILABLE] * 3
            assert await second == 0
            await s.pages_are_free()

    asyncio.run(run())


def test_stats_of_a_stopped_engine():
    async def run() -> None:
        backend = AsyncEngine(FakeEngine())
        frontend = Frontend(backend, fake_card(), None, None)
        for question in (frontend.stats, frontend.flush_prefix_cache, lambda: frontend.abort("a")):
            with pytest.raises(ServeError) as caught:
                await question()
            assert caught.value.kind is Kind.UNAVAILABLE
            assert isinstance(caught.value.__cause__, EngineDeadError)

    asyncio.run(run())
