"""Converter changes to gated DeltaNet tensors (Qwen3-Next, Qwen3.5), and their inverse.

In checkpoints value heads are grouped by key head. Files of Qwen3.5 have the first value head of every key head, then
the second of each (``_LinearAttentionVReorderBase`` of ``convert_hf_to_gguf.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxinfer.weights.gguf.fields import Json
from jaxinfer.weights.gguf.header_view import MAX_HEADS, Described
from jaxinfer.weights.gguf.name_rules import Target

Order = Callable[[int], np.ndarray]

_SMALLEST = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of the recurrent layers: ``keys`` key heads with ``values`` value heads each, and their dimensions."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(model: Described) -> Heads:
        """Read the heads; raise CheckpointError if the metadata lacks a size or the sizes do not divide each other."""
        keys, total = (model.count(f"ssm.{name}", most=MAX_HEADS) for name in ("group_count", "time_step_rank"))
        inner, size = model.count("ssm.inner_size"), model.count("ssm.state_size")
        if not keys or not total or total % keys:
            raise model.bad("ssm.time_step_rank", total)
        if not inner or inner % total:
            raise model.bad("ssm.inner_size", inner)
        return Heads(keys, total // keys, size, inner // total)

    def fields(self, model: Described) -> Json:
        """Return the sizes as config.json fields."""
        return {
            "linear_conv_kernel_dim": model.count("ssm.conv_kernel"),
            "linear_num_key_heads": self.keys,
            "linear_num_value_heads": self.keys * self.values,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
        }


def by_heads(model: Described) -> Order:
    """Return the order that regroups concatenated queries, keys, values and gates by key head."""
    heads = Heads.of(model)
    widths = (heads.key_dim, heads.key_dim, *2 * (heads.values * heads.value_dim,))

    def order(rows: int) -> np.ndarray:
        if rows != heads.keys * sum(widths):
            raise model.bad("ssm.inner_size", model.get("ssm.inner_size"))
        parts = np.split(np.arange(rows), np.cumsum([heads.keys * width for width in widths[:-1]]))
        return np.concatenate([part.reshape(heads.keys, -1) for part in parts], axis=1).reshape(-1)

    return order


def decays(model: Described, target: Target) -> Target:
    """Convert decays, which the file stores, to their logarithms, which the checkpoint stores."""
    del model
    return dataclasses.replace(target, undo=_logarithms)


def tiled_decays(model: Described, target: Target) -> Target:
    return decays(model, tiled(model, target))


def tiled(model: Described, target: Target) -> Target:
    """Regroup rows of value heads, of any equal size, by key head."""
    return dataclasses.replace(target, order=_untiled(model))


def tiled_columns(model: Described, target: Target) -> Target:
    return dataclasses.replace(target, columns=_untiled(model))


def channels(model: Described, target: Target) -> Target:
    """Add the input-channel dimension of size 1 to a convolution's taps [channels, taps]."""
    del model
    return dataclasses.replace(target, taps=True)


def tiled_values(model: Described, target: Target) -> Target:
    """Regroup the rows of values, which follow those of queries and keys."""
    heads, behind = Heads.of(model), _untiled(model)
    first = 2 * heads.keys * heads.key_dim

    def order(rows: int) -> np.ndarray:
        if rows <= first:
            raise model.bad("ssm.state_size", heads.key_dim)
        return np.concatenate([np.arange(first), first + behind(rows - first)])

    return dataclasses.replace(target, order=order)


def tiled_channels(model: Described, target: Target) -> Target:
    return channels(model, tiled_values(model, target))


def _untiled(model: Described) -> Order:
    heads = Heads.of(model)

    def order(rows: int) -> np.ndarray:
        if rows % (heads.keys * heads.values):
            raise model.bad("ssm.time_step_rank", heads.keys * heads.values)
        return np.arange(rows).reshape(heads.values, heads.keys, -1).swapaxes(0, 1).reshape(-1)

    return order


def _logarithms(numbers: np.ndarray) -> np.ndarray:
    """Return logarithms of the negated decays; raise ValueError if a decay is positive or NaN."""
    if not (numbers <= 0).all():
        raise ValueError("decays that are not at most 0")
    return np.log(np.maximum(-numbers.astype(np.float32), _SMALLEST))
