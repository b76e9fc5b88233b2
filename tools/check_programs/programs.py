"""Compilation of a pipeline stage's programs for GPUs; run by `tools.check_programs` in a process of its own.

The programs, their options, shapes and donations are the engine's: `engine.execution.compiled` compiles them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ResolvedEngine
from jaxinfer.draft_heads import abstract_head
from jaxinfer.engine.execution.compiled import ADAPTED, compile_largest, compile_moving, temporary_bytes
from jaxinfer.engine.execution.encoder import abstract_layout
from jaxinfer.engine.execution.memory import stage_needs
from jaxinfer.engine.execution.on_policy import served_programs
from jaxinfer.engine.execution.placement import StageArrays, abstract_arrays, mesh_of
from jaxinfer.engine.execution.prepare import Prepared, prepare
from jaxinfer.engine.execution.stages import Stage, cut, draft_stages
from jaxinfer.images.processor import PROCESSOR_FILES
from jaxinfer.loading import abstract_model
from jaxinfer.models.head import HeadFiles
from jaxinfer.models.model import Model, with_vision
from jaxinfer.models.vision.registry import vision_family_for
from jaxinfer.models.vision.tower import Vision
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.parallel.mesh import mesh_for, stages
from jaxinfer.planner.memory import Needs
from jaxinfer.types import VISION, walk_specs
from pallas_kernels.check.target import DEVICES, Target
from tools.check_programs.expected import Expected, expected, expected_tower
from tools.check_programs.hlo import read_launches, read_module, read_waits
from tools.check_programs.moves import of_moves
from tools.check_programs.offload import program_with_copies
from tools.check_programs.rules import Step, collectives, findings, kernels_per_layer, of_stage
from tools.check_programs.stored import dequantized, stored
from tools.check_programs.training import compile_training, training_program
from tools.check_programs.work import Part, Program, Work

PAGE = 64
ENCODE = "encode_"  # prefix of the names of encoder programs
# Keys that each query of a vision tower is scored with, on average of those at once: all keys of a small image, in
# larger ones for some queries at a time, or those of a few windows.
SCORED = 384
SMALL = 1024
CHUNK = 512  # the only size of a prompt chunk beside a training step: a trainer compiles all of them
ENGINE = EngineConfig(max_num_seqs=64, page_size=PAGE, max_model_len=4096, max_logprobs=20)


def target_of(work: Work) -> Target:
    return DEVICES[work.target]


def settings_of(work: Work) -> EngineConfig:
    return dataclasses.replace(
        ENGINE,
        num_pages=work.pages,
        attention_backend=work.attention,
        gemm_backend=work.gemm,
        kv_cache_dtype=work.kv_cache_dtype,
        tensor_parallel_size=work.tensor,
        expert_parallel_size=work.expert,
        pipeline_parallel_size=work.stages,
        sequence_parallel_norms=work.norms,
        weight_offload_gib=work.offload,
        multi_step=work.steps,
        enable_lora=work.adapters > 0,
        max_loras=max(1, work.adapters),
        speculative=work.head or ("draft_model" if work.draft_layers else "ngram" if work.drafts else None),
        prefill_sizes=(CHUNK,) if work.training else None,
        max_prefill_rows=1 if work.training else None,
    )


def model_of(work: Work) -> Model:
    """Return the model with abstract parameters."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(work.config()), encoding="utf-8")
        model = abstract_model(folder, "bfloat16")
    model = stored(model, work.weights) if work.weights else model
    model = with_vision(model, vision_of(work), "bfloat16")
    if work.head:
        return model.replace(draft=head_of(model, work.head))
    if not work.draft_layers:
        return model
    return model.replace(draft=model_of(dataclasses.replace(work, layers=work.draft_layers, draft_layers=0)))


def vision_of(work: Work) -> Vision | None:
    """Return the whole vision tower, whatever the number of layers; None: the model has none, or no image processor."""
    config_json, settings = work.published(), work.processor()
    family = vision_family_for(config_json)
    if family is None or settings is None:
        return None
    config = family.config(config_json)
    return Vision(family.module(config), config, family, family.processor(config_json, {PROCESSOR_FILES[0]: settings}))


