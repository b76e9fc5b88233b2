"""Missing config.json fields take the defaults of transformers, in every architecture; alias names are accepted."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from jaxinfer.formats.multimodal import text_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import family_for
from tests.models.answers import Answers, load_answers

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "config_defaults.json.gz"
TEXT = "text_config"


KNOWN = load_answers(GOLDEN)


def outcome(config: Mapping[str, Any], inner: Mapping[str, Any]) -> Any:
    """Return the parsed config, or the error message."""
    known = text_model({**config, TEXT: inner} if TEXT in config else inner)
    try:
        return family_for(known).config(known)
    except ConfigError as error:
        return str(error)


def differences(config: Mapping[str, Any], without: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields whose absence is read differently from transformers' default, with both outcomes."""
    inner = config.get(TEXT, config)
    for field, changed in without.items():
        if isinstance(changed, str):
            continue  # transformers requires it
        meant = outcome(config, {**inner, **changed})
        told = outcome(config, {name: value for name, value in inner.items() if name != field})
        # A rejected config is not misread.
        if not isinstance(told, str) and told != meant:
            yield field, told, meant


def is_latent(read: Any) -> bool:
    return not isinstance(read, str) and any(layer.latent_rank is not None for layer in read.layers)


def faults(answers: Mapping[str, Any], name: str) -> list[str]:
    found = list(differences(answers[name]["config"], answers[name]["without"]))
    # Latents apply to all heads: transformers itself fails where its default is another number of KV heads.
    return [field for field, told, _ in found if not (field == "num_key_value_heads" and is_latent(told))]


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_left_out_is_transformers_default(name: str) -> None:
    assert faults(KNOWN, name) == []


@pytest.mark.parametrize("name", [name for name, known in KNOWN.items() if known["aliases"]])
def test_fields_by_their_other_names(name: str) -> None:
    config, aliases = KNOWN[name]["config"], KNOWN[name]["aliases"]
    inner = config.get(TEXT, config)
    for other, field in aliases.items():
        if field in inner:
            spelled = {key: value for key, value in inner.items() if key != field} | {other: inner[field]}
            told, meant = outcome(config, spelled), outcome(config, inner)
            assert (other, told) == (other, meant) or (isinstance(told, str) and isinstance(meant, str))


def test_most_of_them_can_be_read() -> None:
    """Otherwise the test covers too little: for four architectures transformers' defaults are no valid model."""
    refused = [name for name, known in KNOWN.items() if isinstance(outcome(known["config"], _inner(known)), str)]
    assert len(refused) <= 4 < len(KNOWN) // 20
    assert not [name for name in refused if name.endswith(" tiny")]
    assert sum(len(known["without"]) for known in KNOWN.values()) > 4500


def _inner(known: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = known["config"].get(TEXT, known["config"])
    return found


@pytest.mark.parametrize(
    ("fields", "heads"), [({}, 8), ({"num_key_value_heads": None}, 16), ({"num_key_value_heads": 4}, 4)]
)
def test_heads_that_are_left_out_are_not_those_that_are_null(fields: dict[str, Any], heads: int) -> None:
    for kind, architecture in (("mistral", "MistralForCausalLM"), ("seed_oss", "SeedOssForCausalLM")):
        sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1}
        config = {"architectures": [architecture], "model_type": kind, "num_attention_heads": 16, **sizes, **fields}
        assert outcome(config, config).kv_heads == heads


@pytest.mark.parametrize("old", ["mamba_dt_limit", "mamba_n_groups", "mamba_d_conv", "mamba_conv_bias"])
def test_old_names_of_nemotron_h_count_over_new_ones(old: str) -> None:
    values = {"mamba_dt_limit": [0.5, 1.1], "mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_conv_bias": False}
    new = {"mamba_dt_limit": "time_step_limit", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"}
    config = KNOWN["NemotronHForCausalLM tiny"]["config"]
    meant = outcome(config, {**config, new.get(old, "use_conv_bias"): values[old]})
    assert outcome(config, {**config, old: values[old]}) == meant != outcome(config, config)


def test_sizes_of_gemma_4_by_numbers_of_two_digits() -> None:
    config = KNOWN["Gemma4ForCausalLM default"]["config"]
    assert "05" in config["per_layer_config"]
    dims = [layer.head_dim for layer in outcome(config, config).layers]
    assert dims == [512 if (index + 1) % 6 == 0 else None for index in range(30)]
    for wrong in ({"a": {}}, {"5": {"head_dim": 1, "other": 2}}):
        assert "per_layer_config" in outcome(config, {**config, "per_layer_config": wrong})


@pytest.mark.parity
def test_live(live_answers: Callable[[str], Answers]) -> None:
    """Repeat the comparison with the installed transformers."""
    answers = live_answers("config_defaults")
    assert {name: found for name in answers if (found := faults(answers, name))} == {}
