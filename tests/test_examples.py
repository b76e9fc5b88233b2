"""The example of reinforcement learning, with few steps."""

import importlib.util
import pathlib
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def grpo(repo: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo", repo / "examples/grpo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sampler_and_trainer_have_the_same_bits(grpo):
    history = grpo.train(2, "served")
    assert [(step["difference"], step["kl"]) for step in history] == [(0.0, 0.0)] * 2
    assert len({step["reward"] for step in history}) == 2  # the weights change what is sampled


@pytest.mark.slow
def test_a_trainer_with_apply_has_not(grpo):
    history = grpo.train(2, "apply")
    assert all(0 < step["difference"] < 1e-4 for step in history)


@pytest.mark.slow
def test_the_reward_rises(grpo):
    rewards = [step["reward"] for step in grpo.train(15, "served")]
    assert sum(rewards[-3:]) > 1.1 * sum(rewards[:3])