def head_of(model: Model, method: str) -> Model:
    """Return a draft head of the published shape: one layer of the model's width, EAGLE-3 with 1/4 of its tokens."""
    config = model.config
    fields = {
        **{name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "num_hidden_layers": 1,
        "draft_vocab_size": config.vocab_size // 4,
        "num_nextn_predict_layers": 1,
        "eagle_aux_hidden_state_layer_ids": [-1, 0, len(config.layers) - 2],
    }
    names = {f"{index}.0.linear.weight" for index in range(4)}
    return abstract_head(method, HeadFiles(fields, names, config, model.cache_spec.windows), "head", str(model.dtype))


@dataclasses.dataclass(frozen=True)
class Planned:
    """A pipeline stage before compilation: its arrays, the planner's memory needs, the expected programs, and the whole
    model."""

    stage: Stage
    engine: ResolvedEngine
    arrays: StageArrays
    needs: Needs
    should: Expected
    prepared: Prepared
    number: int

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.arrays.params)

    @property
    def pool(self) -> int:
        return self.needs.page * self.engine.num_pages

    @property
    def decodes_by_kernel(self) -> bool:
        """Whether decode uses the Mosaic GEMM kernel for all products, with a fused activation, between RMS norms; and
        rows have neither drafts nor adapters."""
        model = self.stage.model
        names = {"/".join(path) for path, _ in walk_specs(model.specs)}
        gated = any("gate_up" in name for name in names) and getattr(model.config, "activation", "silu") == "silu"
        of_one_sum = not any(name.endswith("norm/bias") for name in names)
        by_itself = self.engine.speculative is None and not self.engine.lora_slots
        return gated and of_one_sum and by_itself and self.should.lines and self.engine.gemm_backend == "mosaic"

    @property
    def kept(self) -> int:
        """Bytes of the pool and of sequences' states."""
        return self.pool + self.needs.states

    @property
    def microbatch(self) -> int:
        """Bytes that the sampler keeps for the slots of a microbatch."""
        return self.needs.sampler // self.engine.microbatches

    def tokens(self, program: str) -> int:
        """Return the number of tokens that one call computes."""
        if program.startswith(("decode", "draft")):
            return _rows(program) or self.engine.decode_sizes[-1]
        chunk = self.engine.prefill_sizes[-1]
        wide = [] if program == "prefill_logprobs" else map(math.prod, self.engine.wide_prefills)
        return max([chunk, *wide])

    def donated(self, program: str) -> int:
        """Return the donated bytes by the planner's arithmetic, including the last sampled tokens of the slots."""
        if program.startswith("decode") and self.stage.last:
            return self.kept + self.microbatch + device_bytes(self.arrays.last_tokens)
        return self.kept


def plan(work: Work, number: int, devices: Sequence[Any] | None = None, *, drafts: bool = False) -> Planned:
    """Plan a pipeline stage, or the draft model; ``devices``: default GPUs that are absent."""
    given, settings = model_of(work), settings_of(work)
    longest = min(settings.max_model_len or given.config.max_position, given.config.max_position)
    settings = dataclasses.replace(settings, max_model_len=longest)
    mesh = mesh_for(settings, target_of(work).devices(work.devices) if devices is None else devices)
    with target_of(work).current() if devices is None else contextlib.nullcontext():
        model, engine, limits = prepared = prepare(given, settings, "gpu", mesh)
    place = stages(mesh)[number]
    if devices is None:
        target_of(work).tell(place)
    whole = model if work.head else model.replace(draft=None)
    stage = (draft_stages(model) if drafts else cut(whole, work.stages))[number]
    stage = dataclasses.replace(stage, model=stage.model.replace(draft=None))
    arrays = abstract_arrays(stage, engine, limits, place)
    needs, should = stage_needs(stage, engine, arrays), expected(stage, _sizes(place), work.norms)
    return Planned(stage, engine, arrays, needs, should, prepared, number)


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {str(axis): int(size) for axis, size in mesh.shape.items()}


