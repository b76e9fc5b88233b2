"""Config.json fields shared by many GGUF architectures: sizes, RoPE, experts and sliding windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxinfer.layers.rope import RopeConfig
from jaxinfer.weights.errors import CheckpointError
from jaxinfer.weights.gguf.header_view import Described

Json = dict[str, Any]


def common(model: Described) -> Json:
    """Return the fields shared by all Llama-like models."""
    return {**sizes(model), "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"), "hidden_act": "silu"}


def frame(model: Described) -> Json:
    """Return the fields shared by almost all models."""
    return {
        "vocab_size": model.rows("token_embd.weight"),
        "hidden_size": model.count("embedding_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.count("context_length"),
    }


def sizes(model: Described) -> Json:
    """Return the fields of `common` that do not depend on norm and activation."""
    head_dim = _head_dim(model)
    if model.count("attention.value_length", head_dim) != head_dim:
        raise model.bad("attention.value_length", model.get("attention.value_length"))
    return {
        **frame(model),
        "intermediate_size": model.count("feed_forward_length", 0) or None,
        "num_key_value_heads": model.kv_heads,
        "head_dim": head_dim,
        **_rope(model, head_dim),
    }


def _rope(model: Described, head_dim: int) -> Json:
    rotated = model.count("rope.dimension_count", head_dim)
    fields: Json = {"rope_theta": model.number("rope.freq_base", 10000.0)}
    if fields["rope_theta"] <= 0.0:
        raise model.bad("rope.freq_base", fields["rope_theta"])
    if rotated != head_dim:
        fields["partial_rotary_factor"] = _share(rotated, head_dim)
    if model.has("rope_factors_long.weight"):
        return {**fields, **_longrope(model, rotated)}
    scaling = rope_scaling(model)
    if model.has("rope_freqs.weight"):
        scaling = _by_factors(model, fields["rope_theta"], rotated, scaling)
    return fields if scaling is None else {**fields, "rope_scaling": scaling}


def _head_dim(model: Described) -> int:
    hidden = model.count("embedding_length")
    head_dim = model.count("attention.key_length", hidden // model.heads)
    if head_dim == 0:
        raise model.bad("attention.key_length", 0)
    return head_dim


def _share(rotated: int, head_dim: int) -> float:
    """Return a fraction for which int(head_dim * fraction) is exactly ``rotated``."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 2.0)


def rotated_share(model: Described) -> float:
    """Return the rotated fraction of a head, for families whose default is not the whole head."""
    head_dim = _head_dim(model)
    return _share(model.count("rope.dimension_count", head_dim), head_dim)


