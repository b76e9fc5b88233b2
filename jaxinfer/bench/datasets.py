"""Data sets of requests: generated endlessly from a description, or read from a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.bench import traces
from jaxinfer.bench.prompts import WORDS, Prompts
from jaxinfer.bench.target import Item

SONNET_LINE_WORDS = 8
MAX_FILE_BYTES = 4 << 30


class DatasetError(ValueError):
    """Requests that cannot be made with these options. The message gives the reason."""


class Lengths(NamedTuple):
    """Range of lengths in tokens, uniform, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


DEFAULT_LENGTHS = Lengths(128, 128)


@dataclasses.dataclass(frozen=True)
class Asked:
    """Description of the requests, from the options.

    Attributes:
        path: file of the data set.
        input, output: lengths; for the shared-prefix set ``input`` is the length after the prefix.
        prefix_len, groups: number of shared tokens, and of different prefixes.
        scale: factor for Azure's lengths; None: so that the longest fits. ``block_tokens``: tokens of a Mooncake block.
        tokens_per_word: for the lengths of texts.
        max_len: maximum of prompt and output; None: unbounded.
    """

    prompts: Prompts
    tokens_per_word: float
    max_len: int | None = None
    path: pathlib.Path | None = None
    input: Lengths = DEFAULT_LENGTHS
    output: Lengths | None = None
    prefix_len: int = 0
    groups: int = 1
    scale: float | None = None
    block_tokens: int = traces.MOONCAKE_BLOCK

    @classmethod
    def of(
        cls, options: argparse.Namespace, prompts: Prompts, tokens_per_word: float, max_len: int | None = None
    ) -> Asked:
        """Return the description that the options of `jaxinfer.bench.options.add_dataset` give."""
        return cls(
            prompts,
            tokens_per_word,
            max_len,
            options.dataset_path,
            options.input_len,
            options.output_len,
            options.prefix_len,
            options.groups,
            options.scale,
            options.block_tokens,
        )

    @property
    def outputs(self) -> Lengths:
        return self.output or DEFAULT_LENGTHS


def random(spec: Asked, seed: int) -> Iterator[Item]:
    """Yield prompts without shared prefixes."""
    return shared_prefix(dataclasses.replace(spec, prefix_len=0, groups=1), seed)


def shared_prefix(spec: Asked, seed: int) -> Iterator[Item]:
    """Yield prompts that each begin with one of ``groups`` prefixes."""
    rng, prompts = np.random.default_rng(seed), spec.prompts
    nothing = np.zeros(0, np.int32)
    prefixes = [prompts.draw(spec.prefix_len, rng) if spec.prefix_len else nothing for _ in range(spec.groups)]
    while True:
        prefix = prefixes[int(rng.integers(spec.groups))]
        suffix = prompts.draw(spec.input.draw(rng), rng)
        whole = np.concatenate([prefix, suffix])
        yield Item(prompts.build(whole), prompts.length(whole), spec.outputs.draw(rng))


def sonnet(spec: Asked, seed: int) -> Iterator[Item]:
    """Yield lines of a text: the first ones, up to ``prefix_len`` tokens, in each prompt, followed by random ones.

    Without a file the lines are made of random words.
    """
    rng = np.random.default_rng(seed)
    lines = _lines(spec.path) if spec.path is not None else _made_lines(np.random.default_rng((seed, 1)))
    sizes = [len(line.split()) * spec.tokens_per_word for line in lines]
    shared = int(np.searchsorted(np.cumsum(sizes), spec.prefix_len, side="right"))
    while True:
        chosen, length = list(range(shared)), sum(sizes[:shared])
        goal = spec.input.draw(rng)
        while length < goal:
            chosen.append(int(rng.integers(len(lines))))
            length += sizes[chosen[-1]]
        yield Item("\n".join(lines[number] for number in chosen), round(length), spec.outputs.draw(rng))


def _made_lines(rng: np.random.Generator, count: int = 500) -> list[str]:
    return [" ".join(WORDS[n] for n in rng.integers(len(WORDS), size=SONNET_LINE_WORDS)) for _ in range(count)]


