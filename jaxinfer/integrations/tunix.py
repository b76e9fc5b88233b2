"""google-tunix: `LLM` as the rollout engine of its trainers (docs/trainers.md). No other module imports tunix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxinfer.integrations.async_sampler import JaxinferAsyncSampler
from jaxinfer.integrations.rollouts import params_for, samples, update
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import RequestError

__all__ = ["JaxinferAsyncSampler", "JaxinferRollout", "JaxinferSampler"]


class JaxinferSampler(BaseSampler):
    """A sampler that keeps no module: `update_params` is the only way to its weights.

    Args:
        llm: an `LLM`, whose model has the trainer's architecture.
        tokenizer: the trainer's, in any form that tunix takes.
        names: convention of the weights' names, see `jaxinfer.weights.params_from`.
    """

    def __init__(self, llm: LLM, tokenizer: Any, names: str | None = None) -> None:
        self.llm, self.names = llm, names
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)

    @property
    @override
    def transformer(self) -> None:
        """No module: tunix takes a sampler with the trainer's own module for one that shares its weights."""
        return None

    @property
    @override
    def transformer_state(self) -> nnx.State:
        """The served parameters, in jaxinfer's names."""
        return nnx.State(self.llm.model.params)

    def update_params(self, updated_weights: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replace the served weights by all of a trainer's.

        Raises:
            WeightsError: they do not fit the model; the first array that does not is named.
        """
        del filter_types  # says which of its parameters the trainer sends
        update(self.llm, updated_weights, self.names)

    @override
    def tokenize(self, input_string: str) -> list[int]:
        """Return the ids of a prompt, with a BOS if the tokenizer has one."""
        ids = list(self.tokenizer.encode(input_string))
        first = self.tokenizer.bos_id()
        return ids if first is None else list(self.tokenizer.dedup_bos_ids([first, *ids]))

    @override
    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: Any = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
        *,
        eos_tokens: Sequence[int] | None = None,
        return_logprobs: bool = True,
    ) -> SamplerOutput:
        """Complete each prompt ``multi_sampling`` times; the samples of a prompt follow each other.

        Args:
            max_prompt_length: tokens to which prompts are padded; longer ones pad all to the next power of two.
            seed: an integer or a JAX key. The samples of equal prompts differ.
            return_logits: ignored: there are none in the result.
            pad_output: pad the tokens to ``max_generation_steps``.
            eos_tokens: ids that end a sample; default: the tokenizer's EOS.

        Raises:
            RequestError: an argument is rejected, naming it.
        """
        del return_logits
        for name, value in (("beam_size", beam_size), ("echo", echo or None)):
            if value is not None:
                raise RequestError(name, "is not supported")
        prompts = [
            self.tokenize(text) for text in ([input_strings] if isinstance(input_strings, str) else input_strings)
        ]
        params = params_for(
            len(prompts),
            seed_number(seed),
            max_tokens=max_generation_steps,
            temperature=temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=0 if top_k is None else top_k,
            n=multi_sampling,
            stop_token_ids=[self.tokenizer.eos_id()] if eos_tokens is None else list(eos_tokens),
        )
        found = [sample for each in samples(self.llm, prompts, params) for sample in each]
        tokens = [sample.tokens for sample in found]
        padded = left_padded(prompts, self.tokenizer.pad_id(), max_prompt_length)
        return SamplerOutput(
            text=[sample.text or self.tokenizer.decode(sample.tokens.tolist()) for sample in found],
            logits=None,
            tokens=right_padded(tokens, self.tokenizer.pad_id(), max_generation_steps) if pad_output else tokens,
            padded_prompt_tokens=np.repeat(padded, multi_sampling, axis=0),
            logprobs=[sample.logprobs for sample in found] if return_logprobs else None,
        )


class JaxinferRollout(BaseRollout):
    """The rollout engine of an `RLCluster`: ``ClusterConfig(rollout_engine=partial(JaxinferRollout, llm=llm), ...)``.

    Args:
        llm: an `LLM`, whose model has the architecture of the actor. Its settings decide over memory and devices; those
            of other engines in ``rollout_config`` are ignored.
        rollout_actor: the module whose weights are served first; None: those of ``llm``.
        tokenizer: the trainer's, in any form that tunix takes.
        names: convention of the weights' names, see `jaxinfer.weights.params_from`.

    Raises:
        WeightsError: the actor's weights do not fit the model; the first array that does not is named.
    """

    @override
    def __init__(
        self,
        *,
        llm: LLM,
        tokenizer: Any,
        rollout_actor: Any = None,
        mesh: Any = None,
        rollout_config: Any = None,
        names: str | None = None,
    ) -> None:
        del mesh, rollout_config
        self._sampler = JaxinferSampler(llm, tokenizer, names)
        if rollout_actor is not None:
            self.update_params(nnx.state(rollout_actor, nnx.Param))

    @override
    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Complete each prompt.

        Raises:
            RequestError: a prompt or a value is rejected, naming it.
        """
        output = self._sampler(
            prompts,
            max_generation_steps=rollout_config.max_tokens_to_generate,
            max_prompt_length=rollout_config.max_prompt_length,
            temperature=rollout_config.temperature,
            top_p=rollout_config.top_p,
            top_k=rollout_config.top_k,
            seed=rollout_config.seed,
            eos_tokens=rollout_config.eos_tokens,
            return_logprobs=rollout_config.return_logprobs,
            **kwargs,
        )
        return RolloutOutput(
            text=output.text,
            logits=None,
            tokens=output.tokens,
            left_padded_prompt_tokens=output.padded_prompt_tokens,
            logprobs=output.logprobs,
        )

    @override
    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "batch prompt"], completion_tokens: Int[Array, "batch completion"]
    ) -> Float[Array, "batch completion"]:
        """Return the log-probabilities of completions, as `LLM.logprobs`; 0 after the EOS.

        Args:
            prompt_tokens: padded on the left.
            completion_tokens: padded on the right after the EOS.
        """
        prompts = [without_left(row, self.pad_id()) for row in np.asarray(prompt_tokens)]
        answers = [up_to_end(row, self.eos_id()) for row in np.asarray(completion_tokens)]
        result = np.zeros(np.shape(completion_tokens), np.float32)
        for row, values in zip(result, self._sampler.llm.logprobs(prompts, answers), strict=True):
            row[: len(values)] = values
        return jnp.asarray(result)

    @override
    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replace the served weights, see `JaxinferSampler.update_params`."""
        self._sampler.update_params(params, filter_types)

    @override
    def pad_id(self) -> int:
        return int(self._sampler.tokenizer.pad_id())

    @override
    def eos_id(self) -> int:
        return int(self._sampler.tokenizer.eos_id())

    @override
    def model(self) -> None:
        """Return None, so that tunix sends each update: see `JaxinferSampler.transformer`."""
        return self._sampler.transformer


def seed_number(seed: Any) -> int | None:
    """Return the number of a seed: an integer, or a JAX key, old or new style."""
    if seed is None or isinstance(seed, int):
        return seed
    data = jax.random.key_data(seed) if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    number = 0
    for word in np.asarray(data, np.uint32).ravel().tolist():
        number = number << 32 | word
    return number % 2**63


def left_padded(rows: Sequence[Sequence[int]], pad: int, length: int | None) -> np.ndarray:
    """Return int32 ``[rows, length]``; with ``length`` None or too small, of the next power of two."""
    longest = max(map(len, rows))
    if length is None or length < longest:
        length = 1 << (longest - 1).bit_length()
    return np.asarray([[pad] * (length - len(row)) + list(row) for row in rows], np.int32)


def right_padded(rows: Sequence[np.ndarray], pad: int, length: int) -> np.ndarray:
    """Return int32 ``[rows, length]``."""
    return np.asarray([[*row.tolist(), *[pad] * (length - len(row))] for row in rows], np.int32)


def without_left(row: np.ndarray, pad: int) -> list[int]:
    """Return a row of ids without its padding on the left."""
    kept = np.flatnonzero(row != pad)
    return row[kept[0] :].tolist() if kept.size else []


def up_to_end(row: np.ndarray, eos: int) -> list[int]:
    """Return a row of ids up to its first EOS; all of it without one: a sample may hold the id of padding."""
    ends = np.flatnonzero(row == eos)
    ids: list[int] = (row[: ends[0] + 1] if ends.size else row).tolist()
    return ids
