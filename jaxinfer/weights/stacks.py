"""Experts as a checkpoint has them: one by one, or all in one tensor, whatever a family's parameters name.

- one by one: ``X.experts.0.gate_proj.weight`` [hidden, d], ``up_proj``, ``down_proj`` [d, hidden]; or w1, w3 and w2;
- of the hub: ``X.experts.gate_up_proj`` [experts, d, 2 hidden], gates first, and ``X.experts.down_proj`` [experts,
  hidden, d]; of transformers in memory the same with [out, in]. Their shapes tell which: one of them is not square;
- of MLX: ``X.switch_mlp.gate_proj.weight`` [experts, hidden, d], ``up_proj``, ``down_proj``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from jaxinfer.types import ParamSpec, ParamTree, Source, map_specs

Shapes = Mapping[str, tuple[int, ...]]

_ONE = re.compile(r"(?P<at>.*)\.experts\.\d+\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = re.compile(r"(?P<at>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_KINDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EVERY = slice(None)


def with_experts(specs: ParamTree, shapes: Shapes) -> ParamTree:
    """The parameters with the tensors of their experts as the checkpoint has them; where it has others, as they are.

    Args:
        shapes: of all tensors by name, those of stored weights as ``[*stack, out, in]``.
    """
    experts = _Experts(shapes)
    changed: ParamTree = map_specs(lambda path, spec: experts.of(spec), specs)
    return changed


@dataclasses.dataclass(frozen=True)
class _Experts:
    shapes: Shapes

    def of(self, spec: ParamSpec) -> ParamSpec:
        if spec.inputs is None or not spec.sources or spec.sources[0].name in self.shapes:
            return spec
        sources = self._stacked(spec) or self._apart(spec)
        return dataclasses.replace(spec, sources=sources) if sources else spec

    def _stacked(self, spec: ParamSpec) -> tuple[Source, ...]:
        """The tensors of all experts in place of those of each; () where there are none."""
        found: dict[str, list[Source]] = {}
        for source in spec.sources:
            match = _ONE.fullmatch(source.name)
            if match is None:
                return ()
            kind = _KINDS.get(match["kind"], match["kind"])
            if kind not in found:
                found[kind] = self._stack(match["at"], kind, source, spec)
        return tuple(source for stack in found.values() for source in stack) if all(found.values()) else ()

    def _stack(self, at: str, kind: str, one: Source, spec: ParamSpec) -> list[Source]:
        """The sources of all experts' weights of a kind, of the first expert's."""
        whole, where = (spec.shape[0], *one.shape), (_EVERY, *one.where[1:])
        if (own := f"{at}.switch_mlp.{kind}.weight") in self.shapes:
            return [Source(own, whole, reshape=whole, where=where)]
        down, both = f"{at}.experts.down_proj", f"{at}.experts.gate_up_proj"
        if not {down, both} <= self.shapes.keys():
            return []
        hidden, d = one.shape[::-1] if kind == "down_proj" else one.shape
        turned = self._is_turned(both, down, d, hidden)
        if kind == "down_proj":
            return _of_all(down, whole, _EVERY, where, turned)
        half = slice(0, hidden) if kind == "gate_proj" else slice(hidden, 2 * hidden)
        return _of_all(both, (spec.shape[0], 2 * hidden, d), half, where, turned)

    def _is_turned(self, both: str, down: str, d: int, hidden: int) -> bool:
        """Whether experts lie as [in, out]; where they fit neither way, as the hub has them, whose shapes are asked."""
        for name, upright in ((both, (2 * hidden, d)), (down, (d, hidden))):
            if upright[0] != upright[1]:
                return self.shapes[name][1:] != upright
        raise AssertionError("both are square")

    def _apart(self, spec: ParamSpec) -> tuple[Source, ...]:
        """The tensors of each expert in place of those of all; () where there are none."""
        return tuple(made for source in spec.sources for made in self._one(source))

    def _one(self, source: Source) -> list[Source]:
        match = _FUSED.fullmatch(source.name)
        if match is None or f"{match['at']}.0.down_proj.weight" not in self.shapes or not source.transpose:
            return []
        (expert, *rest), (_, inputs, out) = source.part, source.shape
        if match["kind"] == "down_proj":
            return [Source(f"{match['at']}.{expert}.down_proj.weight", (out, inputs), where=source.where)]
        match rest[-1]:
            case slice(start=start, stop=stop, step=None) if stop - start == out // 2:
                kind = "up_proj" if start else "gate_proj"
                return [Source(f"{match['at']}.{expert}.{kind}.weight", (out // 2, inputs), where=source.where)]
        return []


def _of_all(
    name: str, whole: tuple[int, ...], taken: slice, where: tuple[slice | int, ...], turned: bool
) -> list[Source]:
    """All experts at once, or, of a tensor that lies as [in, out], one by one.

    Args:
        whole: shape of the tensor as ``[experts, out, in]``.
        taken: its outputs that are meant.
    """
    experts, out, inputs = whole
    if not turned:
        form = (experts, len(range(out)[taken]), inputs)
        return [Source(name, whole, reshape=form, where=where, part=(_EVERY, taken))]
    return [
        Source(name, (experts, inputs, out), True, where=(expert, *where[1:]), part=(expert, _EVERY, taken))
        for expert in range(experts)
    ]
