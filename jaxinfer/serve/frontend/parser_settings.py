"""Selection of a model's tool and reasoning parsers, by the settings or the chat template. No jax."""

from __future__ import annotations

import pathlib

from jaxinfer.parsers.registry import RESPONSE_TEMPLATE, Parsers, chosen, takes_carried
from jaxinfer.parsers.response_template.errors import ResponseTemplateError
from jaxinfer.parsers.response_template.template import read_template
from jaxinfer.serve.settings import AnswerConfig, ServeConfigError
from jaxinfer.text import ChatTemplate, Tokenizer, load_response_template


def model_parsers(
    config: AnswerConfig, folder: pathlib.Path, template: ChatTemplate | None, tokenizer: Tokenizer | None = None
) -> Parsers:
    """Return the parsers of a model in a folder, or in a GGUF file, which carries no response template.

    Args:
        tokenizer: determines which markers are special tokens.

    Raises:
        ServeConfigError: a response template is requested but missing, or has unsupported content.
        TokenizerError: tokenizer_config.json cannot be read.
    """
    named, sources = config.tool_call_parser, "" if template is None else "\n".join(template.sources.values())
    if not takes_carried(named, sources):
        return chosen(named, config.reasoning_parser, sources)
    raw = load_response_template(folder)
    if raw is None and named == RESPONSE_TEMPLATE:
        raise ServeConfigError(f"tool_call_parser = {named}: tokenizer_config.json has no {RESPONSE_TEMPLATE}")
    try:
        carried = None if raw is None else read_template(raw, _special(tokenizer))
    except ResponseTemplateError as error:
        advice = "tool_call_parser = off serves answers as they are"
        raise ServeConfigError(f"tokenizer_config.json: {error} ({advice})") from error
    return chosen(named, config.reasoning_parser, sources, carried)


def _special(tokenizer: Tokenizer | None) -> frozenset[str]:
    if tokenizer is None:
        return frozenset()
    return frozenset(tokenizer.decode([each], skip_special_tokens=False) for each in tokenizer.special_ids) - {""}
