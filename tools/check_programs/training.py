"""The program of a trainer that calls `Model.logprobs`, compiled with a loss and its gradient: its loops add up numbers
in the order of the engine's programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxinfer.engine.execution.compiled import temporary_bytes
from jaxinfer.engine.execution.on_policy import ServedPrograms
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import replicated
from tools.check_programs.hlo import Instruction, Module, read_module
from tools.check_programs.work import Finding, Program

BATCH, TIME = 2, 512
_IGNORED = re.compile(r", metadata=\{[^}]*\}|, (?:frontend_attributes|control-predecessors)=\{[^}]*\}")
_SUMS = {"reduce", "reduce-window", "dot"}
_POOL = re.compile(r"\[\d+,2,")  # [pages, 2, ...]: a trainer has other pages


def compile_training(model: Model, programs: ServedPrograms) -> Any:
    """Compile a step of a trainer for the devices of an engine; within `Target.current` if they are absent.

    Args:
        model: the trainer's, with abstract parameters.
    """

    def loss(params: Any, tokens: Array, begins: Array, ends: Array) -> tuple[Array, Array]:
        found = model.logprobs(params, tokens, like=programs, prompt_lengths=begins, lengths=ends)
        return found.mean(), found

    place = replicated(programs.mesh)
    given = (model.params, jnp.empty((BATCH, TIME), jnp.int32), *(2 * [jnp.empty(BATCH, jnp.int32)]))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), given)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return step.trace(*abstract).lower(lowering_platforms=("cuda",)).compile()


def training_program(executable: Any, engines: Iterable[Module]) -> Program:
    """Return the program with its findings; ``engines``: a decode program and a prefill program of the engine."""
    memory, module = executable.memory_analysis(), read_module(executable.as_text())
    return Program(
        arguments=memory.argument_size_in_bytes,
        temporaries=temporary_bytes(executable),
        sums=0,
        gathers=0,
        kernels=0,
        findings=tuple(findings(module, list(engines))),
    )


def findings(module: Module, engines: list[Module]) -> Iterator[Finding]:
    """Yield what must hold of the loops of a training step."""
    served = {what for engine in engines for what, _ in sums(engine)}
    others = [one.name for what, one in sums(module, inside=True) if what not in served]
    yield Finding("sums of loops beside the engine's", ", ".join(others) or "none", "none", not others)
    found = sum(one.is_gemm for _, one in sums(module, inside=True))
    wanted = sum(one.is_gemm for engine in engines for _, one in sums(engine))
    yield Finding("GEMMs in loops", str(found), str(wanted), found == wanted)


def sums(module: Module, *, inside: bool = False) -> Iterator[tuple[str, Instruction]]:
    """Yield the kernels that add up floating-point numbers, each with a description without names: equal descriptions
    are equal computations of equal shapes.

    Args:
        inside: only those in loops and branches.
    """
    skipped = {one.name for one in module.computations[module.entry]} if inside else set[str]()
    for one in module.in_memory():
        if one.name not in skipped and (what := _described(module, one)):
            yield what, one


def _described(module: Module, one: Instruction) -> str:
    called = one.called("calls") if one.opcode == "fusion" else []
    body = module.computations[called[0]] if called else (one,)
    if "mosaic_gpu" in one.line and one.opcode == "custom-call":
        kernel = re.search(r'op_name="[^"]*?(\w+)/\w+"', one.line)
        shapes = re.search(r"= (.*?) custom-call.*operand_layout_constraints=(\{.*?\}\})", one.line)
        assert kernel is not None
        assert shapes is not None
        return _POOL.sub("[pages,2,", f"{kernel[1]} {shapes[1]} {shapes[2]}")
    if not any(each.opcode in _SUMS and re.match(r"\(?(?:f|bf)\d", _type(each)) for each in body):
        return ""
    return _unnamed("\n".join([one.line.partition("backend_config=")[2] if called else "", *(e.line for e in body)]))


def _type(one: Instruction) -> str:
    return one.line.partition(" = ")[2]


def _unnamed(text: str) -> str:
    numbers: dict[str, int] = {}
    text = _IGNORED.sub("", text)
    return re.sub(r"%[\w.-]+", lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", text)
