"""`jaxinfer check-on-policy`: compare the log-probabilities that an engine serves with those of a training step."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from jaxinfer.cli.app import run as run_command
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution.on_policy import GivenTokens, ServedPrograms, applied_logprobs
from jaxinfer.llm import LLM
from jaxinfer.loading import LOADING_ERRORS
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared
from jaxinfer.lora.parts import random_adapter
from jaxinfer.models.model import Model
from jaxinfer.outputs import RequestOutput
from jaxinfer.quant.banks import lora_targets
from jaxinfer.sampling_params import RequestError, SamplingParams

AT_ONCE = 16  # sequences of a call
_NAME = "check-on-policy"  # of the adapter
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of a trainer's log-probabilities from the served ones.

    Attributes:
        tokens: generated tokens that were compared.
        largest: greatest magnitude of a difference.
        kl: mean of ``exp(d) - 1 - d`` over the differences ``d``, the estimator k3 of the KL divergence.
    """

    tokens: int
    largest: float
    kl: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a check.

    Attributes:
        exact: of `Model.logprobs`; None: refused.
        applied: of `Model.apply`.
        refused: why by what: requests whose log-probabilities `Model.logprobs` does not reproduce.
        adapted: of `Model.logprobs` for requests with an adapter, which the others exclude; None: there are none.
    """

    exact: Difference | None
    applied: Difference
    refused: dict[str, str]
    adapted: Difference | None = None

    @property
    def passed(self) -> bool:
        found = [each.largest for each in (self.exact, self.adapted) if each is not None]
        return self.exact is not None and max(found) == 0


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Generated sequences with their served log-probabilities, padded on the right."""

    tokens: Int[np.ndarray, "batch time"]
    prompt_lengths: Int[np.ndarray, " batch"]
    lengths: Int[np.ndarray, " batch"]
    served: Float32[np.ndarray, "batch positions"]

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Sequences:
        """Collect the samples of outputs with ``logprobs``."""
        pairs = [(output.prompt_token_ids, sample) for output in outputs for sample in output.outputs]
        prompts = np.array([len(prompt) for prompt, _ in pairs], np.int32)
        lengths = prompts + np.array([len(sample.token_ids) for _, sample in pairs], np.int32)
        longest = lengths.max(initial=1)
        tokens, served = np.zeros((len(pairs), longest), np.int32), np.zeros((len(pairs), longest - 1), np.float32)
        for row, (prompt, sample) in enumerate(pairs):
            assert sample.logprobs is not None
            chosen = [of[token].logprob for token, of in zip(sample.token_ids, sample.logprobs, strict=True)]
            tokens[row, : lengths[row]] = [*prompt, *sample.token_ids]
            served[row, prompts[row] - 1 : lengths[row] - 1] = chosen
        return cls(tokens, prompts, lengths, served)

    def batches(self, size: int) -> Iterator[Sequences]:
        """Cut into batches of one shape; the last one is filled up with sequences without generated tokens."""
        missing = -len(self.tokens) % size
        tokens, served = (np.pad(x, ((0, missing), (0, 0))) for x in (self.tokens, self.served))
        begins, ends = (np.pad(x, (0, missing), constant_values=1) for x in (self.prompt_lengths, self.lengths))
        for at in range(0, len(tokens), size):
            part = slice(at, at + size)
            yield Sequences(tokens[part], begins[part], ends[part], served[part])

    def difference(self, compute: Callable[..., Any]) -> Difference:
        """Compare with a function of tokens, prompt lengths and lengths."""
        count, largest, kl = 0, 0.0, 0.0
        for each in self.batches(AT_ONCE):
            found = np.asarray(compute(each.tokens, each.prompt_lengths, each.lengths), np.float64)
            at = np.arange(found.shape[1])
            generated = (at >= each.prompt_lengths[:, None] - 1) & (at < each.lengths[:, None] - 1)
            differences = (found - each.served)[generated]
            count, kl = count + differences.size, kl + float((np.expm1(differences) - differences).sum())
            # A NaN is a difference.
            largest = max(largest, float(np.nan_to_num(np.abs(differences), nan=np.inf).max(initial=0)))
        return Difference(count, largest, kl / max(count, 1))


