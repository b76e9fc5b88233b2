"""`ServedModel`: a model and the engine that serves it, whose weights can change and whose memory can be freed."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax

from jaxinfer.engine.core import EngineCore, EngineMemory, Pace, PauseMode
from jaxinfer.engine.execution.stages import unshared
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import bias_path, merge_lora
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import abstract, in_memory, is_page_locked, overlaid
from jaxinfer.parallel.processes import PAGE_LOCKED
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import HEAD, walk_specs
from jaxinfer.weights.errors import CheckpointError
from jaxinfer.weights.fit import (
    as_declared,
    checksum_of,
    fitted,
    is_spec,
    leaves_of,
    map_nodes,
    placed_node,
    require_finite,
    selected,
    wrong,
)
from jaxinfer.weights.trainers import params_from

CACHE, WEIGHTS = "kv_cache", "weights"
TAGS = (CACHE, WEIGHTS)
MODES = ("wait", "keep", "abort")
_AFTER_THE_LAYERS = frozenset(("final_norm", HEAD[0]))  # they change no keys and values
_AT_ONCE = 1 << 30  # bytes that may be copied at once


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """Result of an update: version, bytes on a device, seconds of placing the arrays and of exchanging them.

    Attributes:
        errors: of `merge_lora`: the relative error of each weight that was quantised again, by path.
    """

    version: int
    bytes: int
    seconds: float
    arrays: Mapping[str, weakref.ref[jax.Array]] = dataclasses.field(repr=False, compare=False)
    errors: Mapping[str, float] = dataclasses.field(default=MappingProxyType({}), compare=False)

    @functools.cached_property
    def checksum(self) -> str:
        """Digest of the new arrays (`checksum_of`), read to the host.

        Raises:
            WeightsError: they have been replaced since.
        """
        found = {path: reference() for path, reference in self.arrays.items()}
        if any(array is None for array in found.values()):
            raise wrong("version", f"={self.version} is not served any more")
        return checksum_of(found.items())


@dataclasses.dataclass
class StagedWeights:
    """Weights on the devices: placed parameters in portions, and the model's parameters. ``served``: they are served,
    or were."""

    placed: list[Any]
    params: dict[str, Any]
    drafts: bool
    shares: bool
    seconds: float
    served: bool = False


class ServedModel[Engine: EngineMemory]:
    """The model of a running engine. Methods but `stage` and `discard` are called between two steps of the engine.

    Args:
        model: the model, with the parameters that the engine was made with; those that only other processes have are
            abstract.
        engine: its engine.
        shares: the caller keeps references to the parameters.
        check_finite: reject new weights with NaN or infinity.

    Attributes:
        model: its parameters are those that are served; abstract while they are asleep.
    """

    def __init__(self, model: Model, engine: Engine, *, shares: bool = False, check_finite: bool = False) -> None:
        self.model, self.engine, self._check_finite = model, engine, check_finite
        self._elsewhere = {False: _abstract_names(model), True: _abstract_names(model.draft)}  # by ``drafts``
        self._asleep: dict[str, list[_Kept]] = {}  # by tag, with what is kept on the host
        self._dropped = self._resumes = False
        self._staging = threading.Lock()
        engine.shares_weights = shares

    # ---- new weights

    def update(self, weights: Any, *, version: int | None = None, **options: Any) -> WeightUpdate:
        """`stage` new weights, and serve them: `commit`."""
        self.require_version(version)
        return self.commit(self.stage(weights, **options), version)

    def stage(
        self,
        weights: Any,
        *,
        names: str | None = None,
        partial: bool = False,
        drafts: bool = False,
        cast: bool = False,
        copy: bool = False,
    ) -> StagedWeights:
        """Check new weights and place them on the engine's devices next to the served ones, layer by layer. From any
        thread, while the engine computes.

        Args:
            weights: a nested dict of the model's own names, a `Model`, or what `params_from` takes.
            names: see `params_from`.
            partial: it may lack parameters, which stay as they are.
            drafts: they are those of the draft model or head.
            cast: change their dtype to that of the served ones; false: another dtype is rejected.
            copy: never use the given arrays themselves, which an optimizer may delete.

        Raises:
            WeightsError: names the first parameter that is missing, unknown or of another shape or dtype.
        """
        try:
            with jax.transfer_guard("allow"):  # a trainer may forbid transfers in its own thread
                return self._staged(weights, names=names, partial=partial, drafts=drafts, cast=cast, copy=copy)
        except CheckpointError as error:  # of values, which are read when they are placed
            raise wrong("params", f": {error}") from error

    def _staged(
        self, weights: Any, *, names: str | None, partial: bool, drafts: bool, cast: bool, copy: bool
    ) -> StagedWeights:
        begun, model = time.perf_counter(), self._model(drafts)
        given = weights.params if isinstance(weights, Model) else weights
        if names is not None or not _is_own(model, given):
            given = params_from(model, given, names=names, partial=partial, cast=cast)
        if self._dropped and partial and not drafts:
            raise wrong("partial", "=True: all parameters are needed after sleep(level=2)")
        if model.folded and partial and any(name.startswith("layers_") for name in given):
            raise wrong("partial", "=True: scales are folded into the layers (AWQ, SmoothQuant), so all are needed")
        specs = selected(model.specs, given, partial=partial)
        if not jax.tree.leaves(specs, is_leaf=is_spec):
            raise wrong("params", "has no parameter")
        declared = dict(walk_specs(model.declared_specs))
        fit = functools.partial(fitted, declared=declared, dtype=str(model.dtype), cast=cast, copy=copy)
        ours = {name: map_nodes(fit, node, given[name], (name,)) for name, node in specs.items()}
        with self._staging:
            placed, copying = [], 0
            params = {name: model.params[name] for name in specs if name in self._elsewhere[drafts]}
            for name in (name for name in specs if name not in params):
                part = model.replace(specs={name: specs[name]}, params={name: ours.pop(name)()}, draft=None)
                placed.append(self.engine.stage(part, drafts=drafts))
                params[name] = placed_node(part.params[name], placed[-1], name)
                if self._check_finite:
                    require_finite(params[name], name)
                copying += sum(leaf.nbytes for leaf in jax.tree.leaves(params[name]))
                if copying > _AT_ONCE:
                    jax.block_until_ready(placed)
                    copying = 0
            jax.block_until_ready(placed)
        shares = not copy and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given))
        return StagedWeights(placed, params, drafts, shares, time.perf_counter() - begun)

    def commit(self, staged: StagedWeights, version: int | None = None) -> WeightUpdate:
        """Serve staged weights. Sequences go on with their tokens, under the new weights.

        Raises:
            WeightsError: the version is not greater than the served one, or the weights are asleep.
        """
        begun, number = time.perf_counter(), self.require_version(version)
        self._swap(staged, self.engine.weight_version if staged.drafts else number)
        self.engine.shares_weights |= staged.shares
        if not staged.drafts:
            self._dropped = False
            self._resume_awake()
        leaves = dict(leaves_of(staged.params))
        arrays = {path: weakref.ref(leaf) for path, leaf in leaves.items() if not _is_abstract(leaf)}
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
        return WeightUpdate(self.engine.weight_version, size, staged.seconds + time.perf_counter() - begun, arrays)

    def _swap(self, staged: StagedWeights, version: int) -> None:
        restart = not staged.drafts and bool(staged.params.keys() - _AFTER_THE_LAYERS)
        self.engine.swap(staged.placed, version, restart=restart)
        staged.served = True
        old = self.model.draft if staged.drafts else self.model
        assert old is not None
        new = old.replace(params=overlaid(old.params, staged.params))
        self.model = self.model.replace(draft=new) if staged.drafts else new

    def discard(self, staged: StagedWeights) -> None:
        """Forget staged weights that are not served. From any thread."""

    def require_version(self, version: int | None) -> int:
        """Return the number of the next version; raise WeightsError unless weights can be updated to ``version``."""
        served = self.engine.weight_version
        if WEIGHTS in self._asleep:
            raise wrong("params", "cannot be updated while the weights are asleep: wake_up(['weights']) first")
        if version is None:
            return served + 1
        if isinstance(version, bool) or not isinstance(version, int) or not served < version < 2**63:
            raise wrong("version", f"={version!r} must be an integer greater than {served}, which is served")
        return version

    def _model(self, drafts: bool) -> Model:
        if not drafts:
            return self.model
        if self.model.draft is None:
            raise wrong("params", "are those of a draft model, and the engine has none")
        return unshared(self.model.draft, self.model)

    # ---- memory

    @property
    def asleep(self) -> list[str]:
        """What is asleep: "kv_cache", "weights", both or nothing."""
        return [tag for tag in TAGS if tag in self._asleep]

    def sleep(self, level: int = 1, tags: Iterable[str] = TAGS) -> None:
        """Free device memory: of the KV cache, and of the weights. The engine pauses as by `pause("keep")` until all is
        awake again; requests wait. Compiled programs stay.

        Args:
            level: 1: the weights are copied to (page-locked) host memory. 2: they are dropped, but those of a draft
                model.

        Raises:
            RequestError: a value is wrong.
        """
        require_level(level)
        wanted = [tag for tag in require_tags(tags) if tag not in self._asleep]
        if self.engine.pace is not Pace.PAUSED:
            self._resumes = True
            self.engine.pause("keep")
        kept = self._kept(level) if WEIGHTS in wanted else []
        self.engine.sleep(cache=CACHE in wanted, weights=WEIGHTS in wanted)
        if WEIGHTS in wanted:
            self._dropped, self.model = self._dropped or level == 2, without_weights(self.model)
        self._asleep |= {tag: kept if tag == WEIGHTS else [] for tag in wanted}

    def _kept(self, level: int) -> list[_Kept]:
        kept = [] if level == 2 or self._dropped else [_Kept.of(self.model)]
        return kept if self.model.draft is None else [*kept, _Kept.of(self._model(drafts=True), drafts=True)]

    def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Take back what `sleep` freed. After level 2 the engine resumes when all weights have been updated."""
        wanted = [tag for tag in require_tags(tags) if tag in self._asleep]
        if WEIGHTS in wanted:
            for each in self._asleep.pop(WEIGHTS):
                staged = ServedModel.stage(self, each.on_device(), drafts=each.drafts)
                self._swap(staged, self.engine.weight_version)
        if CACHE in wanted:
            self.engine.wake()
            del self._asleep[CACHE]
        self._resume_awake()

    def _resume_awake(self) -> None:
        if self._resumes and not self._asleep and not self._dropped:
            self._resumes = False
            self.engine.resume()

    def require_running(self) -> None:
        """Raise RequestError unless requests are computed now."""
        self.require_awake()
        if self.engine.pace is Pace.PAUSED:
            raise RequestError("engine", "is paused: resume() first")

    def resume(self) -> None:
        """Resume a paused engine; raise RequestError while something is asleep."""
        self.require_awake()
        self._resumes = False
        self.engine.resume()

    def require_awake(self) -> None:
        """Raise RequestError while something is asleep, or if weights were dropped and not updated."""
        if self._asleep:
            raise RequestError("engine", f"is asleep ({', '.join(self.asleep)}): wake_up() first")
        if self._dropped:
            raise RequestError("engine", "has no weights after sleep(level=2): update_weights(...) first")

    # ---- checks

    def checksums(self) -> dict[str, str]:
        """Return a digest of each served parameter, by path."""
        self.require_awake()
        return {path: checksum_of([(path, array)]) for path, array in leaves_of(self.model.params)}


