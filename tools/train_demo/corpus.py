"""Training text: its splits, its tokenizer, and its batches."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, SYSTEM, USER, ASSISTANT = SPECIALS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_SHARE = 8  # one window in this many is a dialogue in the chat format


@dataclasses.dataclass(frozen=True)
class Split:
    """Splits of the text by position: 90 % trains, the next 5 % selects the checkpoint, the last 5 % is reported."""

    train: str
    validation: str
    test: str

    @staticmethod
    def of(text: str) -> Split:
        first, second = int(len(text) * 0.90), int(len(text) * 0.95)
        return Split(text[:first], text[first:second], text[second:])


@dataclasses.dataclass(frozen=True)
class Speech:
    """Speech of one character: the words, as token ids, and the speaker."""

    speaker: str
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The training split as one stream of ids and as speeches.

    Attributes:
        tokenizer: has the special tokens of the dialogues, where there are speeches.
        begin: ids at the beginning of each text.
        chat: makes of a piece of text the ids of a conversation that waits for an answer; None: speeches alone are.
    """

    stream: np.ndarray
    speeches: list[Speech]
    tokenizer: Any
    begin: list[int]
    chat: Callable[[Sequence[int]], list[int]] | None = None


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (every text can be encoded); a sequence starts with ``<|bos|>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B:1", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return ids [n] int32 without special tokens."""
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def corpus(tokenizer: Tokenizer, text: str) -> Corpus:
    """Encode the training text, and split it into speeches (``NAME:``, lines, an empty line)."""
    parts = (part.split(":\n", 1) for part in text.split("\n\n"))
    named = [(part[0], part[1]) for part in parts if len(part) == 2]
    encoded = tokenizer.encode_batch([words for _, words in named], add_special_tokens=False)
    speeches = [Speech(name, ids.ids) for (name, _), ids in zip(named, encoded, strict=True)]
    return Corpus(encode(tokenizer, text), speeches, tokenizer, begin(tokenizer))


def begin(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the tokenizer puts before each text."""
    return [*tokenizer.encode("").ids]


def batch(data: Corpus, seed: int, step: int, rows: int, length: int) -> np.ndarray:
    """Return training windows [rows, length + 1] int32, a function of (seed, step) alone, so runs can resume."""
    rng = np.random.default_rng([seed, step])
    return np.stack([_window(data, rng, length + 1) for _ in range(rows)])


def _window(data: Corpus, rng: np.random.Generator, length: int) -> np.ndarray:
    if data.speeches and rng.integers(CHAT_SHARE) == 0:
        return _dialogue(data, rng, length)
    start = rng.integers(len(data.stream) - length)
    return np.concatenate([data.begin, data.stream[start : start + length - len(data.begin)]]).astype(np.int32)


def _dialogue(data: Corpus, rng: np.random.Generator, length: int) -> np.ndarray:
    """Return a scene in the chat format: one character is the assistant; half have a system turn with its name."""
    special = {name: data.tokenizer.token_to_id(name) for name in SPECIALS}
    index = int(rng.integers(len(data.speeches)))
    hero = data.speeches[(index + 1) % len(data.speeches)].speaker
    ids = [special[BOS]]
    if rng.integers(2):
        ids += [special[SYSTEM], *data.tokenizer.encode(hero, add_special_tokens=False).ids, special[EOS]]
    while len(ids) < length:
        speech = data.speeches[index % len(data.speeches)]
        role = ASSISTANT if speech.speaker == hero else USER
        ids += [special[role], *speech.ids, special[EOS]]
        index += 1
    return np.array(ids[:length], np.int32)


def read_text(folder: pathlib.Path) -> str:
    """Read ``folder/text/tinyshakespeare/input.txt``."""
    return (folder / "text" / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
