"""Early validation of a model's small files and settings, before anything is started. No jax."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jaxinfer.config.aliases import demo_folder, draft_of, no_model
from jaxinfer.config.speculative import other_vocabulary
from jaxinfer.serve.frontend.parser_settings import model_parsers
from jaxinfer.serve.settings import ServeConfig, ServeConfigError
from jaxinfer.text import TemplateError, TokenizerError, find_tokenizer, given_template, load_template

_MOST_BYTES = 1 << 20
_CONTEXT = ("max_position_embeddings", "n_positions")


def check_early(config: ServeConfig) -> None:
    """Reject a model that does not exist, and settings that contradict its config.json. All other checks are left to
    the engine.

    Raises:
        ServeConfigError: names the setting and the value.
    """
    if (reason := no_model(config.model)) is not None:
        raise ServeConfigError(f"model: {reason}")
    _refuse_template(config)
    described = _described(config.model)
    _refuse_draft(config, described)
    _refuse_texts(config)
    length = config.engine.max_model_len
    for name in _CONTEXT:
        context = described.get(name)
        if isinstance(context, int) and length is not None and length > context:
            what = f"is beyond the model's context of {context} tokens"
            raise ServeConfigError(f"engine.max_model_len = {length} {what}")


def _refuse_draft(config: ServeConfig, described: dict[str, Any]) -> None:
    """Reject a draft model that does not exist or has another vocabulary."""
    if not config.engine.drafts_on_device:
        return
    method = config.engine.speculative
    name = config.engine.speculative_model or draft_of(config.model, method)
    if name is None:
        raise ServeConfigError(f"engine.speculative = {method} needs speculative_model: a folder or a hub id")
    if (reason := no_model(name)) is not None:
        raise ServeConfigError(f"engine.speculative_model: {reason}")
    own, theirs = (each.get("vocab_size") for each in (described, _described(name)))
    if isinstance(own, int) and isinstance(theirs, int) and (why := other_vocabulary(own, theirs)) is not None:
        raise ServeConfigError(f"engine.speculative_model = {name} {why}")


def _refuse_template(config: ServeConfig) -> None:
    try:
        if config.chat_template is not None:
            given_template(config.chat_template)
    except TemplateError as error:
        raise ServeConfigError(str(error)) from error


def _refuse_texts(config: ServeConfig) -> None:
    """Reject a tokenizer or chat template that cannot be used, which the front end reads only when the engine is ready,
    and a response template that no parser can be built from."""
    path = demo_folder(config.model) or pathlib.Path(config.model)
    if not path.exists():  # a hub id
        return
    try:
        tokenizer, template = find_tokenizer(path), load_template(path, config.chat_template)
    except (TokenizerError, TemplateError) as error:
        raise ServeConfigError(f"model: {error}") from error
    if path.is_dir():
        model_parsers(config, path, template, tokenizer)


def _described(model: str) -> dict[str, Any]:
    return _config_json(demo_folder(model) or pathlib.Path(model))


def _config_json(folder: pathlib.Path) -> dict[str, Any]:
    """Return the content of config.json; empty if it cannot be read, which the engine reports better."""
    try:
        with (folder / "config.json").open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
