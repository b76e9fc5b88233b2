"""Models without a checkpoint, and requests that use every sampling feature."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.draft_heads import abstract_head
from jaxinfer.models.head import HeadFiles
from jaxinfer.models.heads.eagle import MAP
from jaxinfer.models.model import Model, abstract
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import map_specs
from jaxinfer.weights import init_params


def llama_json(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **changes,
    }


def random_model(dtype: str = "float32", seed: int = 0, gain: float = 6.0, **changes: Any) -> Model:
    """Return a Llama with random weights and no tokenizer.

    ``gain`` scales its matrices: at this width the usual deviation would give all tokens nearly the same logit.
    """
    model = abstract(llama_json(**changes), dtype, "random")
    params = init_params(model.specs, seed, dtype)
    return model.replace(params=jax.tree.map(lambda x: x * gain if x.ndim > 1 else x, params))


def medium_model(dtype: str, layers: int = 4) -> Model:
    """Return a Llama of hidden size 768, intermediate size 2048: here the bits of a matmul depend on its row count."""
    return random_model(
        dtype,
        gain=1.0,
        vocab_size=2048,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )


def mixed_params(number: int, **changes: Any) -> SamplingParams:
    """Return a mixture of sampling features, a function of ``number``."""
    mixtures: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.2, "min_p": 0.05, "top_k": 40, "top_p": 0.95},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_n_sigma": 2.0},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 11: -100.0}},
        {"temperature": 1.0, "allowed_token_ids": list(range(3, 60))},
        {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": [1, 2, 3]},
        {"temperature": 0.0, "prompt_logprobs": 2},
    ]
    base = {"seed": 1000 + number, "max_tokens": 3 + number % 9, "logprobs": 3 if number % 3 == 0 else None}
    return SamplingParams(**{**base, **mixtures[number % len(mixtures)], **changes})


HEAD_NAMES = {"medusa": {f"{i}.0.linear.weight" for i in range(4)}, "eagle": {"fc.bias"}, "eagle3": {"midlayer."}}


def random_head(method: str, model: Model, gain: float = 6.0, seed: int = 1, **changes: Any) -> Model:
    """Return a draft head with random weights for a model; for EAGLE-3 its draft vocabulary is half of the model's."""
    config, vocab = model.config, model.config.vocab_size
    taps = {"eagle_aux_hidden_state_layer_ids": [-1, 0, len(config.layers) - 2]}
    sizes = ("vocab_size", "hidden_size", "intermediate_size")
    known = {
        **{name: getattr(config, name) for name in sizes},
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_eps,
        **({"draft_vocab_size": vocab // 2, **taps} if method == "eagle3" else {}),
        **changes,
    }
    files = HeadFiles(known, HEAD_NAMES[method], config, model.cache_spec.windows)
    head = abstract_head(method, files, method, str(model.dtype))
    specs = map_specs(lambda path, spec: dataclasses.replace(spec, scale=spec.scale * gain), head.specs)
    params = init_params(specs, seed, str(model.dtype))
    if method == "eagle3":
        params[MAP] = jnp.where(jnp.arange(vocab) % 2 == 0, -1, jnp.arange(vocab) // 2)
    return head.replace(params=params)
