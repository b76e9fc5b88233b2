"""`jaxinfer.integrations.tunix` against tunix' own rollout of the same weights. Needs google-tunix; skips without."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxinfer.models.model import abstract
from jaxinfer.sampling_params import RequestError
from jaxinfer.weights import WeightsError, params_from
from tests.integrations.rollout_llm import RolloutLLM
from tests.weights.trainers.models import assert_equal
from tools.oracle.trainers import TUNIX, tunix_model

pytest.importorskip("tunix")
from tunix.rl import rl_cluster
from tunix.rl.rollout.base_rollout import BaseRollout, CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from jaxinfer.integrations import tunix

PROMPTS = ["bcd", "hfe b", "mlkj"]
CASE = "qwen3"


class Letters:
    """A tokenizer: token 0 is padding, 1 ends a text, and letters follow."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [ord(letter) - ord("a") + 2 for letter in text if letter.isalpha()]

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(each - 2 + ord("a")) for each in ids if each > 1)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


@pytest.fixture(scope="module")
def actor() -> nnx.Module:
    return tunix_model(CASE)


@pytest.fixture(scope="module")
def llm(actor: nnx.Module) -> Iterator[RolloutLLM]:
    model = abstract(TUNIX[CASE], "float32")
    params = jax.tree.map(jnp.asarray, params_from(model, nnx.state(actor, nnx.Param)))
    with RolloutLLM(model.replace(params=params)) as made:
        yield made


@pytest.fixture(scope="module")
def vanilla(actor: nnx.Module) -> VanillaRollout:
    return VanillaRollout(actor, Letters(), CacheConfig(cache_size=48, num_layers=2, num_kv_heads=2, head_dim=4))


@pytest.fixture
def rollout(llm: RolloutLLM) -> tunix.JaxinferRollout:
    llm.updates.clear()
    return tunix.JaxinferRollout(llm=llm, tokenizer=Letters())


def test_greedy_rollouts_are_those_of_tunix(rollout: tunix.JaxinferRollout, vanilla: VanillaRollout):
    config = RolloutConfig(
        max_tokens_to_generate=8, temperature=0.0, top_p=None, max_prompt_length=8, return_logprobs=True
    )
    found, expected = rollout.generate(PROMPTS, config), vanilla.generate(PROMPTS, config)
    assert found.text == expected.text
    assert [each.tolist() for each in found.tokens] == [each.tolist() for each in expected.tokens]
    np.testing.assert_array_equal(found.left_padded_prompt_tokens, expected.left_padded_prompt_tokens)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_log_probabilities_are_those_of_tunix(rollout: tunix.JaxinferRollout, vanilla: VanillaRollout):
    prompts = jnp.asarray([[0, 0, 3, 4], [5, 6, 7, 8]])
    completions = jnp.asarray([[9, 10, 1, 0, 0], [11, 12, 13, 2, 3]])
    found, expected = (each.get_per_token_logps(prompts, completions) for each in (rollout, vanilla))
    mask = np.asarray([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    np.testing.assert_allclose(np.asarray(found)[mask], np.asarray(expected)[mask], atol=1e-5)
    assert not np.asarray(found)[~mask].any()


def test_the_weights_of_the_actor_are_served_first(llm: RolloutLLM, actor: nnx.Module):
    llm.updates.clear()
    made = functools.partial(tunix.JaxinferRollout, llm=llm)  # as a `ClusterConfig` has it
    assert issubclass(made.func, BaseRollout)
    made(rollout_actor=actor, tokenizer=Letters(), mesh=None, rollout_config=RolloutConfig())
    assert_equal(llm.updates[0].params, params_from(llm.model, nnx.state(actor, nnx.Param)))


def test_updates_are_converted_to_the_dtype_of_the_model(
    rollout: tunix.JaxinferRollout, llm: RolloutLLM, actor: nnx.Module
):
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(actor, nnx.Param))
    with jax.transfer_guard("disallow_explicit"):  # as tunix synchronises on CPUs
        rollout.update_params(state, (nnx.Param,))
    expected = params_from(llm.model, state, cast=True)
    assert_equal(llm.updates[0].params, expected)


def test_adapters_alone_are_refused(rollout: tunix.JaxinferRollout, llm: RolloutLLM):
    adapter = nnx.State({"layers": {0: {"attn": {"q_proj": {"w_lora_a": nnx.LoRAParam(jnp.ones((8, 2)))}}}}})
    with pytest.raises(WeightsError) as error:
        rollout.update_params(adapter, (nnx.LoRAParam,))
    assert error.value.name == "layers.0.attn.q_proj.w_lora_a"
    assert not llm.updates


def test_tunix_takes_the_weights_for_its_own_copy(rollout: tunix.JaxinferRollout):
    assert rollout.model() is None
    assert (rollout.pad_id(), rollout.eos_id()) == (0, 1)


def test_a_group_of_equal_prompts_has_different_samples(rollout: tunix.JaxinferRollout):
    config = RolloutConfig(max_tokens_to_generate=8, temperature=1.0, seed=jax.random.key(3))
    one, other = (rollout.generate(["abc"] * 4, config) for _ in range(2))
    assert [each.tolist() for each in one.tokens] == [each.tolist() for each in other.tokens]
    assert len({tuple(each.tolist()) for each in one.tokens}) > 1
    assert one.logprobs is None


def test_samples_of_a_prompt_follow_each_other(llm: RolloutLLM):
    sampler = tunix.JaxinferSampler(llm, Letters())
    output = sampler(["ab", "abcde"], 4, multi_sampling=2, temperature=1.0, pad_output=True, eos_tokens=[])
    assert np.shape(output.tokens) == (4, 4)
    assert output.padded_prompt_tokens.tolist()[0] == output.padded_prompt_tokens.tolist()[1] == [0] * 6 + [2, 3]
    assert output.padded_prompt_tokens.shape == (4, 8)
    assert sampler.transformer is None
    assert isinstance(sampler.transformer_state, nnx.State)


@pytest.mark.parametrize("name", ["beam_size", "echo"])
def test_what_is_not_supported_is_named(llm: RolloutLLM, name: str):
    with pytest.raises(RequestError) as error:
        tunix.JaxinferSampler(llm, Letters())("ab", 4, **{name: True})
    assert error.value.field == name


def test_a_cluster_rolls_out_and_synchronises(llm: RolloutLLM, actor: nnx.Module):
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"))
    rollouts = RolloutConfig(max_tokens_to_generate=6, max_prompt_length=8, temperature=1.0, return_logprobs=True)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
        rollout_engine=functools.partial(tunix.JaxinferRollout, llm=llm),
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(actor_optimizer=optax.sgd(1e-3), eval_every_n_steps=9, max_steps=9),
        rollout_config=rollouts,
    )
    cluster = rl_cluster.RLCluster(actor=actor, reference=tunix_model(CASE), tokenizer=Letters(), cluster_config=config)
    llm.updates.clear()
    cluster.sync_weights()
    assert_equal(llm.updates[0].params, params_from(llm.model, nnx.state(actor, nnx.Param)))
    output = cluster.generate(["abc", "de"])
    completions = np.zeros((2, 6), np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    found = cluster.get_old_per_token_logps(jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions))
    for row, expected in zip(np.asarray(found), output.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5)
