"""The table of published models in docs/models.md matches the code's verdict on each config.json."""

import json
import pathlib

import pytest

from jaxinfer.formats.multimodal import text_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import FAMILIES
from tools import census

MODELS = dict(census.configs())


def test_the_page_is_current() -> None:
    """Each config.json is parsed; any error other than a `ConfigError` fails this test."""
    assert census.main(["--check"]) == 0


def test_an_old_page_is_seen_and_written_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {"name": "a/b", "config": {"architectures": ["FooForCausalLM"], "hidden_size": 8}}
    (tmp_path / "configs.jsonl").write_text(json.dumps(described) + "\n")
    page = tmp_path / "models.md"
    page.write_text("before\n<!-- census -->\nold\n<!-- end -->\nbehind\n")
    for name, path in (("PAGE", page), ("CONFIGS", tmp_path / "configs.jsonl"), ("FILES", tmp_path)):
        monkeypatch.setattr(census, name, path)
    assert census.main(["--check"]) == 1
    assert page.read_text().count("old") == 1
    assert census.main([]) == 0
    assert "docs/models.md written" in capsys.readouterr().out
    assert census.main(["--check"]) == 0
    assert page.read_text() == (
        "before\n<!-- census -->\n## Served: 0\n\n| model | architecture | module | parameters |\n|---|---|---|---|\n"
        "\n## Refused: 1\n\n| model | architecture | what is said |\n|---|---|---|\n"
        "| a/b | `FooForCausalLM` | not known |\n<!-- end -->\nbehind\n"
    )


def test_other_errors_are_no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config_json: object, dtype: str, name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(census, "abstract", broken)
    with pytest.raises(KeyError, match="a/b"):
        census.row("a/b", {"architectures": ["LlamaForCausalLM"]})


def test_a_refusal_is_the_sentence_of_the_error() -> None:
    said = census.row("a/b", {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}).said
    assert said == "num_attention_heads is missing"
    with pytest.raises(ConfigError, match=said):
        FAMILIES["LlamaForCausalLM"].config({"hidden_size": 8})


def test_the_file_is_small_and_has_each_model_once() -> None:
    assert census.CONFIGS.stat().st_size < 300_000
    rows = [json.loads(line) for line in census.CONFIGS.read_text(encoding="utf-8").splitlines()]
    assert all(row.keys() == {"name", "source", "config"} and row["source"] for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)


def test_most_of_what_is_known_is_there() -> None:
    """At most 16 known architectures have no model on the page."""
    seen = {name for config in MODELS.values() for name in text_model(config)["architectures"]}
    unseen = sorted(set(FAMILIES) - seen)
    assert len(unseen) <= 16, unseen
