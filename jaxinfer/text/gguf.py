"""Tokenizer and chat templates of a GGUF file, from its metadata.

llama.cpp stores a vocabulary rather than a tokenizer program: tokens with types, with scores ("llama": SentencePiece)
or merges ("gpt2": byte-level BPE), and the name of the pre-tokenizer. From these this module builds the tokenizer that
the tokenizer.json of the model defines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Library

from jaxinfer.text import leftmost
from jaxinfer.text.chat_template import DEFAULT, MAX_TEMPLATE_BYTES, ChatTemplate, TemplateError
from jaxinfer.text.declared import Declared, special
from jaxinfer.text.gguf_pre import PRE_TOKENIZERS, PreTokenizer
from jaxinfer.text.pieces import TokenizerError
from jaxinfer.text.tokenizer import LibraryBackend, SpecialIds, Tokenizer

MAX_TOKENS = 1 << 20
MAX_PIECE = 256  # characters of a token built by merges: SentencePiece's own default is 16

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# Tokens at which llama.cpp ends a generation regardless of the metadata: files often name only one end token.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
)
# Metadata keys of end tokens, each with fallback texts; the first one in the vocabulary is used without the key.
_NAMED_ENDS = {
    "eos_token_id": (),
    "eot_token_id": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),  # DeepSeek
    "eom_token_id": (),
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
# If all tokens of a row exist, the first is no end: it ends a message within a turn (Harmony, Solar), or is text.
_NO_ENDS = (
    ("<|end|>", "<|return|>", "<|call|>"),
    ("<|end|>", "<|return|>", "<|calls|>"),
    ("<|end|>", "<|flush|>", "<|call|>"),
    ("<|end|>", "<|flush|>", "<|calls|>"),
    ("</s>", "<|tool_response>"),
)

# Special tokens of Phi-3 that do not strip whitespace after them.
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # sic
    "mask_token": "mask_token_id",
}


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a GGUF file describes.

    Args:
        path: path of the file, for messages.
        metadata: its key-value pairs.

    Raises:
        TokenizerError: it is missing, of an unsupported kind, or inconsistent.
    """
    library, vocabulary = _library(path, metadata)
    backend = LibraryBackend(library, vocabulary.declared())
    if (scores := _tied(library, vocabulary, metadata)) is not None:
        library.model.ignore_merges = True
        library.pre_tokenizer = leftmost.pre_tokenizer(scores, frozenset(vocabulary.tokens))
    return Tokenizer(backend, vocabulary.special_ids())


