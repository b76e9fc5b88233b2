"""Tests of round-robin turns of tenants: no tenant starves, and no item is lost or handed out twice."""

import asyncio
import random

import pytest

from jaxinfer.sampling_params import QueueFullError
from jaxinfer.serve.runtime.fair_pool import FairPool


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_tenants_take_turns():
    async def main():
        turns, order = FairPool(["x"], 1, 100, "wait"), []

        async def one(tenant: str) -> None:
            thing = await turns.take(tenant)
            order.append(tenant)
            await asyncio.sleep(0)
            turns.give(tenant, thing)

        await asyncio.gather(*(one(tenant) for tenant in "aaaaabbc"))
        assert "".join(order) == "aabcabaa"

    run(main())


def test_no_tenant_has_more_than_its_share():
    async def main():
        turns = FairPool([1, 2, 3], 2, 100, "wait")
        mine = [asyncio.ensure_future(turns.take("a")) for _ in range(5)]
        await settle()
        assert [task.done() for task in mine] == [True, True, False, False, False]
        assert await turns.take("b") == 1
        assert turns.held == 3
        turns.give("a", mine[0].result())
        await settle()
        assert mine[2].done()
        for task in mine[3:]:
            task.cancel()
        await settle()

    run(main())


def test_where_it_is_full_the_longest_queue_gives_way():
    async def main():
        turns = FairPool(["x"], 1, 4, "wait")
        await turns.take("a")
        waiting = [asyncio.ensure_future(turns.take("a")) for _ in range(4)]
        await settle()
        with pytest.raises(QueueFullError, match="4 wait already"):
            await turns.take("a")
        others = [asyncio.ensure_future(turns.take("b")) for _ in range(2)]
        await settle()
        assert [task.done() for task in waiting] == [False, False, True, True]
        for task in waiting[2:]:
            assert isinstance(task.exception(), QueueFullError)
        with pytest.raises(QueueFullError):
            await turns.take("b")
        assert not any(task.done() for task in others)
        for task in (*waiting, *others):
            task.cancel()
        await settle()
        assert (turns.waiting, turns._waiting) == (0, {})

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_nothing_is_lost(seed):
    """Under random takes, waits, cancellations and returns, all items are free in the end and no taker waits."""

    async def main():
        chance = random.Random(seed)
        turns = FairPool(list(range(chance.randrange(1, 4))), chance.randrange(1, 3), 12, "wait")
        everything = sorted(turns._free)
        held: set[int] = set()

        async def one(tenant: str) -> None:
            thing = await turns.take(tenant)
            assert thing not in held
            held.add(thing)
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                held.remove(thing)
                turns.give(tenant, thing)

        tasks = []
        for _ in range(300):
            tasks.append(asyncio.ensure_future(one(chance.choice("aaab"))))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in results} <= {type(None), QueueFullError, asyncio.CancelledError}
        assert sorted(turns._free) == everything
        assert (turns.held, turns.waiting, turns._waiting) == (0, 0, {})

    run(main())
