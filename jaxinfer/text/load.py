"""Tokenizer and chat templates of a model, wherever it lies: in a Hugging Face folder, or in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxinfer.gguf import GgufError, Header, Metadata
from jaxinfer.text.chat_template import ChatTemplate, TemplateError, given_source
from jaxinfer.text.files import read_object
from jaxinfer.text.gguf import gguf_chat_template, gguf_text_files, gguf_tokenizer
from jaxinfer.text.pieces import TokenizerError
from jaxinfer.text.tokenizer import TOKENIZER_FILES, Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """See `Tokenizer.load` for a folder, `gguf_tokenizer` for a file.

    Raises:
        TokenizerError: there is none, or it cannot be read or understood.
    """
    if not path.is_file():
        return Tokenizer.load(path)
    return gguf_tokenizer(path, _metadata(path, TokenizerError))


def find_tokenizer(path: Path) -> Tokenizer | None:
    """`load_tokenizer`; None: it is a folder without any.

    Raises:
        TokenizerError: there is one that cannot be read or understood.
    """
    absent = path.is_dir() and not any((path / name).exists() for name in TOKENIZER_FILES)
    return None if absent else load_tokenizer(path)


def load_template(path: Path, given: str | None = None) -> ChatTemplate | None:
    """See `ChatTemplate.load` for a folder, `gguf_chat_template` for a file.

    Args:
        given: a template in place of the model's own, see `given_source`.

    Raises:
        TemplateError: a file cannot be read, or its template is not valid.
    """
    source = None if given is None else given_template(given).sources
    if not path.is_file():
        return ChatTemplate.load(path, source)
    try:
        return gguf_chat_template(path, _metadata(path, TemplateError), source)
    except TokenizerError as cause:
        raise TemplateError(str(cause)) from cause


def given_template(given: str) -> ChatTemplate:
    """The template that a user gives in place of a model's own, without special tokens; see `given_source`.

    Raises:
        TemplateError: there is no such file, or it is no template; the message begins with the setting's name.
    """
    try:
        return ChatTemplate(given_source(given))
    except TemplateError as cause:
        raise TemplateError(f"chat_template: {cause}") from cause


def load_response_template(path: Path) -> Any:
    """What a folder's tokenizer_config.json has as ``response_template``; None: nothing, or a file.

    Raises:
        TokenizerError: it cannot be read or understood.
    """
    return (
        None if path.is_file() else read_object(path / "tokenizer_config.json", TokenizerError).get("response_template")
    )


def gguf_files(path: Path) -> dict[str, str]:
    """The small files of a folder that says what a GGUF file does, by name; see `gguf_text_files`.

    Raises:
        TokenizerError, TemplateError: it cannot be read or understood.
    """
    return gguf_text_files(path, _metadata(path, TokenizerError))


def _metadata(path: Path, error: type[ValueError]) -> Metadata:
    try:
        return Header(path).metadata
    except GgufError as cause:
        raise error(str(cause)) from cause
