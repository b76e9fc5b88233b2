"""Compile the engine's programs at a model's shape for an H100; run by `tools.check_programs` in a process of its own.

The programs, their options, shapes and donations are the engine's: `engine.compiled` compiles them, as at any start.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.engine.compiled import compile_largest, temporary_bytes
from jaxinfer.engine.engine import resolve_for
from jaxinfer.engine.placement import abstract_arrays, device_bytes, spread_model
from jaxinfer.engine.stages import Stage
from jaxinfer.loading import abstract_model
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.sampling import SamplingLimits
from pallas_kernels.check.configuration import HOPPER
from pallas_kernels.check.target import TARGETS
from tools.check_programs.hlo import read_launches, read_module
from tools.check_programs.rules import Finding, Step, findings
from tools.gpu_check.llama import LLAMA_8B

LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MODELS = {"llama-3.1-8b": LLAMA_8B, "llama-3.1-70b": LLAMA_70B}
PATHS = ("auto", "mosaic", "xla")
LIMITS = SamplingLimits(max_logprobs=20)
ENGINE = EngineConfig(
    max_num_seqs=64, page_size=64, max_model_len=4096, prefill_sizes=(32, 128, 256), max_prefill_rows=2048
)
PAGES = 4096
# Bytes of temporaries: a few arrays of logits (float32, of the whole vocabulary) or of the widest activation. A copy of
# one layer's pool or of the head would not fit.
_MIB = 2**20
CEILINGS = {"decode": 160 * _MIB, "prefill": 256 * _MIB, "prefill_logprobs": 448 * _MIB}


def config_folder(model: str, layers: int | None, folder: pathlib.Path) -> pathlib.Path:
    """A folder with the config.json of a known model, or of a checkpoint's folder, with so many layers."""
    source = pathlib.Path(model, "config.json")
    config = dict(MODELS[model]) if model in MODELS else json.loads(source.read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def compile_steps(model: Model, settings: EngineConfig) -> Iterator[tuple[str, Any, int, int, int]]:
    """Name, executable, tokens, donated bytes and planned bytes of the widest programs. Nothing is allocated."""
    target = TARGETS[HOPPER]
    mesh = mesh_for(settings, target.devices(settings.devices))
    model = spread_model(model, mesh)
    engine, stage = resolve_for(model, settings, "gpu"), Stage(model)
    arrays = abstract_arrays(stage, engine, LIMITS, mesh)
    with target.current():
        compiled = compile_largest(stage, arrays, engine)
    size, lanes = max(engine.wide_prefills, default=(engine.prefill_sizes[-1], 1), key=math.prod)
    tokens = {"decode": engine.rows, "prefill": size * lanes, "prefill_logprobs": engine.prefill_sizes[-1]}
    for executable in compiled:
        name = _name(executable.as_text())
        donated = (arrays.pools, arrays.last_tokens, arrays.sampler) if name == "decode" else arrays.pools
        read = arrays if name == "decode" else arrays[:2]
        yield name, executable, tokens[name], device_bytes(donated), device_bytes(read)


def _name(text: str) -> str:
    found = re.match(r"HloModule jit_(\w+)", text)
    assert found is not None
    return found[1]


def check(model: Model, settings: EngineConfig, dumps: pathlib.Path) -> dict[str, list[Finding]]:
    """The findings of each program. ``dumps``: the folder that XLA was told to dump to."""
    found = {}
    for name, executable, tokens, donated, planned in compile_steps(model, settings):
        dump = next(dumps.glob(f"*.jit_{name}.thunk_sequence_after_thunk_passes.txt")).read_text(encoding="utf-8")
        layers, needs_head, devices = len(model.config.layers), name != "prefill", settings.tensor_parallel_size
        step = Step(
            name=name,
            module=read_module(executable.as_text()),
            launches=read_launches(dump),
            weights=len(jax.tree.leaves(model.params)),
            pool=math.prod(model.cache_spec.pool_shape(settings.num_pages or 0, settings.page_size, devices)),
            tokens=tokens,
            widest=max(2 * model.config.intermediate_size, model.config.vocab_size if needs_head else 0),
            # A prompt's chunk is computed for its keys and values: what follows the last layer's is not needed.
            layers=layers if needs_head else layers - 1,
            head=1,
            donated=donated,
            aliased=executable.memory_analysis().alias_size_in_bytes,
            temporaries=temporary_bytes(executable),
            ceiling=CEILINGS[name],
            arguments=executable.memory_analysis().argument_size_in_bytes,
            planned=planned,
            devices=devices,
        )
        found[name] = list(findings(step))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--pages", type=int, required=True)
    parser.add_argument("--tensor", type=int, required=True)
    parser.add_argument("--attention", choices=PATHS, required=True)
    parser.add_argument("--dumps", type=pathlib.Path, required=True)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    arguments = parser.parse_args(argv)
    settings = dataclasses.replace(ENGINE, num_pages=arguments.pages, attention_backend=arguments.attention)
    settings = dataclasses.replace(settings, tensor_parallel_size=arguments.tensor)
    with tempfile.TemporaryDirectory() as folder:
        named = config_folder(arguments.model, arguments.layers, pathlib.Path(folder))
        found = check(abstract_model(str(named), "bfloat16"), settings, arguments.dumps)
    plain = {name: [dataclasses.asdict(one) for one in some] for name, some in found.items()}
    arguments.results.write_text(json.dumps(plain), encoding="utf-8")


if __name__ == "__main__":
    main()
