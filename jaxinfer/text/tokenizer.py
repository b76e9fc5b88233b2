"""Tokenizer of a Hugging Face folder: text to token ids and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE, Unigram

from jaxinfer.formats.json_values import whole
from jaxinfer.text import tiktoken
from jaxinfer.text.classes import (
    MAX_TOKENIZER_BYTES,
    apply_class,
    config_flag,
    declared_tokens,
    prefix_scheme,
    tokenizer_class,
)
from jaxinfer.text.declared import FLAGS, Declared
from jaxinfer.text.files import read_object, read_text
from jaxinfer.text.lengths import flattened, longest
from jaxinfer.text.pieces import DecodeRule, TextStream, TokenizerError, library_rule
from jaxinfer.text.spm import SentencePieceBackend

MAX_IDS = 1 << 22
"""Upper bound of token ids; the largest vocabularies in the wild have 262,144 tokens."""

_AT_ONCE = 4096  # ids
_MOST_SAID = 400  # characters of a library message
_LARGEST_ID = 2**31 - 1


@runtime_checkable
class Backend(Protocol):
    """Protocol of a tokenizers-library file or a sentencepiece model.

    Attributes:
        texts: special tokens by name (``bos_token`` ...).
    """

    special_ids: frozenset[int]
    texts: dict[str, str]
    vocab_size: int
    rule: DecodeRule
    most_bytes: int | None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...

    def forget(self) -> None:
        """Disable caches of texts from now on, so that timing does not reveal earlier texts."""
        ...


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Special ids of the folder's configuration: begin of sequence, every end of sequence, padding."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", tiktoken.FILE)


class Tokenizer:
    """A tokenizer with the rules of its folder.

    Encoding is that of the underlying library: special tokens written out in a text become their ids. Decoding gives
    the characters of the tokens' bytes; bytes that are not valid UTF-8 become U+FFFD.

    Attributes:
        rule: conversion of tokens to text.
        vocab_size: one more than the largest id, added tokens included.
        special_ids: ids that ``skip_special_tokens`` leaves out of a text.
        texts: special tokens by the name that the folder gives them (``bos_token`` ...).
        bos_id: the begin-of-sequence id, if the folder names one.
        eos_ids: ids that end a generation: generation_config.json's, else config.json's, and the tokenizer's.
        pad_id: the padding id, if the folder names one.
        most_bytes: maximum UTF-8 bytes of a text that one token can cover, which bounds its number of tokens from below
            (None: unbounded, because normalisation may remove all of a text).
    """

    def __init__(self, backend: Backend, ids: SpecialIds | None = None, prepend_bos: bool = False) -> None:
        ids = SpecialIds() if ids is None else ids
        self.rule = backend.rule
        self.vocab_size = backend.vocab_size
        self.special_ids, self.texts = backend.special_ids, backend.texts
        self.bos_id, self.eos_ids, self.pad_id = ids.bos, ids.eos, ids.pad
        self.most_bytes = backend.most_bytes
        self._backend = backend
        self._prepend_bos = prepend_bos and ids.bos is not None
        self._bytes: dict[int, bytes | None] = {}

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.vocab_size} tokens, bos {self.bos_id}, eos {self.eos_ids}, pad {self.pad_id}>"

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the first of `TOKENIZER_FILES`, and the special tokens of the folder's configurations.

        Truncation and padding stored in tokenizer.json are switched off. A BOS is added where the post-processor of
        tokenizer.json adds it; without a tokenizer.json if ``add_bos_token`` of tokenizer_config.json is true (a
        tokenizer.model: unless it is false).

        Raises:
            TokenizerError: no tokenizer in the folder, or a file is unreadable or invalid.
        """
        kind = next((name for name in TOKENIZER_FILES if (folder / name).exists()), None)
        if kind is None:
            raise TokenizerError(f"{folder} has none of {', '.join(TOKENIZER_FILES)}")
        backend = SentencePieceBackend(folder) if kind == "tokenizer.model" else LibraryBackend.load(folder)
        adds_bos = config_flag(folder, "add_bos_token", TokenizerError)
        prepend_bos = adds_bos is not False if kind == "tokenizer.model" else adds_bos is True and kind == tiktoken.FILE
        return cls(backend, _special_ids(folder, backend), prepend_bos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; with ``add_special_tokens`` including BOS and others that the folder adds.

        Raises:
            TokenizerError: ``text`` is not Unicode text (it has a lone surrogate), or the vocabulary has no token for a
                part of it and no unknown token.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as cause:
            raise TokenizerError(f"the text has a lone surrogate at character {cause.start}: not Unicode") from cause
        ids = self._backend.encode(text, add_special_tokens)
        if add_special_tokens and self._prepend_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def forget(self) -> None:
        """Remove timing differences that reveal earlier texts or tokens, from now on: for servers with clients that
        must not learn other clients' requests. Encoding takes a tenth to a half longer, and the bytes of all tokens are
        computed now: half a second for 128,000 of them."""
        self._backend.forget()
        for token_id in range(self.vocab_size):
            self._cached(token_id)

    def showing(self, texts: Iterable[str]) -> Tokenizer:
        """Return a tokenizer for which tokens of these texts are not special, so that decoding keeps them."""
        shown = {self.token_to_id(text) for text in texts} & self.special_ids
        if not shown:
            return self
        other = copy.copy(self)  # shares the cache of token bytes
        other.special_ids = self.special_ids - shown
        return other

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Ids outside the vocabulary are ignored."""
        return "".join(self.decoded(ids, skip_special_tokens))

    def decoded(self, ids: Sequence[int], skip_special_tokens: bool = True) -> Iterator[str]:
        """Yield the text of ``ids`` in chunks of bounded work."""
        stream, at_start = TextStream(self.rule), True
        for first in range(0, len(ids), _AT_ONCE):
            visible = self.visible(ids[first : first + _AT_ONCE], skip_special_tokens)
            yield stream.feed(self.to_bytes(visible, at_start))
            at_start = at_start and not visible
        yield stream.feed(b"", final=True)

    def visible(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
        """Return the ids that are part of a text: known and, with ``skip_special_tokens``, not special."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return [token_id for token_id in ids if token_id not in hidden and self._cached(token_id) is not None]

    def to_bytes(self, visible_ids: Sequence[int], at_start: bool = False) -> bytes:
        """Return the bytes of ids that are all :meth:`visible`, ``at_start`` of a text or within one."""
        pieces = [self.token_bytes(token_id) for token_id in visible_ids]
        if at_start and pieces:
            pieces[0] = self.rule.piece(self.id_to_token(visible_ids[0]) or "", True)
        return b"".join(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text; empty for an id outside the vocabulary.

        They may be part of a character; a leading space of a word is included.
        """
        return self._cached(token_id) or b""

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as spelt in the vocabulary (``Ġthe``, ``▁the``, ``<0x0A>``), or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as spelt in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def _cached(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, cached: the decoder is called once per id, at most ``vocab_size`` times."""
        if token_id not in self._bytes:
            token = self.id_to_token(token_id)
            if token is None:
                return None
            self._bytes[token_id] = self.rule.piece(token, False)
        return self._bytes[token_id]


class LibraryBackend:
    """Backend of the tokenizers library.

    Args:
        library: loaded, with truncation and padding off. Its added tokens are changed.
        declared: tokens named by other files of the folder; they override its own.

    Special tokens are matched before normalisation: templates write them out, and a file with normalised ones would
    match only a token at the beginning.

    Raises:
        TokenizerError: its decoder is of an unsupported kind, or an id exceeds `MAX_IDS`.
    """

    def __init__(self, library: Library, declared: Declared | None = None) -> None:
        declared = Declared() if declared is None else declared
        _declare(library, declared)
        added = library.get_added_tokens_decoder()
        self._library = library
        # In some library versions `id_to_token` returns the normalised text of an added token.
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = _vocab_size(library)
        self.texts = declared.texts
        self.rule = library_rule(library)
        self.most_bytes = longest(library)

    @classmethod
    def load(cls, folder: Path) -> LibraryBackend:
        """Read ``folder/tokenizer.json``, without its truncation and padding, else the folder's tiktoken.model."""
        path = folder / "tokenizer.json"
        library = _read_library(path) if path.exists() else tiktoken.tiktoken_library(folder)
        kind = tokenizer_class(folder, TokenizerError)
        declared = declared_tokens(folder, kind, TokenizerError)
        if kind is not None:
            apply_class(library, kind, prefix_scheme(folder, kind, TokenizerError), declared.texts.get("bos_token"))
        library.encode_special_tokens = config_flag(folder, "split_special_tokens", TokenizerError) is True
        try:
            return cls(library, declared)
        except TokenizerError as cause:
            raise TokenizerError(f"{path}: {cause}") from cause

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # `encode` holds the GIL until it is done, and computes unneeded offsets.
            return self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as cause:  # as in `load`
            raise TokenizerError(f"the tokenizer has no tokens for this text: {cause}") from cause

    def forget(self) -> None:
        """See `Backend.forget`. The library's models cache recent words, except WordLevel and WordPiece, which do not
        merge."""
        model = self._library.model
        if isinstance(model, BPE | Unigram):
            model._clear_cache()
            model._resize_cache(0)

    def id_to_token(self, token_id: int) -> str | None:
        return self._added.get(token_id) or self._library.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)


_MAY_HAVE_PREFIX = re.compile(r'subword_prefix"\s*:\s*"[^"]|\\u00[4-7]')
"""The field with a value, or escaped letters, which its name might have. Other files are not parsed twice."""


def _vocab_size(library: Library) -> int:
    """Return one more than the largest id: there may be gaps."""
    token, largest = max(library.get_vocab().items(), key=operator.itemgetter(1), default=("", -1))
    if largest >= MAX_IDS:
        raise TokenizerError(f"the vocabulary has {token[:80]!r} as token {largest}: ids below {MAX_IDS} are read")
    return largest + 1


def _read_library(path: Path) -> Library:
    text = read_text(path, MAX_TOKENIZER_BYTES, TokenizerError)
    _require_mergeable(text, path)
    try:
        library = Library.from_str(text)
    except Exception as cause:  # the library raises Exception itself, nothing narrower
        said = repr(str(cause)[:_MOST_SAID])[1:-1]  # arbitrary text of the file
        raise TokenizerError(f"{path} is not a tokenizer that the tokenizers library reads: {said}") from cause
    library.no_truncation()
    library.no_padding()
    _require_sound(library, path)
    return library


def _require_mergeable(text: str, path: Path) -> None:
    """Reject merges that the library would panic on, which may abort the process: it cuts the continuing prefix off
    the second token of a merge without checking that the token has it.

    Raises:
        TokenizerError: a second token does not begin with ``continuing_subword_prefix``.
    """
    if not _MAY_HAVE_PREFIX.search(text):
        return
    try:
        model = json.loads(text)["model"]
        prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
        seconds = [(merge.split(" ") if isinstance(merge, str) else merge)[-1] for merge in merges or ()]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # the library says what is wrong
    if not isinstance(prefix, str):
        return
    for second in seconds:
        if isinstance(second, str) and not second.startswith(prefix):
            field = f"continuing_subword_prefix = {prefix[:80]!r}"
            raise TokenizerError(f"{path}: merges has {second[:80]!r}, which does not begin with {field}")


def _require_sound(library: Library, path: Path) -> None:
    """Reject files that the library accepts but later panics on.

    Raises:
        TokenizerError: the post-processor adds a token that it does not describe.
    """
    processor = library.post_processor
    for part in flattened(json.loads(processor.__getstate__()), "processors") if processor is not None else ():
        used = {item["SpecialToken"]["id"] for item in part.get("single", ()) if "SpecialToken" in item}
        if missing := used - part.get("special_tokens", {}).keys():
            raise TokenizerError(f"{path} has a post_processor without the special token {min(missing)[:80]!r}")


def _declare(library: Library, declared: Declared) -> None:
    """Add tokens missing from the vocabulary, and change those that the files describe differently."""
    own = dict(sorted(library.get_added_tokens_decoder().items()))
    before = {token.content: _flags(token) for token in own.values()}
    tokens = declared.merged(own).values()
    library.add_tokens([token for token in tokens if before.get(token.content) != _flags(token)])


def _flags(token: AddedToken) -> list[bool]:
    return [getattr(token, flag) for flag in FLAGS]


def _special_ids(folder: Path, backend: Backend) -> SpecialIds:
    """Return the special ids: BOS and padding of the tokenizer's files first, EOS of both the model's and these."""
    named = {name: backend.token_to_id(text) for name, text in backend.texts.items()}
    listed: dict[str, tuple[int, ...]] = {}
    for file in ("generation_config.json", "config.json"):
        config = read_object(folder / file, TokenizerError)
        for field in ("bos_token", "eos_token", "pad_token"):
            found = _ids(config.get(f"{field}_id"), f"{field}_id in {folder / file}")
            listed[field] = listed.get(field) or found

    def tokenizer_first(name: str) -> int | None:
        return named[name] if named.get(name) is not None else next(iter(listed[name]), None)

    eos = named.get("eos_token")
    eos_ids = dict.fromkeys([*listed["eos_token"], *([] if eos is None else [eos])])
    return SpecialIds(tokenizer_first("bos_token"), tuple(eos_ids), tokenizer_first("pad_token"))


def _ids(value: Any, name: str) -> tuple[int, ...]:
    """Parse an id or a list of ids; negative ones mean that there is none."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    found = [token_id for one in listed if (token_id := whole(one)) is not None and token_id <= _LARGEST_ID]
    if len(found) < len(listed):
        raise TokenizerError(f"{name} must be a token id or a list of token ids, not {reprlib.repr(value)}")
    return tuple(dict.fromkeys(token_id for token_id in found if token_id >= 0))