def _library(path: Path, metadata: Mapping[str, Any]) -> tuple[Library, _Vocabulary]:
    vocabulary = _Vocabulary.read(path, metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        vocabulary = vocabulary.with_spaces()
        library, with_bos = _pieces(vocabulary, metadata), True
    elif kind == "gpt2":
        pre = _pre_tokenizer(path, metadata)
        library, with_bos = _byte_pairs(vocabulary, metadata, pre), pre.bos
    elif kind == "gemma4":
        library, with_bos = _merged_pieces(vocabulary, metadata), True
    else:
        raise TokenizerError(
            f"{path} has a tokenizer of the kind {kind!r}, which is not supported (known: gemma4, gpt2, llama)"
        )
    # As in Phi-3's tokenizer.json; no metadata key declares it.
    stripping = kind == "llama" and metadata.get("general.architecture") == "phi3"
    library.add_tokens(list(vocabulary.added(stripping)))
    _add_template(library, vocabulary, metadata, with_bos)
    return library, vocabulary


def gguf_chat_template(
    path: Path, metadata: Mapping[str, Any], source: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    """Return the chat templates of a GGUF file; None if it has none.

    Args:
        source: templates by name that replace those of the file.

    Raises:
        TemplateError: one is not text, too large, or not valid Jinja.
    """
    sources = _chat_templates(path, metadata) if source is None else source
    return ChatTemplate(sources, _Vocabulary.read(path, metadata).texts()) if sources else None


def _chat_templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    keys = {key: key.removeprefix(prefix).removeprefix(".") or DEFAULT for key in metadata if key.startswith(prefix)}
    sources = {name: metadata[key] for key, name in keys.items() if key == prefix or key.startswith(f"{prefix}.")}
    for name, source in sources.items():
        if not isinstance(source, str) or len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise TemplateError(
                f"the chat template {name!r} of {path} is not text of at most {MAX_TEMPLATE_BYTES} bytes"
            )
    return sources


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """Tokens, their types by llama.cpp's numbers, and the special ids of the metadata."""

    path: Path
    tokens: list[str]
    types: list[int]
    named: Mapping[str, int]
    ends: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, metadata: Mapping[str, Any]) -> _Vocabulary:
        tokens = _list(path, metadata, "tokenizer.ggml.tokens", str)
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise TokenizerError(f"{path} has {len(tokens)} tokens: 1 to {MAX_TOKENS} are read")
        types = [_NORMAL] * len(tokens)
        if "tokenizer.ggml.token_type" in metadata:
            types = _list(path, metadata, "tokenizer.ggml.token_type", int)
        if len(types) != len(tokens):
            raise TokenizerError(f"{path} has {len(tokens)} tokens but {len(types)} types of tokens")

        def token_id(name: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{name}")
            if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
                raise TokenizerError(f"{path} names {str(value)[:40]!r} as {name}, which is none of its tokens")
            return value

        ids = {name: token_id(key) for name, key in _NAMED.items()}
        named = {name: value for name, value in ids.items() if value is not None}
        ends = _ends(tokens, {key: token_id(key) for key in _NAMED_ENDS})
        types = [_CONTROL if number in ends and kind != _BYTE else kind for number, kind in enumerate(types)]
        return cls(path, tokens, types, named, ends)

    def ids(self) -> dict[str, int]:
        """Return ids by token; the first one of a duplicated token counts."""
        found: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            found.setdefault(token, token_id)
        return found

    def joined(self) -> dict[str, int]:
        """Return the ids of the tokens that merges may produce."""
        return {token: number for token, number in self.ids().items() if self.types[number] in (_NORMAL, _UNUSED)}

    def texts(self) -> dict[str, str]:
        """Return special tokens by name, for templates."""
        return {name: self.tokens[token_id] for name, token_id in self.named.items()}

    def declared(self) -> Declared:
        return Declared({name: special(text) for name, text in self.texts().items()})

    def with_spaces(self) -> _Vocabulary:
        """Replace space marks by spaces in user-defined tokens, which match verbatim: older files have marks."""
        known = set(self.tokens)
        plain = [token.replace(_SPACE, " ") for token in self.tokens]
        moved = [
            text if kind == _USER_DEFINED and text not in known else token
            for token, text, kind in zip(self.tokens, plain, self.types, strict=True)
        ]
        return dataclasses.replace(self, tokens=moved)

    def added(self, stripping: bool) -> Iterator[AddedToken]:
        """Yield tokens matched before pre-tokenization; with ``stripping`` most of them strip whitespace after them."""
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
                strips = stripping and kind != _USER_DEFINED and token not in _NOT_STRIPPING
                yield AddedToken(token, special=kind != _USER_DEFINED, normalized=False, rstrip=strips)

    def special_ids(self) -> SpecialIds:
        return SpecialIds(self.named.get("bos_token"), self.ends, self.named.get("pad_token"))


def _ends(tokens: list[str], named: Mapping[str, int | None]) -> tuple[int, ...]:
    """Return the ids that end a generation, those of metadata keys first."""
    ids = {token: number for number, token in reversed([*enumerate(tokens)])}
    found = [number for number in named.values() if number is not None]
    found += [ids[text] for text in _ENDS if text in ids]
    for key, texts in _NAMED_ENDS.items():
        if named[key] is None:
            found += [ids[text] for text in texts if text in ids][:1]
    for first, *others in _NO_ENDS:
        if ids.get(first) in found and all(ids.get(text) in found for text in others):
            found = [number for number in found if number != ids[first]]
    return tuple(dict.fromkeys(found))


def _list(path: Path, metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    try:
        values = metadata.get(key)
    except ValueError as cause:  # arrays are read at access
        raise TokenizerError(str(cause)) from cause
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise TokenizerError(f"{path} has no list of {kind.__name__} as {key}")
    return values


def _model(vocabulary: _Vocabulary, **arguments: Any) -> Library:
    try:
        return Library(models.BPE(vocab=vocabulary.ids(), **arguments))
    except Exception as cause:  # the library raises Exception itself, nothing narrower
        raise TokenizerError(f"{vocabulary.path} has a vocabulary that is none: {cause}") from cause


def _pieces(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Library:
    """Return a SentencePiece BPE tokenizer: adjacent pieces are merged, best score first."""
    unknown = vocabulary.texts().get("unk_token")
    library = _model(
        vocabulary,
        merges=_merges(vocabulary, _list(vocabulary.path, metadata, "tokenizer.ggml.scores", float)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in vocabulary.types,
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    spaces = normalizers.Replace(" ", _SPACE)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if prefixed else [spaces])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return library


def _merged_pieces(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Library:
    """Return a character BPE tokenizer with space marks and byte fallback."""
    merges = [_pair(vocabulary.path, merge) for merge in _list(vocabulary.path, metadata, "tokenizer.ggml.merges", str)]
    unknown = vocabulary.texts().get("unk_token")
    library = _model(vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    library.normalizer = normalizers.Replace(" ", _SPACE)
    library.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs that form a piece, by the score of the piece; pairs of one piece by the ids of its parts."""
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(f"{vocabulary.path} has {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    ids = vocabulary.ids()
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in vocabulary.joined().items():
        if len(token) > MAX_PIECE:
            raise TokenizerError(f"{vocabulary.path} has a piece of {len(token)} characters: {MAX_PIECE} are read")
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                found.append((-scores[token_id], token_id, ids[first], ids[second], first, second))
    return [(first, second) for *_, first, second in sorted(found)]


def _tied(library: Library, vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the scores of pieces if ties make them inexpressible as a merge order; else None."""
    if metadata.get("tokenizer.ggml.model") != "llama":
        return None
    listed = metadata["tokenizer.ggml.scores"]
    scores = {token: listed[number] for token, number in vocabulary.joined().items()}
    return scores if leftmost.is_needed(library.model, scores) else None


def _pre_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(
            f"{path} cuts a text by the rule {str(name)[:80]!r}, which is not supported (known: {known})"
        )
    return PRE_TOKENIZERS[name]


def _byte_pairs(vocabulary: _Vocabulary, metadata: Mapping[str, Any], pre: PreTokenizer) -> Library:
    """Return a byte-level BPE tokenizer."""
    merges = [_pair(vocabulary.path, merge) for merge in _list(vocabulary.path, metadata, "tokenizer.ggml.merges", str)]
    library = _model(vocabulary, merges=merges, ignore_merges=pre.ignore_merges)
    library.pre_tokenizer = pre.rule()
    if pre.composed:
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    return library


def _pair(path: Path, merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    if at < 0 or at == len(merge) - 1:
        raise TokenizerError(f"{path} has {merge[:40]!r} as a merge, which is not of two tokens")
    return merge[:at], merge[at + 1 :]


def _add_template(library: Library, vocabulary: _Vocabulary, metadata: Mapping[str, Any], with_bos: bool) -> None:
    """Add the special tokens before and after each text."""
    wanted = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", with_bos) is True,
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False) is True,
    }
    texts = vocabulary.texts()
    used = {name: texts[name] for name, is_wanted in wanted.items() if is_wanted and name in texts}
    if not used:
        return
    # with our own ids: a token's text could be mistaken for a template placeholder
    parts = [*(["bos"] if "bos_token" in used else []), "$A", *(["eos"] if "eos_token" in used else [])]
    tokens = [
        {"id": name.removesuffix("_token"), "ids": [vocabulary.named[name]], "tokens": [text]}
        for name, text in used.items()
    ]
    library.post_processor = processors.TemplateProcessing(single=parts, special_tokens=tokens)


def gguf_text_files(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokenizer and the chat template of a GGUF file as the files of a model folder, by name.

    Raises:
        TokenizerError, TemplateError: see `gguf_tokenizer`, `gguf_chat_template`.
    """
    library, vocabulary = _library(path, metadata)
    if _tied(library, vocabulary, metadata) is not None:
        raise TokenizerError(f"{path} has pieces with equal scores, which no tokenizer.json can say")
    template, ids = gguf_chat_template(path, metadata), vocabulary.special_ids()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.texts()}
    if template is not None:
        config["chat_template"] = [{"name": name, "template": text} for name, text in template.sources.items()]
    named = {"bos_token_id": ids.bos, "eos_token_id": list(ids.eos), "pad_token_id": ids.pad}
    generation = {name: value for name, value in named.items() if value not in (None, [])}
    return {
        "tokenizer.json": library.to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False),
        "generation_config.json": json.dumps(generation),
    }
