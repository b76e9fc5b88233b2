"""Converted folders and GGUF files among others: `open_model_files` opens whatever there is."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

from jaxinfer.types import ParamTree
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.files import ModelFiles, open_files
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from jaxinfer.weights.native.layouts import described
from jaxinfer.weights.native.manifest import Manifest, is_converted, read_manifest
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.checkpoint import Checkpoint, Tensors


def open_model_files(path: pathlib.Path) -> ModelFiles:
    """`open_files`, but a folder that `jaxinfer.convert` wrote is known by its manifest, and a file is a GGUF file.

    Raises:
        CheckpointError: see `open_files`, `read_manifest` and `open_gguf`; or the file to name is in the folder.
    """
    if path.is_file():
        return GgufFiles.open(path)
    if not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise CheckpointError(f"{path} holds a GGUF file and no config.json: pass {quoted(str(files[0]))}")
    return ConvertedFiles.open(path) if is_converted(path) else open_files(path)


@dataclasses.dataclass(frozen=True)
class GgufFiles(ModelFiles):
    """A GGUF file, or several that make one model; ``path`` is the first."""

    opened: GgufCheckpoint

    @classmethod
    def open(cls, path: pathlib.Path) -> GgufFiles:
        """Checks all headers.

        Raises:
            CheckpointError: see `open_gguf`.
        """
        opened = open_gguf(path)
        return cls(path, opened.config_json, opened)

    @property
    def tensors(self) -> Tensors:
        """Tensors of plain numbers: all of them."""
        return self.opened

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(weight.nbytes for weight in self.opened.weights.values())

    @property
    def quantized(self) -> bool:
        """Whether some weights are in blocks."""
        return bool(self.opened.weights)

    @property
    def _stored(self) -> tuple[Mapping[str, StoredWeight], frozenset[str]]:
        return self.opened.weights, frozenset()


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
        """Tensors of other forms than the engine's: none."""
        return Checkpoint(self.path, {})

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    @property
    def quantized(self) -> bool:
        """Whether some weights are stored quantised."""
        return bool(self.manifest.storages)

    def named(self, specs: ParamTree, prefix: str) -> ParamTree:
        """The parameters as they are."""
        del prefix
        return specs

    def stored(self, specs: ParamTree, dtype: str) -> ParamTree:
        """The parameters with the storages that the manifest describes."""
        return described(specs, self.manifest.storages, dtype)

    def checkpoint(self, specs: ParamTree) -> ConvertedCheckpoint:
        """Source from which `load_params` restores the parameters."""
        del specs
        return ConvertedCheckpoint(self.path, self.manifest)
