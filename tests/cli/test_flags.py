"""Command-line flags derived from `EngineConfig`."""

import argparse
import dataclasses

import pytest

from jaxinfer.cli.flags import add_flags, attribute_docs, given_settings
from jaxinfer.config import EngineConfig

FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]


def parse(*arguments: str, skip: tuple[str, ...] = ()) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip)
    return given_settings(parser.parse_args(arguments), EngineConfig, skip)


def test_what_is_not_given_is_left_to_the_configuration():
    assert parse() == {}
    assert EngineConfig(**parse()) == EngineConfig()


EVERY = {
    "max_model_len": (["--max-model-len", "128"], 128),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "512"], 512),
    "page_size": (["--page-size", "16"], 16),
    "num_pages": (["--num-pages", "99"], 99),
    "num_states": (["--num-states", "9"], 9),
    "kv_cache_dtype": (["--kv-cache-dtype", "int8"], "int8"),
    "activation_dtype": (["--activation-dtype", "int8"], "int8"),
    "kv_cache_bytes": (["--kv-cache-bytes", "1000"], 1000),
    "memory_utilization": (["--memory-utilization", "0.5"], 0.5),
    "prefill_sizes": (["--prefill-sizes", "16", "64"], (16, 64)),
    "max_prefill_rows": (["--max-prefill-rows", "64"], 64),
    "max_logprobs": (["--max-logprobs", "0"], 0),
    "enable_training_outputs": (["--enable-training-outputs"], True),
    "enable_weight_updates": (["--enable-weight-updates"], True),
    "enable_prefix_caching": (["--no-enable-prefix-caching"], False),
    "swap_space_gib": (["--swap-space-gib", "0"], 0.0),
    "weight_offload_gib": (["--weight-offload-gib", "2.5"], 2.5),
    "scheduling_policy": (["--scheduling-policy", "fair"], "fair"),
    "max_waiting_requests": (["--max-waiting-requests", "7"], 7),
    "max_waiting_sequences": (["--max-waiting-sequences", "17"], 17),
    "max_waiting_tokens": (["--max-waiting-tokens", "70"], 70),
    "async_scheduling": (["--async-scheduling", "off"], False),
    "batching": (["--batching", "static"], "static"),
    "multi_step": (["--multi-step", "4"], 4),
    "trace_steps": (["--trace-steps", "steps.jsonl"], "steps.jsonl"),
    "speculative": (["--speculative", "ngram"], "ngram"),
    "speculative_model": (["--speculative-model", "folder"], "folder"),
    "num_speculative_tokens": (["--num-speculative-tokens", "2"], 2),
    "speculative_tree": (["--speculative-tree", "3"], 3),
    "typical_threshold": (["--typical-threshold", "0.3"], 0.3),
    "typical_alpha": (["--typical-alpha", "0.09"], 0.09),
    "prompt_lookup_min": (["--prompt-lookup-min", "1"], 1),
    "prompt_lookup_max": (["--prompt-lookup-max", "9"], 9),
    "speculative_adaptive": (["--speculative-adaptive", "off"], False),
    "suffix_cache_tokens": (["--suffix-cache-tokens", "77"], 77),
    "structured_output_helpers": (["--structured-output-helpers", "0"], 0),
    "limit_mm_per_prompt": (["--limit-mm-per-prompt", "image=2"], ("image=2",)),
    "encoder_sizes": (["--encoder-sizes", "64", "256"], (64, 256)),
    "encoder_cache_size": (["--encoder-cache-size", "512"], 512),
    "enable_lora": (["--enable-lora"], True),
    "max_loras": (["--max-loras", "3"], 3),
    "max_lora_rank": (["--max-lora-rank", "64"], 64),
    "lora_target_modules": (["--lora-target-modules", "all-linear", "lm_head"], ("all-linear", "lm_head")),
    "max_cpu_loras": (["--max-cpu-loras", "40"], 40),
    "quantization": (["--quantization", "fp8"], "fp8"),
    "quantization_group_size": (["--quantization-group-size", "64"], 64),
    "calibration_data": (["--calibration-data", "text.txt"], "text.txt"),
    "calibration_samples": (["--calibration-samples", "128"], 128),
    "calibration_length": (["--calibration-length", "2048"], 2048),
    "exactness": (["--exactness", "relaxed"], "relaxed"),
    "attention_backend": (["--attention-backend", "xla"], "xla"),
    "gemm_backend": (["--gemm-backend", "xla"], "xla"),
    "kernel_trial": (["--kernel-trial", "error"], "error"),
    "decode_sizes": (["--decode-sizes", "2", "8"], (2, 8)),
    "tensor_parallel_size": (["--tensor-parallel-size", "2"], 2),
    "expert_parallel_size": (["--expert-parallel-size", "4"], 4),
    "pipeline_parallel_size": (["--pipeline-parallel-size", "2"], 2),
    "data_parallel_size": (["--data-parallel-size", "2"], 2),
    "enable_dp_attention": (["--enable-dp-attention"], True),
    "sequence_parallel_norms": (["--sequence-parallel-norms"], True),
    "seed": (["--seed", "5"], 5),
}


def test_every_field_is_tried_below():
    assert sorted(EVERY) == sorted(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_a_flag_sets_its_field_and_no_other(field):
    arguments, value = EVERY[field]
    settings = parse(*arguments)
    assert settings == {field: value}
    assert type(settings[field]) is type(value)
    assert getattr(EngineConfig(**settings), field) == value


def test_switches_go_both_ways():
    assert parse("--enable-prefix-caching") == {"enable_prefix_caching": True}
    assert parse("--async-scheduling", "on") == {"async_scheduling": True}


@pytest.mark.parametrize("arguments", [["--async-scheduling", "maybe"], ["--page-size", "x"], ["--no-such-flag"]])
def test_a_value_of_the_wrong_kind_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        parse(*arguments)
    assert left.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_skipped_field_has_no_flag(capsys):
    assert parse("--page-size", "16", skip=("seed",)) == {"page_size": 16}
    with pytest.raises(SystemExit):
        parse("--seed", "5", skip=("seed",))
    assert "--seed" in capsys.readouterr().err


def test_every_flag_is_explained(capsys):
    docs = attribute_docs(EngineConfig)
    assert sorted(docs) == sorted(FIELDS)
    assert all(docs.values())
    assert docs["max_waiting_tokens"] == docs["max_waiting_sequences"] == docs["max_waiting_requests"]
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    shown = " ".join(parser.format_help().split())
    assert "tokens per KV page, a power of two. (default: 64)" in shown
    assert "Off: for debugging. (default: on)" in shown
    assert "`" not in shown


def test_a_class_without_documentation_has_flags_without_help():
    assert attribute_docs(type("Bare", (), {})) == {}


@dataclasses.dataclass(frozen=True)
class Door:
    """Settings of an entrance.

    Attributes:
        open: whether it is.
        width: in metres.
    """

    open: bool = False
    width: float | None = None


def test_a_prefix_keeps_the_flags_of_two_configurations_apart():
    parser = argparse.ArgumentParser()
    for prefix in ("front_", "back_"):
        add_flags(parser.add_argument_group(prefix), Door, prefix=prefix)
    args = parser.parse_args(["--front-open", "--back-width", "2", "--no-back-open"])
    assert given_settings(args, Door, prefix="front_") == {"open": True}
    assert given_settings(args, Door, prefix="back_") == {"open": False, "width": 2.0}
