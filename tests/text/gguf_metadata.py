"""GGUF metadata that llama.cpp's converter would write for a tokenizer.json."""

import json
import pathlib
import re
from typing import Any

UNUSED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 5, 1, 2, 3, 4, 6


def metadata_of(path: pathlib.Path, pre: str | None) -> dict[str, Any]:
    """Return the metadata without BOS token. ``pre``: pre-tokenizer of byte pairs; None: Llama 2's scored pieces."""
    content = json.loads(path.read_text(encoding="utf-8"))
    tokens, types = tokens_of(content)
    made: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": False,
    }
    if pre is not None:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
        return {**made, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    types[0] = UNKNOWN
    for token_id, token in enumerate(tokens):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[token_id] = BYTE
    scores = [score(token_id, token) for token_id, token in enumerate(tokens)]
    return {
        **made,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tokens_of(content: dict[str, Any]) -> tuple[list[str], list[int]]:
    vocabulary = dict(content["model"]["vocab"])
    added = {token["content"]: token for token in content["added_tokens"]}
    vocabulary |= {text: token["id"] for text, token in added.items()}
    count = max(vocabulary.values()) + 1
    tokens, types = [f"[PAD{index}]" for index in range(count)], [UNUSED] * count
    for text, token_id in vocabulary.items():
        kind = NORMAL if text not in added else CONTROL if added[text]["special"] else USER_DEFINED
        tokens[token_id], types[token_id] = text, kind
    return tokens, types


def score(token_id: int, token: str) -> float:
    """Return the score as in the model file: by rank, with runs of spaces last."""
    if token_id < 259:
        return 0.0
    return -1e9 if token.strip("▁") == "" and len(token) > 1 else 259.0 - token_id
