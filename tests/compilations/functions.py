"""Functions to compile, with every kind of dependency that a digest must cover."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

TABLE = np.arange(6, dtype=np.float32).reshape(2, 3)
FACTOR = 2.0
BY_NAME = {"up": jnp.add}


@dataclasses.dataclass(frozen=True)
class Shift:
    by: float = 1.0

    def __call__(self, x: jax.Array) -> jax.Array:
        return BY_NAME["up"](x, self.by)

    @functools.cached_property
    def twice(self) -> float:
        return 2 * self.by


class Node:
    """A class that refers to itself."""

    child: type


Node.child = Node


class Layer(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.width, use_bias=False)(x)


def helper(x: jax.Array) -> jax.Array:
    return x * FACTOR


def other_helper(x: jax.Array) -> jax.Array:
    return x / FACTOR


@jax.jit
def jitted(x: jax.Array) -> jax.Array:
    return x - 1


def scaled(table: np.ndarray = TABLE, factor: float = 2.0, shift: Callable[..., Any] = Shift()) -> Any:
    """Return a function of a state and of an array."""

    def function(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        return {"state": state["state"] + 1}, [helper(jitted(shift(x))) * factor + jnp.asarray(table), state["state"]]

    return function
