"""GRPO on the demo model, in one process: the sampler serves the trainer's own arrays, and has its bits.

    python examples/grpo.py [--steps 20] [--trainer served|apply] [--json FILE]

The reward is a program: the share of the letters of a completion that are "e". Each step samples a group of completions
for each prompt, makes one gradient step (Shao et al. 2024, https://arxiv.org/abs/2402.03300) with optax, and serves the
new weights. With ``--trainer served`` the loss takes its log-probabilities from `Model.logprobs`, by the sampler's own
programs: the difference to those of the sampler is exactly 0. With ``--trainer apply`` it takes them from `apply`,
as trainers elsewhere do: about 1e-5.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer import LLM, SamplingParams, load_model

PROMPTS = ("To be, or", "My lord,", "What is", "The king", "I have", "Come,", "If thou", "O, she")
GROUP, TOKENS, CLIP, RATE = 8, 24, 0.2, 1e-3
Logprobs = Callable[[Any, "Rollouts"], Array]


class Rollouts(NamedTuple):
    """Completions of all groups: prompt and completion in a row, padded with zeros."""

    tokens: Int32[Any, "batch time"]
    prompt_lengths: Int32[Any, " batch"]
    lengths: Int32[Any, " batch"]
    served: Float32[Any, "batch positions"]  # log-probability of each generated token; 0 elsewhere
    rewards: Float32[Any, "prompts group"]

    @property
    def generated(self) -> Bool[Any, "batch positions"]:
        at = np.arange(self.tokens.shape[1] - 1)
        return (at >= self.prompt_lengths[:, None] - 1) & (at < self.lengths[:, None] - 1)

    @property
    def advantages(self) -> Float32[Any, " batch"]:
        """Rewards relative to their group."""
        centred = self.rewards - self.rewards.mean(axis=1, keepdims=True)
        return (centred / (self.rewards.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def reward(text: str) -> float:
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return letters.count("e") / max(1, len(letters))


def sample(llm: LLM, step: int) -> Rollouts:
    params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=TOKENS, ignore_eos=True, seed=step, logprobs=0)
    outputs = llm.generate(list(PROMPTS), params, progress=False)
    rows = [(whole.prompt_token_ids, sample) for whole in outputs for sample in whole.outputs]
    time = max(len(prompt) for prompt, _ in rows) + TOKENS
    tokens, served = np.zeros((len(rows), time), np.int32), np.zeros((len(rows), time - 1), np.float32)
    for row, (prompt, completion) in enumerate(rows):
        arrays, start = completion.arrays, len(prompt)
        tokens[row, :start], tokens[row, start : start + TOKENS] = prompt, arrays.token_ids
        served[row, start - 1 : start - 1 + TOKENS] = arrays.logprobs
    begins = np.array([len(prompt) for prompt, _ in rows], np.int32)
    rewards = np.array([[reward(sample.text) for sample in whole.outputs] for whole in outputs], np.float32)
    return Rollouts(tokens, begins, begins + TOKENS, served, rewards)


def loss(logprobs: Logprobs, params: Any, rollouts: Rollouts) -> tuple[Array, Array]:
    """Return GRPO's loss, and the log-probabilities of the tokens."""
    found = logprobs(params, rollouts)
    ratio = jnp.exp(found - rollouts.served)
    gain = rollouts.advantages[:, None]
    clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
    return -jnp.mean(clipped, where=rollouts.generated), found


def train(steps: int, trainer: str) -> list[dict[str, float]]:
    """Train for ``steps`` steps; return reward, difference and KL divergence of each."""
    model = load_model("demo", "float32", show_progress=False)
    llm = LLM(model, max_num_seqs=32, max_model_len=64, show_progress=False)
    programs = llm.served_programs()

    def by_programs(params: Any, rollouts: Rollouts) -> Array:
        ends = {"prompt_lengths": rollouts.prompt_lengths, "lengths": rollouts.lengths}
        return model.logprobs(params, rollouts.tokens, like=programs, **ends)

    def by_apply(params: Any, rollouts: Rollouts) -> Array:
        logits = jax.nn.log_softmax(model.apply(params, rollouts.tokens)[:, :-1])
        found = jnp.take_along_axis(logits, rollouts.tokens[:, 1:, None], axis=2)[..., 0]
        return jnp.where(rollouts.generated, found, 0)

    logprobs = {"served": by_programs, "apply": by_apply}[trainer]
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, logprobs), has_aux=True))
    optimizer, params = optax.adam(RATE), model.params
    state, history = optimizer.init(params), list[dict[str, float]]()
    for step in range(steps):
        begun, rollouts = time.perf_counter(), sample(llm, step)
        (_, found), grads = gradient(params, rollouts)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        llm.update_weights(params)
        history.append(report(step, rollouts, np.asarray(found), time.perf_counter() - begun))
    return history


def report(step: int, rollouts: Rollouts, found: np.ndarray, seconds: float) -> dict[str, float]:
    difference = (found - rollouts.served)[rollouts.generated].astype(np.float64)
    row = {
        "reward": float(rollouts.rewards.mean()),
        "difference": float(np.abs(difference).max()),
        "kl": float(np.mean(np.exp(difference) - 1 - difference)),  # k3 of http://joschu.net/blog/kl-approx.html
    }
    curves = f"reward {row['reward']:.3f}  difference {row['difference']:.1e}  kl {row['kl']:.1e}"
    sys.stdout.write(f"step {step:3}  {curves}  {seconds:.1f} s\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trainer", choices=("served", "apply"), default="served")
    parser.add_argument("--json", type=pathlib.Path, help="write the curves here")
    args = parser.parse_args()
    history = train(args.steps, args.trainer)
    if args.json is not None:
        args.json.write_text(json.dumps({"trainer": args.trainer, "steps": history}, indent=1) + "\n")


if __name__ == "__main__":
    main()
