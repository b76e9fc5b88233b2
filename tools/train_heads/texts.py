"""Training text of draft heads besides the output of the target, in the tokens of any model."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer

from jaxinfer.models.model import Model
from tools.train_demo.corpus import SPECIALS, Corpus, corpus

LEAST = 4096  # tokens


def corpus_of(target: Model, folder: pathlib.Path, text: str) -> Corpus:
    """Return a text as the target's training data: speeches for a model with the demo model's special tokens, else
    plain text and conversations by the chat template.

    Args:
        folder: the target's files.

    Raises:
        ValueError: the model has no tokenizer, or the text is too short.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer")
    file = folder / "tokenizer.json"
    library = Tokenizer.from_file(str(file)) if file.is_file() else None
    if library is not None and all(library.token_to_id(special) is not None for special in SPECIALS):
        return corpus(library, text)
    stream = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    if len(stream) < LEAST:
        raise ValueError(f"the text has {len(stream)} tokens: at least {LEAST} are needed")
    return Corpus(stream, [], library, tokenizer.encode(""), _chat(target))


def _chat(target: Model) -> Callable[[Sequence[int]], list[int]] | None:
    """Return a function that makes of a piece of text a conversation that waits for an answer; None: no template."""
    template, tokenizer = target.chat_template, target.tokenizer
    if template is None or tokenizer is None:
        return None

    def chat(piece: Sequence[int]) -> list[int]:
        said = [{"role": "user", "content": tokenizer.decode(piece)}]
        return tokenizer.encode(template.render(said, add_generation_prompt=True), add_special_tokens=False)

    return chat
