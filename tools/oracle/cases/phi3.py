"""Phi-3."""

from typing import Any

from tools.oracle.cases.case import Case, sizes

ARCHITECTURES = {"phi3": "Phi3ForCausalLM"}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict:
    """Return the sizes, with a padding token that is in the vocabulary."""
    return sizes(hidden, intermediate, layers, heads, kv_heads, pad_token_id=0, rms_norm_eps=1e-5, **others)


# Heads of 16: eight frequencies.
_SHORT = [1.0, 1.0, 1.05, 1.1, 1.4, 1.8, 2.2, 2.5]
_LONG = [1.0, 1.1, 1.5, 2.5, 5.0, 11.0, 20.0, 33.0]
_LONGROPE = {"type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}

CASES = (
    Case("phi3-mha", _sizes(64, 96, 2, 4, 4), prompt_length=33),
    Case(
        "phi3-window-hub",
        _sizes(64, 128, 3, 8, 2, sliding_window=8, rope_theta=1e4, rope_scaling=None, attention_bias=False),
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"sliding_window": 9},
    ),
    Case(
        "phi3-window-passed-in-decode",
        _sizes(64, 96, 2, 4, 1, sliding_window=30),
        prompt_length=20,
        overlooked={"sliding_window": None},
    ),
    Case(
        "phi3-tied-head20",
        _sizes(80, 96, 2, 4, 2, tie_word_embeddings=True, vocab_size=61),
        shards=2,
        overlooked={"rms_norm_eps": 1e-2},
    ),
    Case(
        "phi3-partial-hub",
        _sizes(64, 96, 2, 4, 2, partial_rotary_factor=0.75, rope_theta=1e4),
        style="hub",
        overlooked={"partial_rotary_factor": 0.5},
    ),
    Case(
        "phi3-longrope-short-hub",
        _sizes(
            64,
            96,
            2,
            4,
            2,
            rope_scaling=_LONGROPE,
            original_max_position_embeddings=256,
            max_position_embeddings=1024,
        ),
        style="hub",
        overlooked={"rope_scaling": None},
    ),
    Case(
        "phi3-longrope-long-hub",
        _sizes(64, 96, 2, 4, 4, rope_scaling=_LONGROPE, original_max_position_embeddings=32),
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"original_max_position_embeddings": 256},
    ),
    Case(
        "phi3-longrope-partial",
        _sizes(
            64,
            96,
            2,
            4,
            2,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=24,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 5e4,
                "short_factor": _SHORT[:6],
                "long_factor": _LONG[:6],
                "attention_factor": 1.3,
            },
        ),
        prompt_length=30,
    ),
)
