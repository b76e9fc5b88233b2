"""Tests of admission control: the bounds of the waiting queue per tenant, and no submission of rejected requests."""

import asyncio
import contextlib

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.capacity import CapacityLimiter, Load
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.settings import QUEUE, make_config
from tests.serve.fake_engine import Mischief
from tests.serve.frontend.test_frontend import served
from tests.serve.http.support import run, serving

SLOW = Mischief(seconds=0.01)
SMALL = {"max_num_seqs": 2, "max_waiting_requests": 20, "max_waiting_sequences": 30, "max_waiting_tokens": 400}


def room(requests=None, sequences=None, tokens=None, slots=0):
    most = {"max_waiting_requests": requests, "max_waiting_sequences": sequences, "max_waiting_tokens": tokens}
    return CapacityLimiter({**most, "max_num_seqs": slots})


def fill(of, tenant, load=Load(1, 1, 1)):  # noqa: B008 - never changed
    """Admit requests of ``tenant`` one by one until one is rejected; return their places."""
    places = []
    with contextlib.suppress(QueueFullError):
        for _ in range(10_000):
            places += of.enter(tenant, [load])
    return places


# ---- bounds


def test_a_server_has_bounds_and_a_program_has_none():
    assert all(value for value in QUEUE.values())
    for config in (make_config({"model": "demo"}).engine, make_config({"model": "demo", "engine": {"seed": 1}}).engine):
        assert {name: getattr(config, name) for name in QUEUE} == QUEUE
    assert {name: getattr(EngineConfig(), name) for name in QUEUE} == dict.fromkeys(QUEUE)
    unbounded = make_config({"model": "demo", "engine": dict.fromkeys(QUEUE)}).engine
    assert {name: getattr(unbounded, name) for name in QUEUE} == dict.fromkeys(QUEUE)


def test_all_together_have_the_bound():
    for bounds, load, most in [
        ({"requests": 7}, Load(1, 3, 9), 7),
        ({"sequences": 10}, Load(1, 3, 9), 3),
        ({"tokens": 100}, Load(1, 3, 9), 11),
    ]:
        assert len(fill(room(**bounds), "", load)) == most
        assert len(fill(room(**bounds, slots=3), "", load)) >= most + 1 - ("tokens" in bounds)


def test_what_has_begun_does_not_wait_and_what_has_left_is_forgotten():
    of = room(requests=4, slots=1)
    places = fill(of, "")
    assert len(places) == 5  # one has the slot
    places[0].begin()
    assert fill(of, "") == []
    places[1].leave()
    places[1].leave()
    assert len(fill(of, "")) == 1
    places[0].leave()
    assert len(fill(of, "")) == 1


def test_slots_of_outputs_that_have_ended_are_free():
    of = room(requests=1, slots=4)
    (place,) = of.enter("", [Load(1, 4, 1)])
    place.begin()
    assert len(fill(of, "")) == 1
    place.ended()
    assert len(fill(of, "")) == 1


@pytest.mark.parametrize("others", [0, 1, 2, 10])
def test_tenants_that_take_what_they_can_leave_room_for_another(others):
    """Each tenant may use as much as is left: k greedy tenants end with a share of 1 / (k + 1) each."""
    of = room(requests=8000)
    for name in range(others):
        fill(of, f"other {name}")
    mine = len(fill(of, "me"))
    assert mine >= 1
    assert len(fill(of, "newcomer")) >= 1
    if others == 0:
        assert mine == 4000


def test_a_tenant_of_whom_nothing_waits_may_always_bring_one():
    of = room(requests=3)
    for name in "abc":
        of.enter(name, [Load(1, 1, 1)])
    with pytest.raises(QueueFullError, match=r"max_waiting_requests = 3, behind \d+ slots"):
        of.enter("d", [Load(1, 1, 1)])


def test_a_prompt_beyond_the_bound_may_wait_alone():
    of = room(tokens=100)
    (place,) = of.enter("", [Load(1, 1, 0)])
    place.measure(5000)
    with pytest.raises(QueueFullError, match="max_waiting_tokens = 100"):
        of.enter("", [Load(1, 1, 1)])


def test_tokens_that_are_known_late_are_counted_late():
    of = room(tokens=100)
    first, second = of.enter("", [Load(1, 1, 0), Load(1, 1, 0)])
    first.measure(60)
    with pytest.raises(QueueFullError, match="max_waiting_tokens = 100"):
        second.measure(60)
    second.leave()
    (third,) = of.enter("", [Load(1, 1, 40)])
    third.leave()
    first.leave()
    assert len(fill(of, "")) == 100


def test_many_are_taken_together_or_not_at_all():
    of = room(requests=10, sequences=20)
    of.enter("", [Load(1, 1, 0)] * 5)
    with pytest.raises(QueueFullError, match="max_waiting_requests = 10"):
        of.enter("", [Load(1, 1, 0)] * 6)
    assert len(of.enter("", [Load(1, 3, 0)] * 5)) == 5


