"""Opening a model of any checkpoint format: safetensors folders, converted folders and GGUF files."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

from jaxinfer.formats.multimodal import wrapped_name
from jaxinfer.types import VISION, ParamTree
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.files import ModelFiles, open_files
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from jaxinfer.weights.native.layouts import described
from jaxinfer.weights.native.manifest import Manifest, is_converted, read_manifest
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.checkpoint import Checkpoint, Tensors
from jaxinfer.weights.tree import with_names


def open_model_files(path: pathlib.Path) -> ModelFiles:
    """Open a GGUF file, a converted folder (recognised by its manifest), or else a folder as `open_files` does.

    Raises:
        CheckpointError: see `open_files`, `read_manifest`, `open_gguf`; or a folder's GGUF file must be named instead.
    """
    if path.is_file():
        return GgufFiles.open(path)
    if not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise CheckpointError(f"{path} holds a GGUF file and no config.json: pass {quoted(str(files[0]))}")
    return ConvertedFiles.open(path) if is_converted(path) else open_files(path)


@dataclasses.dataclass(frozen=True)
class GgufFiles(ModelFiles):
    """A GGUF file, or the files of a split model; ``path`` is the first."""

    opened: GgufCheckpoint

    @classmethod
    def open(cls, path: pathlib.Path) -> GgufFiles:
        """Open the file and check all headers.

        Raises:
            CheckpointError: see `open_gguf`.
        """
        opened = open_gguf(path)
        return cls(path, opened.config_json, opened)

    @property
    def tensors(self) -> Tensors:
        """The tensors of the file; those that are not block-quantised are read as arrays."""
        return self.opened

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(weight.nbytes for weight in self.opened.weights.values())

    @property
    def quantized(self) -> bool:
        """Whether some weights are block-quantised."""
        return bool(self.opened.weights)

    @property
    def quant_method(self) -> str:
        return "gguf"

    @property
    def _stored(self) -> tuple[Mapping[str, StoredWeight], frozenset[str]]:
        return self.opened.weights, frozenset()


@dataclasses.dataclass(frozen=True)
class ConvertedFiles(ModelFiles):
    """A converted folder. Its parameters have the layout and the names of the engine."""

    manifest: Manifest

    @classmethod
    def open(cls, path: pathlib.Path) -> ConvertedFiles:
        """Read config.json and the manifest; the manifest gives the model's dtype.

        Raises:
            CheckpointError: one of them is invalid, or they describe different models.
        """
        files, manifest = open_files(path), read_manifest(path)
        named = files.whole_json.get("architectures")
        if not isinstance(named, list) or manifest.architecture not in named:
            raise CheckpointError(f"{path} was converted as {quoted(manifest.architecture)}, config.json has another")
        config = {**files.config_json, "dtype": manifest.dtype}
        return cls(path, config, manifest, wrapped=files.wrapped, whole_json=files.whole_json)

    @functools.cached_property
    def tensors(self) -> Tensors:
        """An empty checkpoint: a converted folder has no tensors in another layout than the engine's."""
        return Checkpoint(self.path, {})

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    @property
    def quantized(self) -> bool:
        """Whether some weights are stored quantised."""
        return bool(self.manifest.storages)

    @property
    def left_out(self) -> dict[str, int]:
        """Number of arrays of a vision tower."""
        count = sum(map(_of_tower, self.manifest.arrays))
        return {VISION: count} if count else {}

    def named(self, specs: ParamTree, prefix: str) -> ParamTree:
        """Return the specs unchanged."""
        del prefix
        return specs

    def spelled(self, specs: ParamTree, prefix: str) -> ParamTree:
        """Return the specs with the names that a checkpoint of the model would have."""
        del prefix
        return with_names(specs, functools.partial(wrapped_name, self.whole_json)) if self.wrapped else specs

    def stored(self, specs: ParamTree, dtype: str) -> ParamTree:
        """Return the specs with the quantised storages that the manifest describes."""
        return described(specs, self.manifest.storages, dtype)

    def checkpoint(self, specs: ParamTree) -> ConvertedCheckpoint:
        """Return the source from which `load_params` restores the parameters, with a vision tower or without."""
        manifest = self.manifest
        if VISION not in specs:
            arrays = {name: array for name, array in manifest.arrays.items() if not _of_tower(name)}
            manifest = dataclasses.replace(manifest, arrays=arrays)
        return ConvertedCheckpoint(self.path, manifest)


def _of_tower(name: str) -> bool:
    return name.startswith(f"{VISION}/")
