"""The whole model, layer by layer: in memory are one layer, statistics of its inputs, and the samples' hidden states.

The folder is made under the name ``<destination>.unfinished``, one file for each layer, and named when it is complete.
A run that is interrupted goes on behind the last layer that it finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.loading import open_model, write_companions
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.quant.make.formats import Stored, config_of, tensors_of
from jaxinfer.quant.make.gptq import enough_tokens
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.quant.observe import InputStatistics
from jaxinfer.quantise.calibration import Calibration, embedded, observed, passed
from jaxinfer.quantise.fold import Folder, Statistics, can_fold
from jaxinfer.quantise.layer import LayerWeights, Linear, linears, tensors
from jaxinfer.types import ParamTree
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.checkpoint import INDEX_FILE, read_json_object
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.load import Progress
from jaxinfer.weights.orbax import refuse_existing
from jaxinfer.weights.safetensors import SafetensorsFile
from jaxinfer.weights.tree import dtype_of, target_dtype, walk
from jaxinfer.weights.write import write_tensors

STATE = "jaxinfer_quantise.json"
_HIDDEN = "hidden-{:05}.safetensors"
_WITHIN = re.compile(r"^(?:.*?\.)?\d+\.(.+)$")  # what follows a layer's number

Tell = Callable[[str], None]


def quantise(
    source: str,
    destination: pathlib.Path,
    recipe: Recipe,
    calibration: Calibration | None = None,
    dtype: str = "auto",
    progress: Progress | None = None,
    tell: Tell = lambda sentence: None,
    check_finite: bool = False,
) -> None:
    """Writes a Hugging Face folder with quantised weights.

    Args:
        source: "demo", a folder or a hub id of a model that is not quantised.
        destination: a folder that does not exist.
        calibration: what the model is run on; needed where the recipe is ``calibrated``.
        dtype: of what is not quantised; "auto": the source's own.
        progress: called with layers done, layers in all, and a name.
        tell: told what stays as it is and why, a sentence at a time.
        check_finite: refuse NaN and infinite weights.

    Raises:
        CheckpointError, ConfigError, RecipeError: one sentence that says what is wrong.
        OSError: the destination cannot be written.
    """
    files, model = open_model(source, dtype, check_finite=check_finite)
    if files.quantised:
        raise CheckpointError(f"{source} is quantised already")
    if not isinstance(model.module, Decoder):
        raise RecipeError(f"{type(model.module).__name__} has no layers that can be run one by one")
    if recipe.calibrated and calibration is None:
        raise RecipeError(f"{recipe.method} needs sample text: pass --calibration FILE")
    refuse_existing(destination)
    work = _Work(files, model, recipe, calibration if recipe.calibrated else None, tell)
    with _unfinished(destination, _identity(source, work)) as folder:
        _write_layers(work, folder, progress)
        _write_rest(work, folder)
        refuse_existing(destination)
        (folder / STATE).unlink()
        folder.rename(destination)


def _identity(source: str, work: _Work) -> dict[str, Any]:
    """What must be the same for one run to go on where another was interrupted."""
    calibration = work.calibration
    return {
        "source": str(work.files.path.resolve() if work.files.path.exists() else source),
        "recipe": dataclasses.asdict(work.recipe),
        "dtype": work.dtype,
        "calibration": None if calibration is None else calibration.digest,
    }


@contextlib.contextmanager
def _unfinished(destination: pathlib.Path, identity: Mapping[str, Any]) -> Iterator[pathlib.Path]:
    """The folder that is worked in; what a run with another identity has left there is removed."""
    folder = destination.with_name(f"{destination.name}.unfinished")
    state = folder / STATE
    if folder.exists() and any(folder.iterdir()) and not state.exists():
        raise CheckpointError(f"{folder} is in the way: it was not made by an interrupted quantisation")
    folder.mkdir(parents=True, exist_ok=True)
    with state.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{destination} is being written by somebody else") from None
        file.seek(0)
        if file.read() != json.dumps(identity):
            for path in folder.iterdir():
                if path != state:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            file.truncate(0)
            file.write(json.dumps(identity))
            file.flush()
        yield folder


@dataclasses.dataclass(frozen=True)
class _Work:
    """What all layers share."""

    files: ModelFiles
    model: Model
    recipe: Recipe
    calibration: Calibration | None
    tell: Tell

    @property
    def module(self) -> Any:
        return self.model.module

    @property
    def dtype(self) -> str:
        return str(self.model.dtype)

    @property
    def stored(self) -> Stored:
        return self.recipe.stored(self.dtype)

    @property
    def layers(self) -> int:
        return len(self.model.config.layers)

    def specs(self) -> Mapping[str, Any]:
        specs: ParamTree = self.model.family.param_specs(self.model.config)
        return self.files.named(specs, self.model.family.prefix)

    def layer(self, index: int) -> LayerWeights:
        """Reads one layer."""
        own, params = self.specs()[f"layers_{index}"], self.model.params[f"layers_{index}"]
        specs = dict(walk(own))
        overrides = dict(self.module.overrides)
        values = {path: np.array(_at(params, path), np.float32) for path in specs}
        return LayerWeights(self.module.block(index, overrides.get(index)), specs, values)

    def shard(self, index: int) -> str:
        """The file of a layer, or after the last one of all other tensors."""
        return f"model-{index + 1:05}-of-{self.layers + 1:05}.safetensors"


def _at(params: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        params = params[key]
    return params


# --------------------------------------------------------------------------------------------------------------
# Layers


def _write_layers(work: _Work, folder: pathlib.Path, progress: Progress | None) -> None:
    first, hidden = _start(work, folder)
    for index in range(first, work.layers):
        layer = work.layer(index)
        write_tensors(folder / work.shard(index), _quantised(work, layer, hidden))
        if hidden is not None and work.calibration is not None:
            passed(work.module, layer.block, layer.values, hidden, work.calibration)
            # behind this line the layer counts as finished
            write_tensors(folder / _HIDDEN.format(index + 1), {"hidden": hidden})
            (folder / _HIDDEN.format(index)).unlink(missing_ok=True)
        if progress is not None:
            progress(index + 1, work.layers, work.shard(index))


def _start(work: _Work, folder: pathlib.Path) -> tuple[int, np.ndarray | None]:
    """The first layer that is not finished, and the hidden states before it."""
    if work.calibration is None:
        return next((i for i in range(work.layers) if not (folder / work.shard(i)).exists()), work.layers), None
    for index in range(work.layers, 0, -1):
        kept = folder / _HIDDEN.format(index)
        if kept.exists():
            return index, np.array(SafetensorsFile(kept).read("hidden"))
    names = work.module.embeddings
    params = jax.tree.map(jnp.asarray, {name: _arrays(work.model.params[name]) for name in names})
    return 0, embedded(work.module, params, work.calibration, work.dtype)


def _arrays(tree: Any) -> Any:
    return {key: _arrays(node) if isinstance(node, Mapping) else np.asarray(node) for key, node in tree.items()}


def _quantised(work: _Work, layer: LayerWeights, hidden: np.ndarray | None) -> dict[str, np.ndarray]:
    """The layer's tensors as they are written; the layer itself is left with the values that they stand for."""
    statistics = Statistics()
    if hidden is not None and work.calibration is not None:
        paths = tuple(path for path, spec in layer.specs.items() if spec.inputs is not None or path[-1] == "router")
        gram = work.recipe.gram
        statistics = observed(work.module, layer.block, layer.values, paths, hidden, work.calibration, gram)
    if work.recipe.folded:
        if not can_fold(layer):
            raise RecipeError(
                f"{work.recipe.method} scales the inputs of layers, which is not known of {type(layer.block).__name__}"
            )
        Folder(layer, statistics, work.recipe, work.recipe.grid(work.dtype)).fold()
    made: dict[str, np.ndarray] = {}
    done = set()
    for linear in linears(layer.specs):
        reason = work.recipe.refusal(*linear.shape)
        if reason:
            work.tell(f"{linear.name} stays as it is: {reason}")
            continue
        made |= _make(work, layer, linear, statistics)
        done.add(linear.name)
    for name, (value, own) in tensors(layer.specs, layer.values).items():
        if name not in done:
            made[name] = value.astype(target_dtype(own or work.dtype))
    return made


