"""Files of an adapter, validated before anything of their size is allocated."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.folders import CONFIG_FILE, PICKLED_FILE, TENSORS_FILE
from jaxinfer.lora.peft.naming import Naming, find_naming, is_of_others
from jaxinfer.weights.errors import CheckpointError, listed, quoted
from jaxinfer.weights.safetensors.checkpoint import read_json_object
from jaxinfer.weights.safetensors.reader import SafetensorsFile, TensorInfo

_log = logging.getLogger("jaxinfer")

MOST_CONFIG_BYTES = 2**20
MOST_HEADER_BYTES = 2**24

_FLOATS = ("F16", "BF16", "F32", "F64")
_KINDS = (
    *(r"lora_A\.weight", r"lora_B\.weight", r"lora_B\.bias", "lora_embedding_A", "lora_embedding_B"),
    *("lora_magnitude_vector", r"base_layer\.weight", r"base_layer\.bias", "bias", "weight"),
    r"token_adapter\.trainable_tokens_delta",
)
_NAME = re.compile(rf"base_model\.model\.(?P<module>.{{1,500}}?)\.(?P<kind>{'|'.join(_KINDS)})")
_CONVERT = (
    "python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('adapter_model.bin', "
    "weights_only=True, map_location='cpu'), 'adapter_model.safetensors')\""
)


@dataclasses.dataclass(frozen=True)
class AdapterFiles:
    """An opened adapter folder.

    Attributes:
        config: contents of adapter_config.json.
        modules: tensors of each module by kind: "lora_A.weight", "bias", ...
        naming: mapping of module names; until `named` is called, the names of the file.
    """

    folder: pathlib.Path
    config: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, TensorInfo]]
    _file: SafetensorsFile
    naming: Naming = dataclasses.field(default_factory=Naming)

    def named(self, known: Collection[str], *, tower: bool = False) -> AdapterFiles:
        """Return a copy with modules by the model's names, without those of other components of a wrapper.

        Args:
            known: module names of the model.
            tower: the model has a vision tower.

        Raises:
            AdapterError: two modules of the file map to one name, or a module is one of the tower.
        """
        naming = find_naming(self.modules, known)
        others = [name for name in self.modules if is_of_others(name)]
        if others and tower:
            raise AdapterError(f"{self.folder} adapts the vision tower, which is not supported: {listed(others)}")
        if others:
            _log.warning(f"{self.folder} adapts what a text model has not, which is passed over: {listed(others)}")
        modules: dict[str, Mapping[str, TensorInfo]] = {}
        for name in (name for name in self.modules if name not in others):
            own = naming.own(name)
            if own in modules:
                raise AdapterError(f"{self.folder} adapts twice: {quoted(own)}")
            modules[own] = self.modules[name]
        return dataclasses.replace(self, modules=modules, naming=naming)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by the file's names."""
        return self._file.tensors

    def raw(self, name: str) -> np.ndarray:
        """Return a tensor as stored."""
        return self._file.read(name)

    def read(self, info: TensorInfo) -> Float32[np.ndarray, "*shape"]:
        """Return a tensor in float32.

        Raises:
            AdapterError: it holds NaN or infinite values, including those that overflow from float64.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(self._file.read(info.name), np.float32)
        if not np.isfinite(values).all():
            raise AdapterError(f"tensor {quoted(info.name)} of {self.folder} holds NaN or infinite values")
        return values


def open_adapter(folder: pathlib.Path) -> AdapterFiles:
    """Open a PEFT folder without reading values.

    Raises:
        AdapterError: a file is missing, too large or damaged, or holds a tensor that is not part of LoRA.
    """
    try:
        return _open(folder)
    except CheckpointError as error:
        raise AdapterError(str(error)) from error


def _open(folder: pathlib.Path) -> AdapterFiles:
    _require_small(folder / CONFIG_FILE)
    config = read_json_object(folder / CONFIG_FILE)
    if not (folder / TENSORS_FILE).exists() and (folder / PICKLED_FILE).exists():
        raise AdapterError(f"{folder} has its tensors in {PICKLED_FILE}, a pickle, which is never read: run {_CONVERT}")
    _require_small_header(folder / TENSORS_FILE)
    file = SafetensorsFile(folder / TENSORS_FILE)
    return AdapterFiles(folder, config, _by_module(file), file)


def _require_small(path: pathlib.Path) -> None:
    if path.is_file() and path.stat().st_size > MOST_CONFIG_BYTES:
        raise AdapterError(f"{path} is larger than {MOST_CONFIG_BYTES} bytes")


def _require_small_header(path: pathlib.Path) -> None:
    if not path.is_file():
        raise AdapterError(f"{path} does not exist or is not a file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER_BYTES:
        raise AdapterError(f"{path} claims a header of {length} bytes, more than the allowed {MOST_HEADER_BYTES}")


def _by_module(file: SafetensorsFile) -> dict[str, dict[str, TensorInfo]]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    for info in file.tensors.values():
        found = _NAME.fullmatch(info.name)
        if found is None:
            raise AdapterError(f"tensor {quoted(info.name)} of {file.path} is nothing that LoRA adds to a module")
        if info.dtype not in _FLOATS:
            raise AdapterError(f"tensor {quoted(info.name)} of {file.path} is stored as {info.dtype}, not as floats")
        kind = "bias" if found["kind"] == "base_layer.bias" else found["kind"]
        tensors = modules.setdefault(found["module"], {})
        if kind in tensors:
            raise AdapterError(f"tensor {quoted(info.name)} of {file.path} says again what {tensors[kind].name} says")
        tensors[kind] = info
    return modules
