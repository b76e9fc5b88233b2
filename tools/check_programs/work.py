"""Compilation work, and its outcome: passed between the process that compiles and the one that reports."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxinfer.formats.multimodal import text_model
from pallas_kernels.check.plugins import ROOT

MODELS = ROOT / "configs" / "models"
PROCESSORS = MODELS / "processors"
GPUS = ("h100", "h200", "a100", "l40s")
PATHS = ("auto", "mosaic", "xla")
_DEPTHS = ("num_hidden_layers", "n_layer")  # names of the layer count in config.json; the second in GPT-2 and GPT-J
_LAYERS_BY_INDEX = ("fullatt_block_indexes", "deepstack_visual_indexes")
_SHARED = "num_kv_shared_layers"


@dataclasses.dataclass(frozen=True)
class Work:
    """A deployment to compile: a model on some GPUs, in bfloat16.

    Attributes:
        model: the name of a file in configs/models, or a folder with a config.json.
        pages: pages of the pool, of 64 tokens each.
        tensor, expert, stages: the parallel sizes.
        layers: number of layers to keep; None: all.
        attention: the attention backend.
        gemm: the backend of products with unquantised weights.
        kv_cache_dtype: dtype of the pool, see `EngineConfig`.
        weights: storage of the layers' weights, one of `stored.WEIGHTS`; empty: unquantised.
        norms: whether prefill programs shard hidden states over tokens, see `EngineConfig.sequence_parallel_norms`.
        steps: most decode steps of one program, see `EngineConfig.multi_step`.
        drafts: whether decode rows may be draft tokens to verify.
        draft_layers: layers of a draft model of the same width; 0: no draft model.
        head: the method of a draft head as wide as the model (`jaxinfer.config.HEADS`); empty: no head.
        adapters: adapters on the device at once, of rank 16; 0: none. With adapters, each program is compiled twice.
        offload: GiB of each device's weights in host memory, see `EngineConfig.weight_offload_gib`; only the rules of
            their copies are checked then.
        training: whether a trainer's step with `Model.logprobs` is compiled, too, beside the largest programs alone.
        target: the GPUs, one of `GPUS`.
    """

    model: str
    pages: int
    tensor: int = 1
    expert: int = 1
    stages: int = 1
    layers: int | None = None
    attention: str = "auto"
    gemm: str = "auto"
    kv_cache_dtype: str = "auto"
    weights: str = ""
    norms: bool = False
    steps: int = 1
    drafts: bool = False
    draft_layers: int = 0
    head: str = ""
    adapters: int = 0
    offload: float = 0.0
    training: bool = False
    target: str = GPUS[0]

    @property
    def devices(self) -> int:
        return self.tensor * self.expert * self.stages

    def __str__(self) -> str:
        sizes = {"EP": self.expert, "TP": self.tensor, "PP": self.stages}
        spread = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        stored = "" if self.kv_cache_dtype == "auto" else f"KV in {self.kv_cache_dtype}"
        weights = f"weights in {self.weights}" if self.weights else ""
        options = {"sequence-parallel norms": self.norms, f"{self.steps} steps": self.steps > 1, "drafts": self.drafts}
        options |= {"a training step": self.training, f"{self.offload:g} GiB in host memory": self.offload > 0}
        options |= {f"a draft model of {self.draft_layers} layers": self.draft_layers > 0}
        options |= {f"GEMMs by {self.gemm}": self.gemm != "auto"}
        options |= {self.target.upper(): self.target != GPUS[0]}
        options |= {f"heads of {self.head}": bool(self.head), f"{self.adapters} adapters": self.adapters > 0}
        chosen = [name for name, on in options.items() if on]
        parts = [self.model, spread, f"{self.layers} layers" if self.layers else "", stored, weights, *chosen]
        return ", ".join(filter(None, parts))

    def config(self) -> dict[str, Any]:
        """Return the config.json of the text model, with the requested layers."""
        found = text_model(self.published())
        return dict(found) if self.layers is None else shortened(found, self.layers)

    def published(self) -> dict[str, Any]:
        """Return the whole config.json, whose text model has all layers, and whose tower has the requested ones."""
        found: dict[str, Any] = _read(self._file("config.json", MODELS))
        tower = found.get("vision_config", {})
        if self.layers is None or self.layers >= tower.get("depth", 0):
            return found
        return {**found, "vision_config": last_layers(tower, self.layers)}

    def processor(self) -> dict[str, Any] | None:
        """Return the preprocessor_config.json; None: there is none, and no vision tower is compiled."""
        path = self._file("preprocessor_config.json", PROCESSORS)
        return _read(path) if path.exists() else None

    def _file(self, name: str, published: pathlib.Path) -> pathlib.Path:
        folder = pathlib.Path(self.model)
        return folder / name if folder.is_dir() else published / f"{self.model}.json"


def _read(path: pathlib.Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a config.json with the first ``layers`` only; its last layers share KV caches if the model's last do, at
    most half of them."""
    depth = next(name for name in _DEPTHS if name in config)
    count = config[depth]
    each = {name: value for name, value in config.items() if isinstance(value, list | str) and len(value) == count}
    found = {**config, **{name: value[:layers] for name, value in each.items()}, depth: layers}
    if config.get(_SHARED):
        found[_SHARED] = min(config[_SHARED], layers // 2)
    return found


def last_layers(tower: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a vision_config with the last ``layers`` only: kinds of layers that are named by index are among these."""
    first = tower["depth"] - layers
    named = {name: tower[name] for name in _LAYERS_BY_INDEX if name in tower}
    kept = {name: [index - first for index in indices if index >= first] for name, indices in named.items()}
    return {**tower, **kept, "depth": layers}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule and its finding. ``asked``: false where attention takes XLA's path, and the rule is about kernels."""

    rule: str
    found: str
    limit: str
    holds: bool
    asked: bool = True

    @property
    def broken(self) -> bool:
        return self.asked and not self.holds


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: bytes of a device, collectives, launches per layer."""

    arguments: int
    temporaries: int
    sums: int
    gathers: int
    kernels: float
    findings: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A pipeline stage: bytes of a device by the planner's arithmetic and by XLA, its programs by name.

    Attributes:
        planned: bytes of weights, pool, sampler and the largest temporaries of a program.
        compiled: bytes of a decode step's arguments, the same temporaries, and the samplers of the other microbatches.
        seconds: time of tracing and compiling.
        findings: findings on the whole stage.
    """

    number: int
    weights: int
    pool: int
    planned: int
    compiled: int
    seconds: float
    programs: Mapping[str, Program]
    findings: tuple[Finding, ...]

    @property
    def temporaries(self) -> int:
        return max(program.temporaries for program in self.programs.values())

    @property
    def broken(self) -> list[Finding]:
        every = [*self.findings, *(one for program in self.programs.values() for one in program.findings)]
        return [one for one in every if one.broken]

    @staticmethod
    def read(plain: dict[str, Any]) -> Part:
        """Read a part from the JSON of `dataclasses.asdict`."""
        programs = {name: Program(**{**one, **_findings(one)}) for name, one in plain["programs"].items()}
        return Part(**{**plain, **_findings(plain), "programs": programs})


def _findings(plain: dict[str, Any]) -> dict[str, tuple[Finding, ...]]:
    return {"findings": tuple(Finding(**one) for one in plain["findings"])}
