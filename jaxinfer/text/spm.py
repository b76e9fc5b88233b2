"""A sentencepiece model (tokenizer.model) behind the interface of the tokenizers library.

The sentencepiece library segments plain text and does not recognise special tokens, so these are split off first, as
Hugging Face's tokenizers do. Each segment between them is encoded separately.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxinfer.text.classes import declared_tokens, prefix_scheme, tokenizer_class
from jaxinfer.text.declared import Declared
from jaxinfer.text.files import read_bytes
from jaxinfer.text.pieces import DecodeRule, TokenizerError, byte_of

MAX_MODEL_BYTES = 64 << 20
_SPACE = "\u2581"
_NO_PREFIX = bytes([0x1A, 2, 0x18, 0])
"""Serialised ``normalizer_spec { add_dummy_prefix: false }`` of sentencepiece's ModelProto."""


class SentencePieceBackend:
    """Encoding, vocabulary and decoding rule of ``folder/tokenizer.model``.

    Tokens of added_tokens.json and of tokenizer_config.json's ``added_tokens_decoder`` are added to those of the model.

    Raises:
        TokenizerError: the model cannot be read, or the sentencepiece package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        kind = tokenizer_class(folder, TokenizerError)
        scheme = "always" if kind is None or kind.prefix is None else prefix_scheme(folder, kind, TokenizerError)
        self._model = _load(folder / "tokenizer.model", b"" if scheme == "always" else _NO_PREFIX)
        self._begins_with_space = scheme == "first"
        declared = declared_tokens(folder, kind, TokenizerError)
        self.texts = self._own_texts() | declared.texts
        self._added, special = self._ids_of(declared)
        self._text_of_added = {token_id: content for content, token_id in self._added.items()}
        special |= {piece for piece in self._pieces() if self._is_special(self._model.piece_to_id(piece))}
        self._ids_in_text = {content: self._id(content) for content in {*special, *self._added} if content}
        self.special_ids = frozenset(self._id(content) for content in special)
        self.vocab_size = max([self._model.get_piece_size(), *(token_id + 1 for token_id in self._added.values())])
        longest_first = sorted(self._ids_in_text, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"(?!)()")
        self.most_bytes: int | None = None  # its normalisation may shorten a text without bound
        prefixed = scheme == "first" or self._model.normalize("a").startswith(_SPACE)
        self.rule = DecodeRule(_piece, "surrogateescape", " " if prefixed else "")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        ids: list[int] = []
        for rank, part in enumerate(self._split.split(text)):
            if part:
                begins = self._begins_with_space and not ids
                ids.extend([self._ids_in_text[part]] if rank % 2 else self._model.encode(" " * begins + part))
        return ids

    def forget(self) -> None:
        """No-op: the library caches no texts."""

    def id_to_token(self, token_id: int) -> str | None:
        added = self._text_of_added.get(token_id)
        if added is not None or token_id >= self._model.get_piece_size():
            return added
        return self._model.id_to_piece(token_id)

    def token_to_id(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        return None if self._unknown(token) else self._model.piece_to_id(token)

    def _own_texts(self) -> dict[str, str]:
        """Return the special pieces of the model itself, under the names of tokenizer_config.json."""
        model = self._model
        ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "pad_token": model.pad_id()}
        return {name: model.id_to_piece(token_id) for name, token_id in ids.items() if token_id >= 0}

    def _ids_of(self, declared: Declared) -> tuple[dict[str, int], set[str]]:
        """Return ids by text of the tokens that files add to the model, and the texts of those that are special.

        A token has the id that a file gives it, else the next one.
        """
        ids = {token.content: token_id for token_id, token in declared.listed.items() if self._unknown(token.content)}
        tokens = declared.merged({})
        for content in tokens:
            if content not in ids and self._unknown(content):
                ids[content] = max([self._model.get_piece_size(), *(token_id + 1 for token_id in ids.values())])
        return ids, {content for content, token in tokens.items() if token.special}

    def _id(self, content: str) -> int:
        return self._added[content] if content in self._added else self._model.piece_to_id(content)

    def _unknown(self, content: str) -> bool:
        """Return whether a token is not in the model, for which the library returns the unknown piece's id."""
        return self._model.id_to_piece(self._model.piece_to_id(content)) != content

    def _pieces(self) -> list[str]:
        return [self._model.id_to_piece(token_id) for token_id in range(self._model.get_piece_size())]

    def _is_special(self, token_id: int) -> bool:
        return self._model.is_control(token_id) or self._model.is_unknown(token_id)


def _load(path: Path, changes: bytes) -> Any:
    """Load the model with changed fields: concatenated protobuf messages merge, and later fields override."""
    data = read_bytes(path, MAX_MODEL_BYTES, TokenizerError) + changes
    try:
        import sentencepiece
    except ImportError as cause:
        raise TokenizerError(f"{path} needs the sentencepiece package: pip install sentencepiece") from cause
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as cause:
        raise TokenizerError(f"{path} is not a sentencepiece model: {cause}") from cause


def _piece(token: str, first: bool) -> bytes:
    del first
    byte = byte_of(token)
    return token.replace(_SPACE, " ").encode() if byte is None else byte
