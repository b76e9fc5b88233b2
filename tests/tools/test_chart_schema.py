"""The Helm chart's schema of settings; tests/fleet checks that helm itself rejects by it."""

import dataclasses
import json
import pathlib

import jsonschema
import pytest
import yaml

from jaxinfer.config import EngineConfig
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.settings import ServeConfig
from tools import chart_schema


def names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_what_is_checked_in_is_current() -> None:
    """`python -m tools.settings_tables` regenerates it."""
    text = chart_schema.FILE.read_text(encoding="utf-8")
    assert text == chart_schema.with_settings(text)


def test_every_setting_is_a_value_or_the_charts() -> None:
    properties = chart_schema.config_schema()["properties"]
    left_out = {*chart_schema.OF_THE_CHART, *chart_schema.UNFIT}
    assert left_out < names(ServeConfig)
    assert set(properties) == names(ServeConfig) - left_out
    assert set(properties["engine"]["properties"]) == names(EngineConfig)
    assert set(properties["limits"]["properties"]) == names(ServeLimits)
    assert all(each["description"] for name, each in properties.items() if name not in ("engine", "limits"))


def test_files_that_are_served_are_values(repo: pathlib.Path) -> None:
    settings = yaml.safe_load((repo / "configs/deployments/production.yaml").read_text())
    given = {name: value for name, value in settings.items() if name not in chart_schema.OF_THE_CHART}
    jsonschema.validate(given, chart_schema.config_schema())
    jsonschema.validate(given | {"http_port": "off", "tool_call_parser": False}, chart_schema.config_schema())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_port", 80),
        ("log_requests", "yes"),
        ("drain_seconds", 0),
        ("engine", {"page_size": 1.5}),
        ("tls_cert", "x"),
    ],
)
def test_what_is_wrong_is_refused(repo: pathlib.Path, name: str, value: object) -> None:
    settings = yaml.safe_load((repo / "configs/kubernetes/jaxinfer/values.yaml").read_text())["config"]
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(settings | {name: value}, chart_schema.config_schema())
    assert name in json.dumps([*refused.value.absolute_path, refused.value.message])
