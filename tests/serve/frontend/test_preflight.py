"""Tests of models that are rejected from config.json before anything is started."""

import json
import pathlib
from typing import Any

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.serve.frontend.preflight import check_early
from jaxinfer.serve.settings import ServeConfig, ServeConfigError

DRAFTS: dict[str, Any] = {"speculative": "draft_model"}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": 64}))
    return str(tmp_path)


def refusal(model: str, **engine: Any) -> str | None:
    try:
        check_early(ServeConfig(model=model, engine=EngineConfig(**engine)))
    except ServeConfigError as error:
        return str(error)
    return None


def test_a_context_that_the_model_has_not(folder: str) -> None:
    assert refusal(folder, max_model_len=64) is None
    assert refusal(folder, max_model_len=65) == ("engine.max_model_len = 65 is beyond the model's context of 64 tokens")


@pytest.mark.parametrize("given", ["absent.jinja", "{% if %}"])
def test_a_chat_template_that_is_none(folder: str, given: str) -> None:
    with pytest.raises(ServeConfigError, match=r"^chat_template: "):
        check_early(ServeConfig(model=folder, chat_template=given))
    check_early(ServeConfig(model=folder, chat_template="{{ messages[0].content }}"))


def test_a_draft_model_that_nobody_has(folder: str) -> None:
    missing = "engine.speculative = draft_model needs speculative_model: a folder or a hub id"
    assert refusal("demo", **DRAFTS) is None
    assert refusal(folder, **DRAFTS) == missing
    assert refusal(folder, **DRAFTS, speculative_model="some/where") is None
    assert refusal(folder, **DRAFTS, speculative_model="/no/where") == (
        "engine.speculative_model: no folder '/no/where', and it is not a hub id of the form org/name either"
    )


def test_a_draft_model_of_another_vocabulary(folder: str) -> None:
    assert refusal(folder, **DRAFTS, speculative_model=folder) is None
    assert refusal(folder, **DRAFTS, speculative_model="demo-draft") == (
        "engine.speculative_model = demo-draft cannot draft: its vocabulary has 2048 tokens, the model's 512"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}', "tokenizer.json"),
        ("chat_template.jinja", "{% if %}", "template"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "template"),
    ],
)
def test_files_that_the_front_end_reads_are_looked_at_before_the_engine_starts(
    folder: str, name: str, content: str, said: str
) -> None:
    (pathlib.Path(folder) / name).write_text(content)
    told = refusal(folder)
    assert told is not None
    assert told.startswith("model: ")
    assert said in told
