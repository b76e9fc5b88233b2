"""Waiting times of requests where many adapters compete for few slots."""

from __future__ import annotations

import dataclasses
import math
import random
from array import array

import pytest

from jaxinfer.config import EngineConfig, resolve
from jaxinfer.engine.core import EngineLoop, new_kv
from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import CacheSpec, LayerSpec, Request
from tests.lora.fakes import PARTS, Folders, make_store

SLOTS, ROWS, REGISTERED = 8, 48, 1000
SHORT, LONG = 10, 40  # minimum and maximum tokens of an answer


class Sayer:
    """A runner whose every row samples token 1."""

    def launch(self, plan: StepPlan) -> StepPlan | None:
        return plan if plan else None

    def read(self, launched: StepPlan | None) -> StepResult | None:
        if launched is None:
            return None
        count = len(launched.decodes)
        return StepResult(launched, [[1] for _ in range(count)], [()] * count, [[] for _ in launched.prefills])


@dataclasses.dataclass
class Asked:
    """A request: its adapter, the step of its arrival, the steps to its first token, and its fair bound of them."""

    adapter: str
    is_hot: bool
    came: int
    fair: float
    waited: int | None = None


class Crowd:
    """Users with one open request each: ``users`` draw adapters by Zipf's law, ``hot`` ones use as many adapters as
    there are slots, so that no slot would ever be free."""

    def __init__(self, users: int, hot: int, exponent: float, seed: int, policy: str = "fcfs") -> None:
        self.rng, self.users, self.hot = random.Random(seed), users, hot
        self.weights = array("d", [rank**-exponent for rank in range(1, REGISTERED + 1)])
        folders = Folders(**{f"a{rank}": rank for rank in range(1, REGISTERED + 1)})
        self.store, _ = make_store(folders, 2 * SLOTS)
        self.names = list(folders.contents)
        for name in self.names:
            self.store.load(name, name)
        config = EngineConfig(
            enable_lora=True,
            scheduling_policy=policy,
            max_loras=SLOTS,
            max_num_seqs=ROWS,
            page_size=16,
            num_pages=8 * ROWS,
            max_model_len=128,
            prefill_sizes=(16,),
            max_num_batched_tokens=512,
        )
        cache = CacheSpec((LayerSpec(None),), kv_heads=1, head_dim=8)
        engine = resolve(config, cache, max_position=128, itemsize=4)
        self.core = EngineLoop(engine, new_kv(engine), Sayer(), loras=self.store)
        self.step, self.asked, self.open = 0, dict[str, Asked](), dict[str, Asked]()

    def ask(self, is_hot: bool) -> None:
        self.ask_of(
            self.names[len(self.asked) % SLOTS] if is_hot else self.rng.choices(self.names, self.weights)[0], is_hot
        )

    def ask_of(self, name: str, is_hot: bool = False) -> Asked:
        wanted = {each.adapter for each in self.open.values()} | {name}
        key, lora = str(len(self.asked)), self.store.resolve(name)
        most = self.rng.randrange(SHORT, LONG)
        self.core.add(Request(key, (1, 2, 3, 4), SamplingParams(seed=0, max_tokens=most), lora=lora))
        asked = self.asked[key] = self.open[key] = Asked(name, is_hot, self.step, fair_share(len(wanted)))
        return asked

    def run(self, steps: int) -> list[Asked]:
        """Run steps and return all requests so far, finished or not."""
        for step in range(self.step, self.step + steps):
            self.step = step
            while (hot := sum(each.is_hot for each in self.open.values())) < self.hot:
                self.ask(True)
            while len(self.open) - hot < self.users:
                self.ask(False)
            for delta in self.core.step():
                asked = self.asked[delta.request_id]
                asked.waited = self.step - asked.came if asked.waited is None else asked.waited
                if delta.finish_reason is not None:
                    del self.open[delta.request_id]
        self.core.check()
        return list(self.asked.values())


def fair_share(wanted: int) -> float:
    """Return the steps that a request waits where ``wanted`` adapters take turns, one adapter per slot and turn, and
    each generates its longest answer."""
    turn = SLOTS * PARTS + LONG
    return math.ceil(wanted / SLOTS) * turn


def ratios(asked: list[Asked], now: int) -> list[float]:
    return [((now - each.came) if each.waited is None else each.waited) / each.fair for each in asked]


@pytest.mark.parametrize(
    ("users", "hot", "exponent"),
    [(64, 0, 1.0), (128, 0, 1.0), (160, 0, 2.0), (4, 40, 1.0), (32, 40, 1.0), (1, 60, 1.0)],
)
def test_a_thousand_adapters_in_eight_slots_starve_nobody(users: int, hot: int, exponent: float, seed: int) -> None:
    crowd = Crowd(users, hot, exponent, seed)
    asked = crowd.run(2000)
    waits = ratios(asked, crowd.step)
    assert len({each.adapter for each in asked}) > 2 * SLOTS
    assert max(waits) <= 2.0, max(waits)


def test_a_rare_adapter_does_not_wait_behind_a_popular_one_of_its_tenant(seed: int) -> None:
    crowd = Crowd(0, 0, 1.0, seed, policy="fair")
    popular, rare = crowd.names[:2]
    for _ in range(20 * ROWS):
        crowd.ask_of(popular)
    crowd.run(LONG)
    asked = crowd.ask_of(rare)
    crowd.run(round(2 * asked.fair))
    assert asked.waited is not None
    assert asked.waited <= asked.fair
    assert sum(each.waited is None for each in crowd.open.values()) > 10 * ROWS, "the popular one's still wait"