def check(llm: LLM, sequences: int, max_tokens: int, seed: int = 0) -> Report:
    """Generate about ``sequences`` sequences, and compare their log-probabilities. If the engine serves adapters, every
    other request has one, with random arrays.

    Args:
        max_tokens: tokens that each sequence generates.
    """
    programs, model, adapter = llm.served_programs(), llm.model, _adapter_of(llm, seed)
    plain, adapted = _generated(llm, *requests(llm, sequences, max_tokens, seed), adapter)
    applied = jax.jit(lambda params, *given: applied_logprobs(model, params, GivenTokens(*given)))
    refused, exact, of_adapted = dict(programs.exceptions), None, None
    if (why := programs.refusal()) is not None:
        refused = {"all requests": why, **refused}
    else:
        exact = plain.difference(_training_step(model, programs, None))
        of_adapted = None if adapter is None else adapted.difference(_training_step(model, programs, adapter))
    return Report(exact, plain.difference(lambda *given: applied(model.params, *given)), refused, of_adapted)


def _adapter_of(llm: LLM, seed: int) -> Adapter | None:
    """Return a random adapter of all weights that the engine has banks for, of half the largest rank; None: there are
    no banks."""
    engine, specs = llm.engine.config, declared(llm.model)
    if not engine.lora_slots:
        return None
    rank = max(1, engine.max_lora_rank // 2)
    return random_adapter(lora_targets(specs, specs, rank, engine.lora_target_modules), seed)


def _generated(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], adapter: Adapter | None
) -> tuple[Sequences, Sequences]:
    """Run requests in one batch; return the sequences without the adapter, and those with it."""
    if adapter is None:
        return Sequences.of(llm.generate(prompts, params, progress=False)), Sequences.of([])
    llm.load_lora(_NAME, adapter)
    names = [None if number % 2 else _NAME for number in range(len(prompts))]
    outputs = llm.generate(prompts, params, lora=names, progress=False)
    llm.unload_lora(_NAME)
    return Sequences.of(outputs[1::2]), Sequences.of(outputs[::2])


def _training_step(model: Model, programs: ServedPrograms, adapter: Adapter | None) -> Callable[..., Array]:
    """Return `Model.logprobs` as a trainer runs it: compiled with a loss and its gradient."""

    def loss(
        params: Any, lora: Adapter | None, tokens: Array, prompt_lengths: Array, lengths: Array
    ) -> tuple[Array, Array]:
        found = model.logprobs(params, tokens, like=programs, prompt_lengths=prompt_lengths, lengths=lengths, lora=lora)
        return found.mean(), found

    step = jax.jit(jax.grad(loss, (0, 1), has_aux=True, allow_int=True))
    return lambda *given: step(model.params, adapter, *map(jnp.asarray, given))[1]


def requests(llm: LLM, sequences: int, max_tokens: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of random tokens, a third of them with a common prefix, and mixed sampling parameters."""
    rng, engine, vocab = np.random.default_rng(seed), llm.engine.config, llm.model.config.vocab_size
    longest = min(engine.max_model_len - max_tokens, 2 * engine.prefill_sizes[-1] + engine.page_size)
    if longest < 1:
        raise RequestError("max_tokens", f"={max_tokens} leaves no room for a prompt in {engine.max_model_len} tokens")
    shared, prompts, params = rng.integers(0, vocab, longest).tolist(), list[list[int]](), list[SamplingParams]()
    for kind in itertools.cycle(_KINDS):
        own = {**kind, "logprobs": 0, "max_tokens": max_tokens, "seed": seed + len(prompts), "ignore_eos": True}
        params.append(SamplingParams(**own))
        length = int(np.exp(rng.uniform(0, np.log(longest))).round())
        kept = int(rng.integers(length)) if len(prompts) % 3 == 0 else 0
        prompts.append(shared[:kept] + rng.integers(0, vocab, length - kept).tolist())
        if sum(each.n for each in params) >= sequences:
            return prompts, params
    raise AssertionError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("check-on-policy", arguments)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if all log-probabilities are bitwise equal, 1 if not, or 2 with one sentence on stderr for an
    error."""
    try:
        with LLM(
            args.model,
            args.dtype,
            family=args.family,
            config=EngineConfig(**args.settings),
            check_finite=args.check_finite,
            compilation_cache_dir=args.compilation_cache_dir,
        ) as llm:
            report = check(llm, args.sequences, args.max_tokens, args.seed)
    except (*LOADING_ERRORS, EngineConfigError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(report)) if args.json else "\n".join(lines(report)))
    return 0 if report.passed else 1


def lines(report: Report) -> Iterator[str]:
    """Yield a report as text."""
    yield f"{'':16} {'tokens':>8} {'largest difference':>20} {'k3 KL':>12}"
    rows = (("Model.logprobs", report.exact), ("with an adapter", report.adapted), ("Model.apply", report.applied))
    for name, found in rows:
        if found is not None:
            yield f"{name:16} {found.tokens:8} {found.largest:20.3g} {found.kl:12.3g}"
    for what, why in report.refused.items():
        yield f"refused, {what}: {why}"


if __name__ == "__main__":
    sys.exit(main())
