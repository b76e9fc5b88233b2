"""The jaxinfer peer: the encoder of the same tower, as the engine compiles it for a bucket of the image's patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.image_encoders.towers import TOWERS, VALUES, Grid, serve
from jaxinfer.models.vision.qwen2 import QWEN2_VL
from jaxinfer.types import map_specs


def prepare(tower: str, grid: Grid, dtype: str) -> Callable[[], Any]:
    fields = TOWERS[tower]
    config = QWEN2_VL.config({"vision_config": fields, "image_token_id": 1, "hidden_size": fields["hidden_size"]})
    rng, rows = np.random.default_rng(0), grid[0] * grid[1] * grid[2]

    def drawn(_: tuple[str, ...], spec: Any) -> jax.Array:
        return jnp.asarray(0.02 * rng.standard_normal(spec.shape, np.float32), dtype)

    params = map_specs(drawn, QWEN2_VL.param_specs(config))
    module: Any = QWEN2_VL.module(config)
    patches, layout = jnp.asarray(rng.standard_normal((rows, VALUES), np.float32)), module.layout(grid, rows)
    encode = jax.jit(lambda params, patches, layout: module.apply({"params": params}, patches, layout))
    return lambda: encode(params, patches, layout).block_until_ready()


if __name__ == "__main__":
    serve({"jax": jax.__version__}, prepare)
