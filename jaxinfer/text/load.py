"""Loading of a model's tokenizer and chat templates, from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxinfer.formats.gguf import GgufError, Header, Metadata
from jaxinfer.text.chat_template import ChatTemplate, TemplateError, given_source
from jaxinfer.text.files import read_object
from jaxinfer.text.gguf import gguf_chat_template, gguf_text_files, gguf_tokenizer
from jaxinfer.text.pieces import TokenizerError
from jaxinfer.text.tokenizer import TOKENIZER_FILES, Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer: see `Tokenizer.load` for a folder, `gguf_tokenizer` for a file.

    Raises:
        TokenizerError: it is missing, unreadable or invalid.
    """
    if not path.is_file():
        return Tokenizer.load(path)
    return gguf_tokenizer(path, _metadata(path, TokenizerError))


def find_tokenizer(path: Path) -> Tokenizer | None:
    """Load the tokenizer as `load_tokenizer`; None: a folder without any.

    Raises:
        TokenizerError: it is unreadable or invalid.
    """
    absent = path.is_dir() and not any((path / name).exists() for name in TOKENIZER_FILES)
    return None if absent else load_tokenizer(path)


def load_template(path: Path, given: str | None = None) -> ChatTemplate | None:
    """Load the chat templates: see `ChatTemplate.load` for a folder, `gguf_chat_template` for a file.

    Args:
        given: a template that replaces the model's own, see `given_source`.

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
    """Return the template that a user gives to replace the model's, without special tokens; see `given_source`.

    Raises:
        TemplateError: the file does not exist, or is not a template; the message begins with the setting's name.
    """
    try:
        return ChatTemplate(given_source(given))
    except TemplateError as cause:
        raise TemplateError(f"chat_template: {cause}") from cause


def load_response_template(path: Path) -> Any:
    """Return ``response_template`` of a folder's tokenizer_config.json; None: it is absent, or the model is a file.

    Raises:
        TokenizerError: the file is unreadable or invalid.
    """
    return (
        None if path.is_file() else read_object(path / "tokenizer_config.json", TokenizerError).get("response_template")
    )


def gguf_files(path: Path) -> dict[str, str]:
    """Return the small files of a folder equivalent to a GGUF file, by name; see `gguf_text_files`.

    Raises:
        TokenizerError, TemplateError: the file is unreadable or invalid.
    """
    return gguf_text_files(path, _metadata(path, TokenizerError))


def _metadata(path: Path, error: type[ValueError]) -> Metadata:
    try:
        return Header(path).metadata
    except GgufError as cause:
        raise error(str(cause)) from cause
