"""The error message for an unknown architecture."""

import json
import pathlib
import re
from typing import Any

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.nearest import nearest
from jaxinfer.models.registry import FAMILIES, family_for
from tests.fakes import llama_json

KNOWN = {name: family.config for name, family in FAMILIES.items()}


def said(name: str = "FooForCausalLM", **fields: Any) -> str:
    return str(nearest(name, llama_json(architectures=[name], **fields), KNOWN)[0])


def test_the_refusal_names_the_three_nearest_and_a_page(repo: pathlib.Path) -> None:
    with pytest.raises(ConfigError) as error:
        family_for(llama_json(architectures=["FooForCausalLM"], clip_qkv=8.0))
    said = str(error.value)
    assert "the nearest: LlamaForCausalLM, which does not read clip_qkv = 8.0; " in said
    assert sum(name in said for name in FAMILIES) == 3
    pages = re.findall(r"docs/\w+\.md", said)
    assert pages
    assert all((repo / page).is_file() for page in pages)


def test_one_that_differs_in_nothing_is_named_too() -> None:
    with pytest.raises(ConfigError, match=r"the nearest: LlamaForCausalLM, which reads all of its fields;"):
        family_for(llama_json(architectures=["FooForCausalLM"]))


def test_fields_that_are_not_read_not_there_and_refused() -> None:
    assert said(clip_qkv=8.0, rms_norm_eps=1e-5) == "LlamaForCausalLM, which does not read clip_qkv = 8.0"
    assert said(hidden_act="mish").startswith(
        "LlamaForCausalLM, which says that hidden_act = 'mish' is not supported ("
    )
    lacking = said("MistralXForCausalLM", vocab_size=None, intermediate_size=None, rms_norm_eps=1e-5, head_dim=8)
    assert lacking == "MistralForCausalLM, which needs vocab_size, intermediate_size"
    inner = {"rope_type": "odd", "factor": 2.0}
    assert "says that rope_type = 'odd' is not supported" in said(rope_scaling=inner, rms_norm_eps=1e-5)


def test_one_refusal_hides_nothing_of_what_is_read_behind_it() -> None:
    told = said(hidden_act="mish", rope_theta=5e5, tie_word_embeddings=True, attention_bias=True)
    assert "does not read" not in told


def test_what_is_off_or_of_training_is_no_difference() -> None:
    told = said(qk_norm=False, clip=None, groups=0, attention_dropout=0.1, auto_map={"a": "b"}, rms_norm_eps=1e-5)
    assert told == "LlamaForCausalLM, which reads all of its fields"


def test_a_name_that_begins_alike_decides_where_fields_do_not(repo: pathlib.Path) -> None:
    described = json.loads((repo / "configs/models/DeepSeek-V3.json").read_text())
    told = nearest("DeepseekV3XForCausalLM", {**described, "odd_topk": 2048}, KNOWN)
    assert str(told[0]) == "DeepseekV3ForCausalLM, which does not read odd_topk = 2048"


def test_fields_of_the_text_model_within_are_compared() -> None:
    inner = llama_json(clip_qkv=8.0, rms_norm_eps=1e-5)
    del inner["architectures"]
    told = nearest("FooForConditionalGeneration", {"vision_config": {"depth": 3}, "text_config": inner}, KNOWN)
    assert str(told[0]) == "LlamaForCausalLM, which does not read clip_qkv = 8.0"


@pytest.mark.parametrize("described", [{}, {"hidden_size": 8}, {"text_config": []}, {"a": 1, "b": 2, "c": 3, "d": 4}])
def test_where_nothing_is_in_common_none_is_near(described: dict[str, Any]) -> None:
    assert nearest("BertModel", described, KNOWN) == []
    with pytest.raises(ConfigError, match=r"\['BertModel'\] is not supported \(docs"):
        family_for({"architectures": ["BertModel"], **described})


def test_the_sentence_is_bounded() -> None:
    """Bounds for any file: 8 fields of each kind, values truncated."""
    many = {f"field_{index}{'x' * 500}": "y" * 10_000 for index in range(10_000)}
    assert len(said(**many)) < 1500
    deep: Any = 1
    for _ in range(300):
        deep = {"a": [deep]}
    assert len(said(rms_norm_eps=1e-5, deep=deep)) < 200


@pytest.mark.parametrize("value", [float("nan"), -1, 2**70, "", [], {}, [1, "a"], {"rope_theta": "x"}, True])
@pytest.mark.parametrize("field", ["num_hidden_layers", "rope_scaling", "layer_types", "head_dim", "rms_norm_eps"])
def test_odd_values_end_in_a_refusal(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="is not supported"):
        family_for(llama_json(architectures=["FooForCausalLM"], **{field: value}))
