"""Tests of the selection of output parsers from the model folder and the settings."""

import json
import pathlib
from typing import Any

import pytest

from jaxinfer.parsers.registry import Parsers
from jaxinfer.serve.frontend.parser_settings import model_parsers
from jaxinfer.serve.frontend.preflight import check_early
from jaxinfer.serve.settings import ServeConfig, ServeConfigError
from jaxinfer.text import ChatTemplate
from tests.parsers.response_template.recorded import TEMPLATES
from tests.serve.http.scripted import tokenizer

PLAIN, QWEN = ChatTemplate("{{ messages }}"), ChatTemplate("<tool_call></think>{{ messages }}")


def folder(path: pathlib.Path, **config: Any) -> pathlib.Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def parsers(path: pathlib.Path, template: ChatTemplate | None = PLAIN, **settings: Any) -> Parsers:
    return model_parsers(ServeConfig(model=str(path), **settings), path, template, tokenizer())


def test_a_tokenizer_that_carries_none(tmp_path: pathlib.Path) -> None:
    folder(tmp_path, response_schema={"of": "an older kind"})
    assert parsers(tmp_path) == parsers(tmp_path, None) == Parsers()
    assert parsers(tmp_path, QWEN) == Parsers("hermes", "qwen3")
    with pytest.raises(
        ServeConfigError, match=r"tool_call_parser = response_template: tokenizer_config.json has no resp"
    ):
        parsers(tmp_path, tool_call_parser="response_template")


def test_a_tokenizer_that_carries_one(tmp_path: pathlib.Path) -> None:
    folder(tmp_path, response_template=TEMPLATES["gpt_oss"])
    carried = parsers(tmp_path)
    assert (carried.tool_calls, carried.reasoning) == ("response_template", "response_template")
    assert carried.markers == {"<|channel|>", "<|message|>", "<|end|>"}  # among the tokenizer's special tokens
    assert parsers(tmp_path, QWEN) == Parsers("hermes", "qwen3")
    assert parsers(tmp_path, QWEN, tool_call_parser="response_template").tool_calls == "response_template"
    assert parsers(tmp_path, tool_call_parser="off") == Parsers()


def test_one_that_is_not_understood_is_refused_before_the_model_is_loaded(tmp_path: pathlib.Path) -> None:
    fields = {"content": {"close_pattern": "(?!x)"}}
    folder(tmp_path, response_template={"start_anchor": "A", "fields": fields}, chat_template="{{ messages }}")
    message = (
        r"tokenizer_config.json: response_template.fields.content.close_pattern = '\(\?!x\)' has \(\?! "
        r"near character 1, which is not supported \(tool_call_parser = off serves answers as they are\)"
    )
    with pytest.raises(ServeConfigError, match=message):
        check_early(ServeConfig(model=str(tmp_path)))
    check_early(ServeConfig(model=str(tmp_path), tool_call_parser="off"))
    check_early(ServeConfig(model=str(tmp_path), tool_call_parser="hermes"))
    folder(tmp_path, response_template=3, chat_template="<tool_call>{{ messages }}")
    check_early(ServeConfig(model=str(tmp_path)))


def test_a_file_that_cannot_be_read_is_refused_before_the_engine_starts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ServeConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        check_early(ServeConfig(model=str(tmp_path)))
