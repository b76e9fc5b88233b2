"""A family of models, and of draft heads: config, parameters, cache and forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from jaxinfer.models.head import DraftHead, HeadFiles
from jaxinfer.models.vision.tower import VisionFamily
from jaxinfer.types import CacheSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models: its config from config.json, its parameters, its cache and its forward pass.

    Attributes:
        param_specs: every parameter with its shape, logical axes and source checkpoint tensors.
        ignore: patterns of checkpoint tensors that are not loaded.
        prefix: common name prefix of the decoder's tensors; checkpoints of the bare decoder omit it.
        vision: the vision tower of a family from outside; those of the package are found by the architecture of the
            checkpoint (`jaxinfer.models.vision.registry`).
    """

    config: Callable[[Mapping[str, Any]], Any]
    param_specs: Callable[[Any], ParamTree]
    cache_spec: Callable[[Any], CacheSpec]
    module: Callable[[Any], nn.Module]
    ignore: tuple[str, ...] = ()
    prefix: str = "model."
    vision: VisionFamily | None = None


@dataclasses.dataclass(frozen=True)
class HeadFamily:
    """A kind of draft heads: as `Family`, but a head's config is read together with that of the target model."""

    config: Callable[[HeadFiles], Any]
    param_specs: Callable[[Any], ParamTree]
    cache_spec: Callable[[Any], CacheSpec]
    module: Callable[[Any], DraftHead]
    ignore: tuple[str, ...] = ()

    def family(self, files: HeadFiles) -> Family:
        """Return the family of heads for one target model."""

        def config(config_json: Mapping[str, Any]) -> Any:
            return self.config(dataclasses.replace(files, config_json=config_json))

        return Family(config, self.param_specs, self.cache_spec, self.module, self.ignore)
