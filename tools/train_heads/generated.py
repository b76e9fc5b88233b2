"""What a target itself says: heads are trained on it, since that is what they will have to guess."""

from __future__ import annotations

import dataclasses
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from tools.train_demo.corpus import ASSISTANT, CHAT_SHARE, EOS, SYSTEM, USER, Corpus, batch

ROWS = 192  # sequences that are generated together


@dataclasses.dataclass(frozen=True)
class Text:
    """How much of it there is.

    Attributes:
        length: tokens of a row, its prompt among them.
        counts: rows by the temperature that they are sampled with.
        held_out: of each temperature the last so many are not trained on.
    """

    length: int = 256
    counts: tuple[tuple[float, int], ...] = ((0.0, 768), (0.7, 384), (1.0, 384))
    held_out: int = 16


def prompts(data: Corpus, seed: int, count: int, longest: int) -> list[list[int]]:
    """Beginnings of texts: names of speakers, chats that wait for an answer, and pieces of the text of any length."""
    rng = np.random.default_rng([seed, count, longest])
    return [_prompt(data, rng, seed, number, longest)[:longest] for number in range(count)]


def _prompt(data: Corpus, rng: np.random.Generator, seed: int, number: int, longest: int) -> list[int]:
    kind = number % CHAT_SHARE
    if data.speeches and kind == 0:
        return _chat(data, rng)
    if data.speeches and kind == 1:
        speech = data.speeches[rng.integers(len(data.speeches))]
        return data.tokenizer.encode(f"{speech.speaker}:").ids
    (window,) = batch(data, seed, number, 1, longest)
    return window[: rng.integers(2, longest + 1)].tolist()


def _chat(data: Corpus, rng: np.random.Generator) -> list[int]:
    """A question to a character, who may be named."""
    index = int(rng.integers(len(data.speeches)))
    asked, answers = data.speeches[index], data.speeches[(index + 1) % len(data.speeches)]
    system = f"{SYSTEM}{answers.speaker}{EOS}" if rng.integers(2) else ""
    question = data.tokenizer.decode(asked.ids)
    return data.tokenizer.encode(f"{system}{USER}{question}{EOS}{ASSISTANT}").ids


def identity(target: Model) -> str:
    """What differs for another model, and for one that was trained otherwise."""
    scale = np.asarray(target.params["final_norm"]["scale"])
    return f"{target.name} {target.config} {zlib.crc32(scale.tobytes()):08x}"


def generated(
    target: Model, data: Corpus, text: Text, seed: int, folder: pathlib.Path, say: Callable[[str], None]
) -> dict[float, Int[np.ndarray, "rows length"]]:
    """Rows of tokens by temperature: a prompt and what the target says then. What ``folder`` has is read from there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"text-{zlib.crc32(repr((text, seed, identity(target))).encode()):08x}.npz"
    if not file.exists():
        rows = _generate(target, data, text, seed, say)
        arrays: dict[str, Any] = {str(temperature): each for temperature, each in rows.items()}
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, **arrays)
        partial.replace(file)
    with np.load(file, allow_pickle=False) as stored:
        return {temperature: stored[str(temperature)] for temperature, _ in text.counts}


def _generate(
    target: Model, data: Corpus, text: Text, seed: int, say: Callable[[str], None]
) -> dict[float, Int[np.ndarray, "rows length"]]:
    rows = min(ROWS, max(count for _, count in text.counts))
    settings: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": text.length, "enable_prefix_caching": False}
    found = {}
    with LLM(target.replace(draft=None), show_progress=False, **settings) as llm:
        for place, (temperature, count) in enumerate(text.counts):
            starts = prompts(data, seed + place, count, text.length // 2)
            params = [
                SamplingParams(
                    temperature=temperature, max_tokens=text.length - len(start), ignore_eos=True, seed=number
                )
                for number, start in enumerate(starts)
            ]
            outputs = llm.generate(starts, params)
            whole = [[*start, *output.outputs[0].token_ids] for start, output in zip(starts, outputs, strict=True)]
            found[temperature] = np.array(whole, np.int32)
            say(f"{target.name}: {count} rows of {text.length} tokens at temperature {temperature}")
    return found