def _lines(path: pathlib.Path) -> list[str]:
    lines = [line for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise DatasetError(f"{path} has no line")
    return lines


def sharegpt(spec: Asked, seed: int) -> Iterator[Item]:
    """Yield the first question of each conversation, in random order, repeatedly; the output length is that of the
    answer, unless set. Conversations that are too long are skipped.

    The file is a list of ``{"conversations": [{"from": ..., "value": ...}, ...]}``, as ShareGPT's.
    """
    rng = np.random.default_rng(seed)
    fitting = [item for item in _conversations(spec) if spec.max_len is None or _total(item) <= spec.max_len]
    if not fitting:
        raise DatasetError(f"{spec.path} has no conversation that fits")
    while True:
        for number in rng.permutation(len(fitting)).tolist():
            item = fitting[number]
            yield item if spec.output is None else item._replace(output_len=spec.output.draw(rng))


def _conversations(spec: Asked) -> Iterator[Item]:
    path = _needed(spec.path, "sharegpt")
    try:
        rows = json.loads(_read(path))
        turns = [[turn["value"] for turn in row.get("conversations", [])[:2]] for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise DatasetError(f"{path} is not ShareGPT's format: {cause}") from cause
    for question, answer in (pair for pair in turns if len(pair) == 2 and all(pair)):
        lengths = (max(1, round(len(text.split()) * spec.tokens_per_word)) for text in (question, answer))
        yield Item(question, *lengths)


def _total(item: Item) -> int:
    return item.prompt_len + item.output_len


def azure(spec: Asked, seed: int) -> Iterator[Item]:
    """Yield the requests of an Azure trace, scaled to fit."""
    requests = traces.read_azure(_needed(spec.path, "azure"))
    return _trace(traces.scale_azure(requests, spec.max_len or _longest(requests), spec.scale), spec, seed)


def mooncake(spec: Asked, seed: int) -> Iterator[Item]:
    """Yield the requests of a Mooncake trace: equal blocks have equal tokens."""
    requests = traces.read_mooncake(_needed(spec.path, "mooncake"))
    return _trace(traces.scale_mooncake(requests, spec.max_len or _longest(requests), spec.block_tokens), spec, seed)


def _longest(requests: Sequence[traces.TraceRequest]) -> int:
    return max(request.total for request in requests)


def _trace(trace: traces.Trace, spec: Asked, seed: int) -> Iterator[Item]:
    for request in trace.requests:
        prompt = spec.prompts.build(prompt_material(trace, request, spec.prompts, seed))
        yield Item(prompt, request.prompt_len, request.output_len, request.arrival)


def prompt_material(trace: traces.Trace, request: traces.TraceRequest, prompts: Prompts, seed: int) -> np.ndarray:
    """Return the pseudo-random material of a prompt; that of a block depends only on its number and ``seed``."""
    size = trace.block_tokens or request.prompt_len
    blocks = [prompts.draw(size, np.random.default_rng((seed, block))) for block in request.blocks]
    whole = np.concatenate(blocks)
    share = request.prompt_len / (size * len(blocks))  # the last block may be partial
    return whole[: max(1, round(len(whole) * share))]


def _needed(path: pathlib.Path | None, name: str) -> pathlib.Path:
    if path is None:
        raise DatasetError(f"the {name} data set is a file: name it with --dataset-path")
    return path


def _read(path: pathlib.Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DatasetError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise DatasetError(f"{path} cannot be read: {cause}") from cause


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set.

    Attributes:
        make: ``(spec, seed) -> requests``; equal seeds make equal requests.
        lengths_given: outputs should have exactly the requested length, unless the options override that.
        text: prompts are text, even if the server accepts token ids.
    """

    make: Callable[[Asked, int], Iterator[Item]]
    lengths_given: bool = True
    text: bool = False


DATASETS: Mapping[str, Dataset] = {
    "random": Dataset(random),
    "shared-prefix": Dataset(shared_prefix),
    "sonnet": Dataset(sonnet, text=True),
    "sharegpt": Dataset(sharegpt, lengths_given=False, text=True),
    "azure": Dataset(azure),
    "mooncake": Dataset(mooncake),
}


def describe(spec: Asked) -> dict[str, Any]:
    """Return the description of the requests for the raw file."""
    return {"tokens_per_word": spec.tokens_per_word, "max_len": spec.max_len, "prompts": str(spec.prompts)}
