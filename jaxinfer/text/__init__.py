"""Text processing on both sides of the engine: tokenizers, detokenizer, stop strings, chat templates. No jax."""

from jaxinfer.text.chat_template import ChatTemplate, TemplateError
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.load import (
    find_tokenizer,
    gguf_files,
    given_template,
    load_response_template,
    load_template,
    load_tokenizer,
)
from jaxinfer.text.pieces import TokenizerError
from jaxinfer.text.stop import Emitted, StopMatcher
from jaxinfer.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "Emitted",
    "StopMatcher",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
    "find_tokenizer",
    "gguf_files",
    "given_template",
    "load_response_template",
    "load_template",
    "load_tokenizer",
]