def check(work: Work, number: int, dumps: pathlib.Path) -> Part:
    """Compile a stage and return the findings. ``dumps``: the folder of XLA's dumps."""
    planned, start = plan(work, number), time.perf_counter()
    with target_of(work).current():
        sizes = not work.training and not work.offload
        compiled = compile_largest(planned.stage, planned.arrays, planned.engine, several=sizes, every_size=sizes)
        moving = compile_moving(planned.stage, planned.arrays, planned.engine)
        training = _training(work, planned, compiled) if work.training else {}
    seconds = time.perf_counter() - start
    if work.offload:
        return _offloading(work, planned, compiled, seconds)
    encoders = [one for one in compiled if _name(one.as_text()).startswith(ENCODE)]
    texts = [one for one in compiled if one not in encoders]
    steps = [*_steps(planned, texts, dumps, work.weights), *_draft_steps(work, dumps)]
    steps += _encoder_steps(planned, encoders, dumps)
    needs = dataclasses.replace(planned.needs, temporaries=max(step.temporaries for step in steps))
    # A decode step's arguments are all arrays of the stage, except the sampler state of the other microbatches, and
    # what belongs to images.
    decode = max(
        (step for step in steps if step.name in ("decode", f"decode{ADAPTED}")), key=lambda step: step.arguments
    )
    resting = sum(device_bytes(array) for array in (planned.arrays.tower, planned.arrays.images))
    peak = decode.arguments + resting + max(step.temporaries for step in steps) + needs.sampler - planned.microbatch
    total = needs.fixed + planned.pool
    return Part(
        number=number,
        weights=needs.weights,
        pool=planned.pool,
        planned=total,
        compiled=peak,
        seconds=seconds,
        programs={step.name: _program(step) for step in steps} | training,
        findings=(
            *of_stage(
                planned=total,
                compiled=peak,
                weights=needs.weights,
                declared=planned.should.weights,
                target=work.target,
            ),
            *of_moves(moving, page=needs.page, donated=planned.kept),
        ),
    )


def _offloading(work: Work, planned: Planned, compiled: Sequence[Any], seconds: float) -> Part:
    """Check the copies of weights in host memory, against the same programs with all weights on the device."""
    whole = plan(dataclasses.replace(work, offload=0.0), planned.number)
    with target_of(work).current():
        others = compile_largest(whole.stage, whole.arrays, whole.engine)
    plain = {_name(one.as_text()): temporary_bytes(one) for one in others}
    programs = {
        name: program_with_copies(one, planned.needs.host, plain[name])
        for one in compiled
        if (name := _name(one.as_text()))
    }
    total = planned.needs.fixed + planned.pool
    return Part(planned.number, planned.needs.weights, planned.pool, total, total, seconds, programs, ())


def _training(work: Work, planned: Planned, compiled: Sequence[Any]) -> dict[str, Program]:
    """Compile a trainer's step, and compare it with the programs of the engine that it repeats."""
    texts = [one.as_text() for one in compiled]
    repeated = [read_module(text) for text in texts if _name(text) in ("decode", "prefill")]
    served = served_programs(planned.prepared, {CHUNK: 0}, planned.mesh)
    return {"training": training_program(compile_training(model_of(work), served), repeated)}


def _draft_steps(work: Work, dumps: pathlib.Path) -> Iterator[Step]:
    if work.draft_layers or work.head:
        planned = plan(work, 0, drafts=True)
        with target_of(work).current():
            compiled = compile_largest(planned.stage, planned.arrays, planned.engine)
        yield from _steps(planned, compiled[:1], dumps, work.weights)


def _program(step: Step) -> Program:
    sums, gathers = collectives(step, "all-reduce"), collectives(step, "all-gather")
    found = tuple(findings(step))
    return Program(step.arguments, step.temporaries, sums, gathers, kernels_per_layer(step), found)


