"""Presets. Names of other engines have tests of the command lines that people type (tests/cli/test_names.py)."""

import dataclasses

import pytest

from jaxinfer.cli import generate, serve
from jaxinfer.config import EngineConfig, EngineConfigError, check
from jaxinfer.config.aliases import PRESETS, SettingNameError, our_settings
from jaxinfer.llm import LLM
from jaxinfer.serve.settings import make_config

KNOWN = [field.name for field in dataclasses.fields(EngineConfig)]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_settings_of_a_preset_can_be_served(preset: str) -> None:
    assert our_settings({"preset": preset}, KNOWN) == PRESETS[preset]
    check(EngineConfig(**PRESETS[preset]))


def test_given_settings_override_a_preset_whatever_their_name() -> None:
    given = {"max_running_requests": 3, "preset": "throughput", "gpu_memory_utilization": 0.5}
    want = {**PRESETS["throughput"], "max_num_seqs": 3, "memory_utilization": 0.5}
    assert our_settings(given, KNOWN) == want


def test_a_server_takes_a_preset_from_its_file_and_its_flags() -> None:
    of_file = make_config({"model": "demo", "preset": "long-context", "max_num_seqs": 3}).engine
    assert (of_file.max_num_seqs, of_file.kv_cache_dtype) == (3, "int8")
    below = make_config({"model": "demo", "engine": {"preset": "small-gpu"}}).engine
    assert (below.max_num_seqs, below.kv_cache_dtype) == (16, "int8")
    flags = serve.parse(["demo", "--preset", "latency", "--max-num-seqs", "2"]).configuration.engine
    assert (flags.max_num_seqs, flags.speculative, flags.max_num_batched_tokens) == (2, "ngram", 1024)


def test_a_command_prints_a_preset_as_flags_that_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    settings = generate.parse(["demo", "--preset", "small-gpu", "--prompt", "a"]).settings
    name, _, flags = capsys.readouterr().err.strip().partition(": ")
    assert name == "preset small-gpu"
    assert generate.parse(["demo", "--prompt", "a", *flags.split()]).settings == settings == PRESETS["small-gpu"]


def test_an_unknown_preset_is_rejected() -> None:
    with pytest.raises(SettingNameError, match="preset = 'fast'"):
        our_settings({"preset": "fast"}, KNOWN)
    with pytest.raises(EngineConfigError, match="preset = 'fast'"):
        LLM("demo", preset="fast")
    with pytest.raises(SystemExit):
        serve.parse(["demo", "--preset", "fast"])
