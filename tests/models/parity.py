"""Comparison of jaxinfer with the oracle's golden files: as a function (`apply`) and as a server (`LLM.generate`).

The rule: at prefill and at each decode step, the largest logit error against transformers in float64 is at most twice
that of transformers in float32, plus 1e-6; greedy ids are equal.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams, load_model
from jaxinfer.formats.multimodal import text_model
from jaxinfer.models.model import Model
from jaxinfer.outputs import CompletionOutput, LogprobsDict, RequestOutput
from tools.oracle.golden import Golden, write_checkpoint

SLACK = 1e-6
TOP = 20
GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "models"
LIVE_ROOM = 3.0


def allowed(error: np.ndarray | float) -> np.ndarray:
    """Return the largest allowed logit error where transformers' own float32 error is ``error``."""
    return 2.0 * np.asarray(error) + SLACK


def load_case(golden: Golden, folder: pathlib.Path) -> Model:
    """Load the case from a Hugging Face folder, in float32."""
    write_checkpoint(golden, folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(text_model(golden.config)["vocab_size"])))
    return load_model(str(folder), dtype="float32", show_progress=False)


def tokenizer_json(size: int) -> dict:
    model = {"type": "WordLevel", "vocab": {f"w{index}": index for index in range(size)}, "unk_token": "w0"}
    split = {"type": "WhitespaceSplit"}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}


def teacher_forced(model: Model, golden: Golden) -> np.ndarray:
    """Return a float64 copy of `apply`'s logits [T + N, V] over the prompt and all but the last greedy id."""
    tokens = jnp.asarray([golden.prompt + golden.greedy[:-1]])
    return np.asarray(jax.jit(model.apply)(model.params, tokens)[0], np.float64)


def logit_faults(golden: Golden, logits: np.ndarray, room: float = 1.0) -> list[str]:
    """Return the deviations of logits [T + N, V]; empty if they pass.

    Args:
        room: factor by which errors may exceed `allowed`.
    """
    length = len(golden.prompt)
    prefill = float(np.abs(logits[:length] - golden.prefill).max())
    faults = _beyond("prefill", prefill, room * allowed(golden.prefill_error))
    errors, bounds = np.abs(logits[length:] - golden.decode).max(-1), room * allowed(golden.decode_error)
    for step, (error, bound) in enumerate(zip(errors, bounds, strict=True)):
        faults += _beyond(f"decode step {step}", float(error), bound)
    chosen = logits[length - 1 :].argmax(-1).tolist()
    return faults + ([] if chosen == golden.greedy else [f"greedy ids {chosen} are not {golden.greedy}"])


def live_faults(golden: Golden, logits: np.ndarray) -> list[str]:
    """Return the deviations of logits of weights drawn from a fresh seed.

    Transformers' own error differs tenfold between the steps of a case. Where it happens to be small, rounding alone
    breaks the rule, once in thousands of steps. So steps may exceed it by `LIVE_ROOM`; prompt and mean step may not.
    """
    length = len(golden.prompt)
    prefill, decode = np.abs(logits[:length] - golden.prefill).max(), np.abs(logits[length:] - golden.decode)
    faults = _beyond("prefill", float(prefill), allowed(golden.prefill_error))
    faults += _beyond("mean of decode", float(decode.max(-1).mean()), allowed(np.mean(golden.decode_error)))
    return faults or logit_faults(golden, logits, LIVE_ROOM)


def _beyond(where: str, error: float, bound: np.ndarray) -> list[str]:
    # `<=`, so that a NaN is a deviation
    return [] if error <= bound else [f"{where}: off by {error:.2e}, allowed {float(bound):.2e}"]


def serve(model: Model, golden: Golden) -> RequestOutput:
    """Run the case in an engine. Pages and chunks are small, so that prompts and windows cross their boundaries."""
    llm = LLM(model=model, max_num_seqs=2, max_model_len=256, page_size=16, prefill_sizes=(32,))
    params = SamplingParams(
        temperature=0.0, max_tokens=len(golden.greedy), logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True
    )
    return llm.generate([golden.prompt], params)[0]


def served_faults(golden: Golden, served: RequestOutput, room: float = 1.0) -> list[str]:
    """Return the deviations of a request's ids and logprobs; empty if they pass.

    A logprob is a logit minus the logarithm of a sum, and each of the two moves by at most the largest logit error.
    """
    output = served.outputs[0]
    if output.token_ids != golden.greedy:
        return [f"served ids {output.token_ids} are not {golden.greedy}"]
    return _prompt_faults(golden, served) + _output_faults(golden, output, room)


def _prompt_faults(golden: Golden, served: RequestOutput) -> list[str]:
    positions = served.prompt_logprobs or []
    if len(positions) != len(golden.prompt) or positions[0] is not None:
        return [f"prompt_logprobs has {len(positions)} positions for {len(golden.prompt)} tokens"]
    faults = []
    for at, token in enumerate(golden.prompt[1:]):
        got, bound = positions[at + 1], 2.0 * allowed(golden.prefill_error)
        faults += _logprob_faults(f"prompt position {at + 1}", got or {}, token, golden.prefill[at], bound)
    return faults


def _output_faults(golden: Golden, output: CompletionOutput, room: float) -> list[str]:
    rows = np.concatenate([golden.prefill[-1:], golden.decode])
    bounds = 2.0 * room * allowed(np.concatenate([[golden.prefill_error], golden.decode_error]))
    positions = output.logprobs or []
    if len(positions) != len(rows):
        return [f"{len(positions)} positions with logprobs for {len(rows)} tokens"]
    faults = []
    for at, got in enumerate(positions):
        faults += _logprob_faults(f"token {at}", got, golden.greedy[at], rows[at], bounds[at])
    return faults


def _logprob_faults(where: str, got: LogprobsDict, token: int, logits: np.ndarray, bound: np.ndarray) -> list[str]:
    expected = logits - logits.max()
    expected = expected - np.log(np.exp(expected).sum())
    if token not in got or len(got) < min(TOP, len(logits)):
        return [f"{where}: logprobs of {sorted(got)} lack token {token} or some of the {TOP} likeliest"]
    errors = [abs(candidate.logprob - expected[index]) for index, candidate in got.items()]
    return _beyond(f"{where}: logprobs", float(np.max(errors)), bound)  # np.max, unlike max, keeps a NaN
