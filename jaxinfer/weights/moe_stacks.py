"""Expert weights in checkpoints: per expert or stacked in one tensor, independent of the layout in the family's specs.

- per expert: ``X.experts.0.gate_proj.weight`` [hidden, d], ``up_proj``, ``down_proj`` [d, hidden]; or w1, w3 and w2;
- on the hub: ``X.experts.gate_up_proj`` [experts, d, 2 hidden], gates first, and ``X.experts.down_proj`` [experts,
  hidden, d]; in transformers' memory [out, in]. The shapes show which: one of the two is not square;
- MLX: ``X.switch_mlp.gate_proj.weight`` [experts, hidden, d], ``up_proj``, ``down_proj``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jaxinfer.types import ParamSpec, ParamTree, Source, map_specs, walk_specs

Shapes = Mapping[str, tuple[int, ...]]

_ONE = re.compile(r"(?P<at>.*)\.experts\.\d+\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = re.compile(r"(?P<at>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_KINDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EVERY = slice(None)


def with_experts(specs: ParamTree, shapes: Shapes) -> ParamTree:
    """Return the specs with expert sources in the checkpoint's layout; unchanged if the checkpoint has neither layout.

    Args:
        shapes: shapes of all tensors by name; of stored weights as ``[*stack, out, in]``.
    """
    experts = _Experts(shapes)
    changed: ParamTree = map_specs(lambda path, spec: experts.of(spec), specs)
    return changed


def stacked_forms(specs: ParamTree) -> Iterator[ParamTree]:
    """Yield the specs, and those with expert sources in each other layout that a checkpoint of the model may have."""
    yield specs
    upright, turned, mlx, apart = ({} for _ in range(4))
    for _, spec in walk_specs(specs):
        for source in spec.sources:
            if (match := _ONE.fullmatch(source.name)) is not None:
                kind, (out, inputs) = _KINDS.get(match["kind"], match["kind"]), source.shape
                name, out = ("down_proj", out) if kind == "down_proj" else ("gate_up_proj", 2 * out)
                upright[f"{match['at']}.experts.{name}"] = (spec.shape[0], out, inputs)
                turned[f"{match['at']}.experts.{name}"] = (spec.shape[0], inputs, out)
                mlx[f"{match['at']}.switch_mlp.{kind}.weight"] = (spec.shape[0], *source.shape)
            elif (match := _FUSED.fullmatch(source.name)) is not None:
                apart[f"{match['at']}.0.down_proj.weight"] = ()
    yield from (with_experts(specs, shapes) for shapes in (upright, turned, mlx, apart) if shapes)


@dataclasses.dataclass(frozen=True)
class _Experts:
    shapes: Shapes

    def of(self, spec: ParamSpec) -> ParamSpec:
        if spec.inputs is None or not spec.sources or spec.sources[0].name in self.shapes:
            return spec
        sources = self._stacked(spec) or self._apart(spec)
        return dataclasses.replace(spec, sources=sources) if sources else spec

    def _stacked(self, spec: ParamSpec) -> tuple[Source, ...]:
        """Return the sources for stacked tensors in place of per-expert ones; () if the checkpoint has none."""
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
        """Return the sources for all experts' weights of a kind, given the source of the first expert."""
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
        """Return whether expert weights are stored as [in, out], also assumed if the shapes match neither order."""
        for name, upright in ((both, (2 * hidden, d)), (down, (d, hidden))):
            if upright[0] != upright[1]:
                return self.shapes[name][1:] != upright
        raise AssertionError("both are square")

    def _apart(self, spec: ParamSpec) -> tuple[Source, ...]:
        """Return the sources for per-expert tensors in place of stacked ones; () if the checkpoint has none."""
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
    """Return the source of all experts at once, or one per expert if the tensor is stored as [in, out].

    Args:
        whole: shape of the tensor as ``[experts, out, in]``.
        taken: the slice of its outputs to read.
    """
    experts, out, inputs = whole
    if not turned:
        form = (experts, len(range(out)[taken]), inputs)
        return [Source(name, whole, reshape=form, where=where, part=(_EVERY, taken))]
    return [
        Source(name, (experts, inputs, out), True, where=(expert, *where[1:]), part=(expert, _EVERY, taken))
        for expert in range(experts)
    ]
