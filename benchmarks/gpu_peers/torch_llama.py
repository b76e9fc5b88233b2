"""Llama in PyTorch with a static KV cache (Touvron et al., arXiv:2307.09288; RoPE scaling of Llama 3.1).

Decoding is one CUDA graph for each batch size. Prompts of a batch have one length. Runs without JAX and transformers.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.peers.checkpoint import read_tensors


class Llama:
    """Llama model: weights ``w`` under the names of a published checkpoint, and the KV cache of the last `prefill`.

    Args:
        config: contents of config.json.
        tensors: tensors of a checkpoint; None: random weights.
    """

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor] | None, dtype: torch.dtype, device: str
    ) -> None:
        self.config, self._dtype, self._device = config, dtype, device
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._dim = config.get("head_dim") or config["hidden_size"] // self._heads
        self._layers = [self._layer(at, tensors) for at in range(config["num_hidden_layers"])]
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self._embed = self._weight(tensors, "model.embed_tokens.weight", (vocab, hidden))
        self._norm = self._weight(tensors, "model.norm.weight", (hidden,))
        tied = config.get("tie_word_embeddings", False)
        self._head = self._embed if tied else self._weight(tensors, "lm_head.weight", (vocab, hidden))
        self._angles = _frequencies(config, self._dim).to(device)
        self._cache: list[Tensor] = []

    def _layer(self, at: int, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        hidden, wide = self.config["hidden_size"], self.config["intermediate_size"]
        queries, keys = self._heads * self._dim, self._kv_heads * self._dim
        parts = {
            "qkv": (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)),
            "out": (("self_attn.o_proj", hidden),),
            "gate_up": (("mlp.gate_proj", wide), ("mlp.up_proj", wide)),
            "down": (("mlp.down_proj", hidden),),
        }
        inner = {"out": queries, "down": wide}
        found = {
            name: torch.cat([
                self._weight(tensors, f"model.layers.{at}.{part}.weight", (size, inner.get(name, hidden)))
                for part, size in sizes
            ])
            for name, sizes in parts.items()
        }  # fmt: skip
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[norm] = self._weight(tensors, f"model.layers.{at}.{norm}.weight", (hidden,))
        return found

    def _weight(self, tensors: dict[str, Tensor] | None, name: str, shape: tuple[int, ...]) -> Tensor:
        if tensors is not None:
            return tensors[name].to(self._device, self._dtype)
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device) / math.sqrt(shape[-1])

    def reserve(self, batch: int, length: int) -> None:
        """Allocate an empty cache for ``batch`` sequences of ``length`` tokens."""
        shape = (2, batch, self._kv_heads, length, self._dim)
        self._cache = [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in self._layers]
        self._places = torch.arange(length, device=self._device)

    def prefill(self, tokens: Tensor, first: int) -> Tensor:
        """Return logits ``[batch, vocab]`` after prompts ``[batch, time]``; their sequences start at ``first``."""
        batch, time = tokens.shape
        places = self._places[:time]

        def attend(cache: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache[0, first : first + batch, :, :time], cache[1, first : first + batch, :, :time] = k, v
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return self._run(tokens, places, attend)

    def decode(self, tokens: Tensor, place: Tensor) -> Tensor:
        """Return logits ``[batch, vocab]`` of a token ``[batch, 1]`` per sequence, at position ``place`` ``[1]``."""
        seen = (self._places <= place)[None, None, None]

        def attend(cache: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache[0].index_copy_(2, place, k)
            cache[1].index_copy_(2, place, v)
            return functional.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen, enable_gqa=True)

        return self._run(tokens, place, attend)

    def _run(self, tokens: Tensor, places: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        batch, time = tokens.shape
        angles = places[:, None].double() * self._angles
        turn = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        x = self._embed[tokens]
        for layer, cache in zip(self._layers, self._cache, strict=True):
            qkv = functional.linear(self._normed(x, layer["input_layernorm"]), layer["qkv"])
            qkv = qkv.view(batch, time, -1, self._dim).transpose(1, 2)
            q, k, v = qkv.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
            mixed = attend(cache, _rotate(q, *turn), _rotate(k, *turn), v)
            x = x + functional.linear(mixed.transpose(1, 2).reshape(batch, time, -1), layer["out"])
            gate, up = functional.linear(self._normed(x, layer["post_attention_layernorm"]), layer["gate_up"]).chunk(
                2, -1
            )
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(self._normed(x[:, -1], self._norm), self._head)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _frequencies(config: dict[str, Any], dim: int) -> Tensor:
    """Return radians per token of each pair ``[dim / 2]``; llama3 ``rope_scaling`` stretches low frequencies."""
    found = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return found
    turns = scaling["original_max_position_embeddings"] * found / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return found * (kept + (1 - kept) / scaling["factor"])


def tensors_of(folder: pathlib.Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint's safetensors files, in float32."""
    return {name: torch.from_numpy(array.copy()) for name, array in read_tensors(folder)}