def test_what_can_never_fit_is_no_matter_of_time():
    with pytest.raises(RequestError, match=r"prompt.*8 sequences.*max_waiting_sequences = 5") as refusal:
        room(sequences=5, slots=2).enter("", [Load(1, 4, 0)] * 2)
    assert not isinstance(refusal.value, QueueFullError)
    with pytest.raises(RequestError, match="max_waiting_sequences = 10") as refusal:
        room(sequences=10).enter("key", [Load(1, 3, 0)] * 2)
    assert not isinstance(refusal.value, QueueFullError)


# ---- APIs


def _post(client, body, key=None, timeout=20.0):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return client.post("/v1/completions", json=body, headers=headers, timeout=timeout)


def test_a_body_of_32768_sequences_is_refused_before_any_of_them_is_submitted():
    async def test():
        async with serving(SLOW, engine={"max_num_seqs": 16, **QUEUE}) as running, running.http() as client:
            answer = await _post(client, {"prompt": ["Hi"] * 1024, "n": 32, "max_tokens": 1})
            assert answer.status_code == 400
            assert "32768 sequences" in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "prompt"
            stats = await running.engine.stats()
            assert stats.queue_time.count == 0
            assert running.frontend.active == 0

    run(test)


def test_a_body_that_finds_too_little_room_leaves_no_trace():
    async def test():
        async with serving(SLOW, engine=SMALL) as running, running.http() as client:
            first = asyncio.ensure_future(_post(client, {"prompt": ["Hi"] * 15, "max_tokens": 500}))
            while running.frontend.active < 15:
                await asyncio.sleep(0.005)
            answer = await _post(client, {"prompt": ["Hi"] * 10, "max_tokens": 1})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert running.frontend.active == 15
            assert (await _post(client, {"prompt": "Hi", "n": 20, "max_tokens": 1})).status_code == 429
            first.cancel()
            await running.quiet()
            assert running.frontend.room.empty

    run(test)


def test_a_flood_of_one_key_leaves_room_for_another(tmp_path):
    keys = {name: new_key() for name in ("greedy", "modest")}
    path = tmp_path / "keys.yaml"
    path.write_text("".join(key_entry(key, name, ["infer"]) for name, key in keys.items()))

    async def test():
        engine = {**SMALL, "scheduling_policy": "fair"}
        async with serving(SLOW, keys=path, engine=engine) as running, running.http() as client:
            body = {"prompt": "Hi", "max_tokens": 200}
            flood = [asyncio.ensure_future(_post(client, body, keys["greedy"])) for _ in range(60)]
            while sum(each.done() for each in flood) < 30:
                await asyncio.sleep(0.005)
            assert {each.result().status_code for each in flood if each.done()} == {429}
            answer = await _post(client, {"prompt": "Hi", "max_tokens": 1}, keys["modest"])
            assert answer.status_code == 200, answer.text
            for each in flood:
                each.cancel()

    run(test)


def test_a_refusal_comes_before_tokens_and_templates(monkeypatch):
    async def story():
        async with served(SLOW, settings={"max_num_seqs": 2, "max_waiting_requests": 1}) as s:
            held = []
            for _ in range(2):
                held.append(await s.frontend.generate(Call([5], {"max_tokens": 1000})))
                await anext(held[-1])  # it has a slot: the engine counts it as waiting until its first step
            held.append(await s.frontend.generate(Call([5], {"max_tokens": 1000})))
            monkeypatch.setattr(s.frontend, "_request", None)
            with pytest.raises(ServeError) as refusal:
                await s.frontend.generate(Call("Hi"))
            assert refusal.value.kind is Kind.QUEUE_FULL
            assert refusal.value.retry_after
            for each in held:
                await each.aclose()

    asyncio.run(story())


def test_places_are_given_back_however_a_request_ends():
    async def story():
        async with served(SLOW, settings=SMALL) as s:
            for _ in range(3):
                places = [await s.frontend.generate(Call([5], {"max_tokens": 3, "n": 2})) for _ in range(6)]
                async with asyncio.TaskGroup() as group:
                    for each in places[:2]:
                        group.create_task(_read(each))
                for each in places[2:]:
                    await each.aclose()
                for bad in (Call([10**6]), Call([5], timeout=1e-9), Call([5], {"n": 0}), Call("", {"max_tokens": 1})):
                    with pytest.raises(ServeError):
                        await s.frontend.generate(bad)
                asking = asyncio.ensure_future(s.frontend.generate(Call("x" * 3000)))
                await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            assert s.frontend.room.empty

    asyncio.run(story())


async def _read(generation):
    async for _ in generation:
        pass