def rope_scaling(model: Described) -> Json | None:
    """Return the RoPE scaling in the metadata, as llama.cpp reads it; None if there is none.

    The default type is linear; ``rope.scaling.factor`` takes precedence over the older ``rope.scale_linear``;
    ``attn_factor`` multiplies cosines and sines for every type.
    """
    kind = model.get("rope.scaling.type") or "linear"
    if kind not in ("none", "linear", "yarn"):
        raise model.bad("rope.scaling.type", kind)
    factor, growth = _factor(model), _growth(model)
    if kind == "yarn":
        return _yarn(model, factor, growth)
    factor = 1.0 if kind == "none" else factor
    if growth != 1.0:
        rotated = model.count("rope.dimension_count", _head_dim(model))
        return _stretched(model, np.full(rotated // 2, factor), growth)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _factor(model: Described) -> float:
    """Return the divisor of the positions; files write 0 for none."""
    key = "rope.scaling.factor" if model.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = model.number(key, 0.0)
    if factor < 0.0:
        raise model.bad(key, factor)
    return factor or 1.0


def _growth(model: Described) -> float:
    """Return the multiplier of cosines and sines."""
    growth = model.number("rope.scaling.attn_factor", 1.0)
    if growth <= 0.0:
        raise model.bad("rope.scaling.attn_factor", growth)
    return growth


def _yarn(model: Described, factor: float, growth: float) -> Json:
    original = model.count("rope.scaling.original_context_length", model.count("context_length"))
    scaling: Json = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if model.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = model.number(f"rope.scaling.yarn_{name}")
    own = model.get("rope.scaling.yarn_attn_factor")
    if growth != 1.0 and model.get("rope.scaling.yarn_log_multiplier") is not None:
        raise model.bad("rope.scaling.attn_factor", growth)  # ambiguous: scales a factor that the log multiplier sets
    if own is not None or growth != 1.0:
        usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
        scaling["attention_factor"] = growth * model.number("rope.scaling.yarn_attn_factor", usual)
    return scaling


def _longrope(model: Described, rotated: int) -> Json:
    """Return LongRoPE scaling: two tensors of factors, and the multiplier of cosines and sines."""
    scaling: Json = {"rope_type": "longrope"}
    for name in ("short", "long"):
        scaling[f"{name}_factor"] = _as_decimals(_factors(model, f"rope_factors_{name}.weight", rotated))
    if model.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = _growth(model)
    original = model.count("rope.scaling.original_context_length", model.count("context_length"))
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _by_factors(model: Described, theta: float, rotated: int, scaling: Json | None) -> Json:
    """Return scaling by per-frequency factors, as "llama3" if they match: the converter writes the resulting factors
    instead of its parameters.

    A linear ``scaling`` also divides the frequencies.
    """
    factors = _factors(model, "rope_freqs.weight", rotated)
    if scaling is None:
        rope = RopeConfig(theta, "llama3", float(factors[-1]))
        usual = RopeConfig(theta).inverse_frequencies(rotated) / rope.inverse_frequencies(rotated)
        if np.allclose(factors, usual, rtol=1e-5):
            ends = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
            original = {"original_max_position_embeddings": rope.original_max_position}
            return {"rope_type": rope.kind, "factor": rope.factor, **ends, **original}
    elif scaling["rope_type"] == "yarn":
        raise CheckpointError(f"{model.path} has both rope_freqs.weight and a yarn scaling of its rotary embedding")
    factor = 1.0 if model.get("rope.scaling.type") == "none" else _factor(model)
    return _stretched(model, factors * factor, _growth(model))


def _stretched(model: Described, factors: np.ndarray, growth: float) -> Json:
    """Return scaling with one divisor per frequency at every length, and a multiplier of cosines and sines."""
    listed, context = _as_decimals(factors), model.count("context_length")
    fixed = {"factor": 1.0, "attention_factor": growth, "original_max_position_embeddings": context}
    return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed, **fixed}


def _as_decimals(factors: np.ndarray) -> list[float]:
    return [float(str(np.float32(value))) for value in factors]


def _factors(model: Described, name: str, rotated: int) -> np.ndarray:
    if model.shapes.get(name) != (rotated // 2,):
        raise CheckpointError(f"{model.path} has not {rotated // 2} numbers in {name}, one for each frequency")
    factors = model.read(name).astype(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(f"{model.path} has numbers in {name} that are not finite or not above 0")
    return factors


def expert_size(model: Described) -> int:
    """Return the intermediate size of an expert, from a tensor's shape for early converters, which omit the key."""
    if model.get("expert_feed_forward_length") is not None:
        return model.count("expert_feed_forward_length")
    return rows_of_first(model, "ffn_gate_exps.weight")


def rows_of_first(model: Described, tensor: str) -> int:
    for index in range(model.layers):
        shape = model.shapes.get(f"blk.{index}.{tensor}", ())
        if len(shape) >= 2:
            return shape[-2]
    raise CheckpointError(f"{model.path} has no tensor blk.*.{tensor}")


def layer_types(model: Described, every: int) -> list[str]:
    """Return the type of each layer: all except every ``every``th have a sliding window, unless a key overrides it."""
    windows = model.get("attention.sliding_window_pattern")
    if not isinstance(windows, list):
        period = model.count("attention.sliding_window_pattern", every)
        windows = [period == 0 or (index + 1) % period != 0 for index in range(model.layers)]
    if len(windows) < model.layers:
        raise model.bad("attention.sliding_window_pattern", windows)
    return ["sliding_attention" if window else "full_attention" for window in windows[: model.layers]]