class _Kept(NamedTuple):
    """Weights in host memory, of the model or of its draft model (``drafts``)."""

    drafts: bool
    specs: Any
    params: Any

    @staticmethod
    def of(model: Model, *, drafts: bool = False) -> _Kept:
        return _Kept(drafts, model.specs, jax.block_until_ready(jax.tree.map(_to_host, model.params)))

    def on_device(self) -> Any:
        """Return the weights on the device, except those that are served from the host."""
        return jax.tree.map(lambda spec, x: x if spec.on_host else _to_device(x), self.specs, self.params)


def _to_host(array: Any) -> Any:
    """Copy an array to the host's memory, page-locked if possible; on a CPU it is there. Others are left alone."""
    if not isinstance(array, jax.Array) or is_page_locked(array.sharding):
        return array
    device = array.addressable_shards[0].device
    kinds = [memory.kind for memory in device.addressable_memories()]
    if device.platform == "cpu" or PAGE_LOCKED not in kinds:
        return array
    return in_memory(array, PAGE_LOCKED)


def _to_device(array: Any) -> Any:
    away = isinstance(array, jax.Array) and is_page_locked(array.sharding)
    return in_memory(array) if away else array


def without_weights(model: Model) -> Model:
    """Return a model with abstract parameters."""
    draft = None if model.draft is None else without_weights(model.draft)
    return model.replace(params=abstract(model.params), draft=draft)


