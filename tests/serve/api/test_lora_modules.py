"""Tests of the adapters in a server's flags and configuration files."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.api.lora_modules import parse_modules
from jaxinfer.serve.settings import ServeConfigError, make_config

printable = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.isprintable)
names = printable.filter(lambda name: "=" not in name and not name.lstrip().startswith("{"))


@given(st.dictionaries(names, printable, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_both_forms_say_the_same(folders, as_json):
    written = [
        json.dumps({"name": name, "path": path}) if is_json else f"{name}={path}"
        for (name, path), is_json in zip(folders.items(), as_json, strict=False)
    ]
    assert parse_modules(written, None) == folders


@given(st.text(max_size=40))
def test_any_text_is_a_module_or_refused_in_one_sentence(text):
    try:
        ((name, path),) = parse_modules([text], "base").items()
    except ValueError as error:
        assert str(error).isprintable()  # noqa: PT017 - that it is raised is not the claim
    else:
        assert name.isprintable()
        assert path.isprintable()
        assert name != "base"


BAD = [
    (["pirate"], "'pirate' must be NAME=PATH"),
    (["=path"], "'=path': the name must have 1 to 128 printable characters"),
    (["a="], "'a=': the path must have"),
    (["a\n=b"], "the name must have"),
    (["a" * 129 + "=b"], "the name must have"),
    (["a=" + "b" * 4097], "the path must have"),
    (["a=b", "a=c"], "'a' is the name of two adapters"),
    (["base=b"], "'base' is the name of the model itself"),
    (["{"], "'{' is no JSON"),
    (['{"name": "a"}'], "the path must have"),
    (['{"name": 1, "path": "b"}'], "the name must have"),
    (['{"name": "a", "path": "b", "rank": 3}'], "'rank' is none of name, path, base_model_name"),
    (['{"name": "a", "path": "b", "base_model_name": "other"}'], "base_model_name='other' is not served here"),
]


@pytest.mark.parametrize(("modules", "words"), BAD)
def test_what_is_no_module_is_refused(modules, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_modules(modules, "base")
    settings = {"model": "demo", "served_model_name": "base", "engine": {"enable_lora": True}}
    with pytest.raises(ServeConfigError) as refusal:
        make_config({**settings, "lora_modules": modules})
    assert str(refusal.value).startswith("lora_modules")
    assert words in str(refusal.value)


def test_a_file_may_have_objects():
    settings = {"model": "demo", "engine": {"enable_lora": True}, "lora_modules": [{"name": "a", "path": "b"}, "c=d"]}
    assert parse_modules(make_config(settings).lora_modules, None) == {"a": "b", "c": "d"}