def _steps(planned: Planned, compiled: Sequence[Any], dumps: pathlib.Path, weights: str) -> Iterator[Step]:
    """Yield each program with its properties."""
    stage, needs, should = planned.stage, planned.needs, planned.should
    rounded = weights.endswith("-activations")
    pages, sizes = planned.engine.num_pages, _sizes(planned.mesh)
    pool = stage.model.cache_spec.pool_shape(pages, PAGE, math.prod(sizes.values()))
    tower, cache = device_bytes(planned.arrays.tower), device_bytes(planned.arrays.images)
    for executable in compiled:
        text, memory = executable.as_text(), executable.memory_analysis()
        name = _name(text)
        dump, metadata = _dumps(dumps, name)
        program, sampler = name.removesuffix(ADAPTED), planned.microbatch * name.startswith(("decode", "draft"))
        kind, adapters = program.removesuffix(f"_{_rows(program)}"), needs.adapters * (program != name)
        layers, tail = should.gemms(kind)
        hidden = 0 if stage.first else planned.tokens(program) * should.width * stage.model.dtype.itemsize
        yield Step(
            name=name,
            module=read_module(text),
            launches=read_launches(dump, metadata),
            waits=tuple(read_waits(dump)),
            repeats=kind == "decode_many" or (kind == "draft" and bool(should.layers)),
            pool=math.prod(pool),
            tokens=planned.tokens(program),
            widest=should.widest,
            logits=should.logits(kind),
            layers=layers,
            tail=tail,
            sums=_sums(should.sums(kind), rounded=rounded),
            gathers=should.gathers(kind),
            scatters=should.scatters(kind),
            gathered=should.width if should.scattered(kind) else 0,
            donated=planned.donated(program),
            aliased=memory.alias_size_in_bytes,
            temporaries=temporary_bytes(executable),
            arguments=memory.argument_size_in_bytes,
            planned=needs.weights
            - tower
            + planned.kept
            + sampler
            + adapters
            + hidden
            + cache * name.startswith("prefill"),
            whole=layers == should.layers and tail == should.head,
            experts=should.experts,
            states=any(layer.states for layer in stage.model.cache_spec.layers),
            both=any(layer.states and layer.attends for layer in stage.model.cache_spec.layers),
            convolutions=should.convolutions,
            streams=should.streams,
            head_norms=should.head_norms,
            out_norms=should.out_norms,
            devices=should.devices,
            adapters=planned.engine.lora_slots if program != name else 0,
            dequantized=dequantized(weights),
            rounded=rounded,
            by_kernel=kind == "decode"
            and program == name
            and planned.decodes_by_kernel
            and _by_gemm(weights, should.devices),
        )


def _encoder_steps(planned: Planned, compiled: Sequence[Any], dumps: pathlib.Path) -> Iterator[Step]:
    """Yield each encoder program with its properties; of several devices each computes alone."""
    model = planned.stage.model
    for executable in compiled:
        assert model.vision is not None
        config, should = model.vision.config, expected_tower(model.specs[VISION], model.dtype.itemsize)
        text, memory = executable.as_text(), executable.memory_analysis()
        dump, metadata = _dumps(dumps, name := _name(text))
        rows, cache = int(name.removeprefix(ENCODE)), device_bytes(planned.arrays.images)
        layout = sum(array.nbytes for array in abstract_layout(model.vision, rows).values())
        inputs = rows * config.values + layout + rows // config.merged * np.dtype(np.int32).itemsize
        yield Step(
            name=name,
            module=read_module(text),
            launches=read_launches(dump, metadata),
            waits=tuple(read_waits(dump)),
            pool=math.prod(planned.arrays.images.shape),
            tokens=rows,
            widest=should.widest,
            scores=config.heads * rows * (rows if rows <= SMALL else SCORED),
            logits=0,
            layers=should.layers,
            tail=should.tail,
            donated=cache,
            aliased=memory.alias_size_in_bytes,
            temporaries=temporary_bytes(executable),
            arguments=memory.argument_size_in_bytes,
            planned=should.weights + cache + inputs,
        )


def _dumps(dumps: pathlib.Path, name: str) -> tuple[str, str]:
    """Return XLA's dumps of a program: its launches, and the names of custom calls."""
    launches, metadata = (
        next(dumps.glob(f"*.jit_{name}.{what}.txt")).read_text(encoding="utf-8")
        for what in ("thunk_sequence_after_thunk_passes", "thunk_metadata")
    )
    return launches, metadata


def _by_gemm(weights: str, devices: int) -> bool:
    """Return whether only kernels quantise and multiply: on several devices, a token's maximum is an all-reduce."""
    return not weights or (weights.endswith("-activations") and devices == 1)


def _sums(sums: int, *, rounded: bool) -> int:
    """Count all-reduces: with quantised inputs, each but the embedding's needs one for the tokens' maxima."""
    return 2 * sums - 1 if rounded and sums else sums


def _rows(program: str) -> int | None:
    """Return the rows of a smaller decode program, by its name; None for any other program."""
    found = re.fullmatch(r"decode(?:_many)?_(\d+)", program)
    return int(found[1]) if found else None


def _name(text: str) -> str:
    found = re.match(r"HloModule jit_(\w+)", text)
    assert found is not None
    return found[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the fields of a Work, as JSON")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--dumps", type=pathlib.Path, required=True)
    parser.add_argument("--result", type=pathlib.Path, required=True)
    arguments = parser.parse_args(argv)
    part = check(Work(**json.loads(arguments.work)), arguments.stage, arguments.dumps)
    arguments.result.write_text(json.dumps(dataclasses.asdict(part)), encoding="utf-8")


if __name__ == "__main__":
    main()