class WeightFrontend:
    """Mixin of classes that have a `ServedModel`: new weights, pauses, and memory that is given back (docs/rl.md)."""

    def _open(self) -> ServedModel[EngineCore]:
        raise NotImplementedError

    @property
    def weight_version(self) -> int:
        """Version of the served weights; 0: those of the start."""
        return self._open().engine.weight_version

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        mode: str = "wait",
        partial: bool = False,
        names: str | None = None,
        cast: bool = False,
        copy: bool = False,
    ) -> WeightUpdate:
        """Serve new weights: all of them from the same step on, without a compilation.

        Args:
            params: a nested dict of the model's own names, a `Model`, an `nnx.State`, or pairs (name, array) in the
                names of a trainer (docs/trainers.md). Arrays are placed like the served ones; those that are there
                already are used themselves, unless ``copy``.
            names: convention of the names, one of `jaxinfer.weights.trainers.NAMES`; None finds it.
            version: number of the new weights, greater than that of the served ones (None: by 1).
            mode: what becomes of running requests: "keep": they go on under the new weights, "abort": they end,
                "wait": there are none, or the call is rejected.
            partial: ``params`` may lack parameters, which stay as they are.
            cast: convert arrays of another dtype, instead of rejecting them.

        Raises:
            WeightsError: names the first wrong parameter, or the version; the served weights are unchanged.
        """
        served = self._open()
        served.require_version(version)
        if require_mode(mode) == "wait" and served.engine.has_work:
            raise RequestError("mode", "='wait' while requests of this LLM run: keep or abort them")
        staged = served.stage(params, names=names, partial=partial, cast=cast, copy=copy)
        if mode == "abort":
            self.abort_all()
        return served.commit(staged, version)

    def update_draft_weights(self, params: Any, *, partial: bool = False, cast: bool = False) -> WeightUpdate:
        """Serve new weights of the draft model or head, which change no output; see `update_weights`."""
        return self._open().update(params, drafts=True, partial=partial, cast=cast)

    def merge_lora(self, adapter: Adapter, *, version: int | None = None, mode: str = "wait") -> WeightUpdate:
        """Serve the model with an adapter merged into its weights, see `merge_lora` and `update_weights`.

        Raises:
            ValueError: the adapter does not fit, or one of its weights cannot be quantised again.
        """
        served = self._open()
        served.require_awake()
        paths = [path for path in (*adapter.deltas, *map(bias_path, adapter.deltas)) if _has(served.model.params, path)]
        errors: dict[str, float] = {}
        merged = merge_lora(
            _with_plain(served.model, paths), adapter, lambda path, error: errors.update({".".join(path): error})
        )
        made = self.update_weights(_only(merged.params, paths), version=version, mode=mode, partial=True)
        return dataclasses.replace(made, errors=errors)

    def weight_checksums(self) -> dict[str, str]:
        """Return a digest of each served parameter, by path."""
        return self._open().checksums()

    def pause(self, mode: str = "keep") -> None:
        """Stop computing: after the step in flight ("keep"), or after ending all requests ("abort")."""
        if require_mode(mode) == "wait" and self._open().engine.has_work:
            raise RequestError("mode", "='wait' while requests of this LLM run: keep or abort them")
        self._open().engine.pause("keep" if mode == "wait" else require_mode(mode))

    def resume(self) -> None:
        """Go on after `pause`; raise RequestError while something is asleep."""
        self._open().resume()

    @property
    def is_paused(self) -> bool:
        return self._open().engine.pace is Pace.PAUSED

    def abort_all(self) -> None:
        """End all running requests."""
        engine = self._open().engine
        pace = engine.pace
        engine.pause("abort")
        if pace is Pace.RUNNING:
            engine.resume()

    def sleep(self, level: int = 1, tags: Iterable[str] = TAGS) -> None:
        """Free device memory, see `ServedModel.sleep`. Until `wake_up` nothing is generated."""
        self._open().sleep(level, tags)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back what `sleep` freed (None: all of it)."""
        self._open().wake_up(TAGS if tags is None else tags)

    @property
    def is_sleeping(self) -> bool:
        return bool(self._open().asleep)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _abstract_names(model: Model | None) -> frozenset[str]:
    params = {} if model is None else model.params
    return frozenset(name for name in params if any(map(_is_abstract, jax.tree.leaves(params[name]))))


def _has(tree: Any, path: tuple[str, ...]) -> bool:
    return not path or (isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:]))


def _only(tree: Any, paths: Iterable[tuple[str, ...]]) -> Any:
    """Return the part of a nested dict with these paths."""
    below = dict[str, list[tuple[str, ...]]]()
    for name, *rest in filter(None, paths):
        below.setdefault(name, []).append(tuple(rest))
    return {name: _only(tree[name], rest) for name, rest in below.items()} if below else tree


def _with_plain(model: Model, paths: Iterable[tuple[str, ...]]) -> Model:
    """Return the model with these weights in the layout of its family."""
    own, declared = _only(model.params, paths), dict(walk_specs(model.declared_specs))
    plain = map_nodes(lambda path, node, _: lambda: as_declared(node, declared[path]), own, own, ())
    return model.replace(params=overlaid(model.params, plain()))


def _is_own(model: Model, given: Any) -> bool:
    """Whether a tree has the model's own names, or could have no others."""
    return isinstance(given, dict) and all(name in model.specs for name in given)


def require_mode(mode: str) -> PauseMode:
    """Return the mode of a pause; raise RequestError if there is no such mode."""
    if mode not in MODES:
        raise RequestError("mode", f"={mode!r} must be one of {', '.join(MODES)}")
    return cast(PauseMode, mode)


def require_level(level: int) -> None:
    """Raise RequestError unless it is a level of `ServedModel.sleep`."""
    if level not in (1, 2) or isinstance(level, bool):
        raise RequestError("level", f"={level!r} must be 1 or 2")


def require_tags(tags: Iterable[str]) -> list[str]:
    """Return the tags of `ServedModel.sleep`; raise RequestError for another one."""
    listed = [tags] if isinstance(tags, str) else list(tags)
    for tag in listed:
        if tag not in TAGS:
            raise RequestError("tags", f": {tag!r} must be one of {', '.join(TAGS)}")
    return listed


def copied_arrays(tree: Any) -> Any:
    """Return copies of arrays, where they are."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), tree)