def _make(work: _Work, layer: LayerWeights, linear: Linear, statistics: Statistics) -> dict[str, np.ndarray]:
    weight = jnp.asarray(layer.weight(linear))
    made = work.recipe.made(weight, _gram(work, linear, statistics), work.dtype)
    layer.replace(linear, np.asarray(made.dequantise()))
    return tensors_of(linear.module, made, work.stored)


def _gram(work: _Work, linear: Linear, statistics: Statistics) -> jax.Array | None:
    """None where it is not needed, or where too few tokens came by: those of an expert that was hardly chosen."""
    seen = statistics.get(linear.path)
    if seen is None or not work.recipe.gram:
        return None
    if linear.expert is not None:
        seen = InputStatistics(*(part[linear.expert] for part in seen))
    if not enough_tokens(float(seen.rows), linear.shape[1]):
        work.tell(f"{linear.name} is rounded to nearest: of the samples only {float(seen.rows):.0f} tokens came by")
        return None
    return jnp.asarray(seen.gram)


# --------------------------------------------------------------------------------------------------------------
# What lies around the layers


def _write_rest(work: _Work, folder: pathlib.Path) -> None:
    rest: dict[str, np.ndarray] = {}
    for path, spec in walk(work.specs()):
        if path[0].startswith("layers_"):
            continue
        value = np.asarray(_at(work.model.params, path))
        kept = dtype_of(spec, target_dtype(work.dtype))
        own = tensors({path: spec}, {path: value.astype(np.float32)})
        rest |= {name: tensor.astype(kept) for name, (tensor, _) in own.items()}
    write_tensors(folder / work.shard(work.layers), rest)
    (folder / _HIDDEN.format(work.layers)).unlink(missing_ok=True)
    write_companions(work.files.path, folder)
    _write_index(work, folder)
    config = {key: value for key, value in work.files.config_json.items() if key != "torch_dtype"}
    described = {**config, "dtype": work.dtype, "quantization_config": _config(work, folder)}
    (folder / "config.json").write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_index(work: _Work, folder: pathlib.Path) -> None:
    held = {work.shard(index): SafetensorsFile(folder / work.shard(index)).tensors for index in range(work.layers + 1)}
    index = {
        "metadata": {"total_size": sum(info.nbytes for shard in held.values() for info in shard.values())},
        "weight_map": {name: file for file, shard in held.items() for name in shard},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _config(work: _Work, folder: pathlib.Path) -> dict[str, Any]:
    """Of what was written: also layers that an earlier run has finished."""
    names = read_json_object(folder / INDEX_FILE)["weight_map"]
    dense: list[str] = []
    inside: dict[str, None] = {}
    for index in range(work.layers):
        specs = dict(walk(work.specs()[f"layers_{index}"]))
        quantisable = {
            source.name: work.recipe.refusal(*source.shape)
            for path, spec in specs.items()
            for source in spec.sources
            if len(source.shape) == 2 and source.name.endswith(".weight")
        }
        linear = {found.name for found in linears(specs)}
        for name, reason in quantisable.items():
            module = name.removesuffix(".weight")
            if name in linear and not reason:
                inside[_within(module)] = None
            elif name in names:
                dense.append(module)
    return config_of(work.stored, dense, list(inside))


def _within(module: str) -> str:
    found = _WITHIN.match(module)
    return found.group(1) if found else module
