"""Converted folders among others: `open_model_files` opens whatever there is."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from jaxinfer.types import ParamTree
from jaxinfer.weights.checkpoint import Checkpoint, Tensors
from jaxinfer.weights.described import described
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.files import ModelFiles, open_files
from jaxinfer.weights.manifest import Manifest, is_converted, read_manifest
from jaxinfer.weights.restore import ConvertedCheckpoint


def open_model_files(path: pathlib.Path) -> ModelFiles:
    """`open_files`, but a folder that `jaxinfer.convert` wrote is known by its manifest.

    Raises:
        CheckpointError: see `open_files` and `read_manifest`.
    """
    return ConvertedFiles.open(path) if is_converted(path) else open_files(path)


@dataclasses.dataclass(frozen=True)
class ConvertedFiles(ModelFiles):
    """A converted folder. Its parameters lie as the engine has them, and have no other names than the engine's."""

    manifest: Manifest

    @classmethod
    def open(cls, path: pathlib.Path) -> ConvertedFiles:
        """Reads config.json and the manifest, whose dtype is the model's.

        Raises:
            CheckpointError: one of them is not as it must be, or they are not of one model.
        """
        config, manifest = open_files(path).config_json, read_manifest(path)
        named = config.get("architectures")
        if not isinstance(named, list) or manifest.architecture not in named:
            raise CheckpointError(f"{path} was converted as {quoted(manifest.architecture)}, config.json has another")
        return cls(path, {**config, "dtype": manifest.dtype}, manifest)

    @functools.cached_property
    def tensors(self) -> Tensors:
        """None: what there is has the engine's form."""
        return Checkpoint(self.path, {})

    @property
    def quantised(self) -> bool:
        """Some weights are stored quantised."""
        return bool(self.manifest.storages)

    def named(self, specs: ParamTree, prefix: str) -> ParamTree:
        """The parameters as they are."""
        del prefix
        return specs

    def stored(self, specs: ParamTree, dtype: str) -> ParamTree:
        """The parameters with the storages that the manifest describes."""
        return described(specs, self.manifest.storages, dtype)

    def checkpoint(self, specs: ParamTree) -> ConvertedCheckpoint:
        """What `load_params` restores them from."""
        del specs
        return ConvertedCheckpoint(self.path, self.manifest)
