"""What the converter changed of gated DeltaNet's tensors (Qwen3-Next, Qwen3.5), and how it is undone.

In checkpoints value heads stand by the key head that they belong to. Files of Qwen3.5 have the first of every key head,
then the second of each (``_LinearAttentionVReorderBase`` of ``convert_hf_to_gguf.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxinfer.weights.gguf.described import MAX_HEADS, Described
from jaxinfer.weights.gguf.fields import Json
from jaxinfer.weights.gguf.naming import Target

Order = Callable[[int], np.ndarray]

_SMALLEST = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of the recurrent layers: ``keys`` with ``values`` each, of ``key_dim`` and ``value_dim`` numbers."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(model: Described) -> Heads:
        """Raises CheckpointError: the metadata lacks a size, or sizes do not divide each other."""
        keys, total = (model.count(f"ssm.{name}", most=MAX_HEADS) for name in ("group_count", "time_step_rank"))
        inner, size = model.count("ssm.inner_size"), model.count("ssm.state_size")
        if not keys or not total or total % keys:
            raise model.bad("ssm.time_step_rank", total)
        if not inner or inner % total:
            raise model.bad("ssm.inner_size", inner)
        return Heads(keys, total // keys, size, inner // total)

    def fields(self, model: Described) -> Json:
        """What config.json calls them."""
        return {
            "linear_conv_kernel_dim": model.count("ssm.conv_kernel"),
            "linear_num_key_heads": self.keys,
            "linear_num_value_heads": self.keys * self.values,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
        }


def by_heads(model: Described) -> Order:
    """Rows of queries, keys, values and gates, one kind behind the other, to those of each key head together."""
    heads = Heads.of(model)
    widths = (heads.key_dim, heads.key_dim, *2 * (heads.values * heads.value_dim,))

    def order(rows: int) -> np.ndarray:
        if rows != heads.keys * sum(widths):
            raise model.bad("ssm.inner_size", model.get("ssm.inner_size"))
        parts = np.split(np.arange(rows), np.cumsum([heads.keys * width for width in widths[:-1]]))
        return np.concatenate([part.reshape(heads.keys, -1) for part in parts], axis=1).reshape(-1)

    return order


def decays(model: Described, target: Target) -> Target:
    """A file has the decays, and a checkpoint their logarithms."""
    del model
    return dataclasses.replace(target, undo=_logarithms)


def tiled_decays(model: Described, target: Target) -> Target:
    return decays(model, tiled(model, target))


def tiled(model: Described, target: Target) -> Target:
    """Rows of value heads, of as many numbers as there are, back to the key heads that they belong to."""
    return dataclasses.replace(target, order=_untiled(model))


def tiled_columns(model: Described, target: Target) -> Target:
    return dataclasses.replace(target, columns=_untiled(model))


def channels(model: Described, target: Target) -> Target:
    """A convolution's taps [channels, taps] have an input of one channel between them."""
    del model
    return dataclasses.replace(target, taps=True)


def tiled_values(model: Described, target: Target) -> Target:
    """Rows of values, behind those of queries and keys."""
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
    """Raises ValueError: a number is above 0, or none."""
    if not (numbers <= 0).all():
        raise ValueError("decays that are not at most 0")
    return np.log(np.maximum(-numbers.astype(np.float32), _SMALLEST))
