"""Digests of all inputs of tracing: a program with a known digest need not be traced again.

The computation of a function follows from its code, its closure, the shapes of its arguments and the modules whose
names it uses. Modules of jaxinfer and its kernels are digested as loaded, not as on disk: a patched module gives
another program. Libraries are identified by their versions. Other code has no digest, so that user-written code is
traced at each start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from jaxinfer.compilations.files import FORM, sources

_OWN = ("jaxinfer", "pallas_kernels")
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "jaxtyping", "ml_dtypes")
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, type(...), range, slice))
# Substrings of names of JAX settings that are paths or verbosity, and do not affect programs.
_ELSEWHERE = ("_dir", "_path", "log", "dump", "compilation_cache", "persistent_cache", "traceback")
_OPAQUE = "?"  # pseudo module of objects with unknown contents
_INNER = ("__wrapped__", "__func__", "fget", "func")  # attributes of function-like objects that hold the function


class _Foreign(Exception):
    """Code or an object outside the known packages, or with unknown contents."""


class Fingerprints:
    """Digests of the programs of one start, during which code must not change: modules are read once."""

    def __init__(self) -> None:
        self._reader, self._modules = _Reader(), dict[str, _Digest]()

    def of(self, device: jax.Device, function: Callable[..., Any], *parts: Any) -> str | None:
        """Return a digest of a function, its arguments and settings, and JAX's tracing context; None if any of these
        involves foreign code.

        Args:
            parts: trees to digest in addition to the function. Arrays count by their values.
        """
        try:
            asked = self._reader.read([function, *map(jax.tree.flatten, parts)])
            code = self._code(asked.met)
        except _Foreign:
            return None
        return _hash(*_surroundings(device), asked.digest, *code).hex()

    def _code(self, names: frozenset[str]) -> list[bytes]:
        """Return digests of these modules, and of all modules that they use, transitively."""
        if _OPAQUE in names:
            raise _Foreign
        reached, waiting = dict[str, bytes](), [*names]
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached[name], met = self._module(name)
                waiting += met - {_OPAQUE}
        return [reached[name] for name in sorted(reached)]

    def _module(self, name: str) -> _Digest:
        """Return the digest of the values of all names of a module, and the modules that these come from."""
        if name not in self._modules:
            self._modules[name] = self._reader.module(name)
        return self._modules[name]


def _surroundings(device: jax.Device) -> Iterator[str]:
    """Yield the inputs of tracing besides the function and its arguments."""
    yield from (FORM, sources(), sys.version, *_versions())
    yield from (device.client.platform_version, device.device_kind)
    yield from (str(jax.sharding.get_abstract_mesh()), repr(nn.get_logical_axis_rules()))
    settings = jax.config.values
    yield from (f"{name}={settings[name]!r}" for name in _settings())
    for name, value in sorted(os.environ.items()):
        if name.startswith(("XLA_FLAGS", "MOSAIC_")):
            yield f"{name}={value}"


@functools.cache
def _settings() -> list[str]:
    return [name for name in sorted(jax.config.values) if not any(part in name for part in _ELSEWHERE)]


@functools.cache
def _versions() -> list[str]:
    return [importlib.metadata.version(library) for library in _LIBRARIES]


class _Digest(NamedTuple):
    """Digest of a value. ``met``: our own modules that its code is from."""

    digest: bytes
    met: frozenset[str]


class _Reader:
    """Reader of values: digests the type and contents of each. No value is read twice."""

    def __init__(self) -> None:
        self._known = dict[int, tuple[_Digest, Any]]()  # by id; holding the value keeps its id unique
        self._trees = dict[PyTreeDef, _Digest]()
        self._within = list[int]()
        self._met = set[str]()

    def read(self, value: Any) -> _Digest:
        if id(value) not in self._known:
            with self._inside(value):
                self._known[id(value)] = self._collected(self._parts(value)), value
        return self._known[id(value)][0]

    def module(self, name: str) -> _Digest:
        return self._collected(self._members(name, vars(sys.modules[name])))

    def _collected(self, parts: Iterator[str | bytes]) -> _Digest:
        before, self._met = self._met, set[str]()
        try:
            return _Digest(_hash(*parts), frozenset(self._met))
        finally:
            self._met = before

    @contextlib.contextmanager
    def _inside(self, value: Any) -> Iterator[None]:
        """Track a value while it is read: it may refer back to itself."""
        self._within.append(id(value))
        try:
            yield
        finally:
            self._within.pop()

    def _members(self, home: str, named: Mapping[str, Any]) -> Iterator[str | bytes]:
        """Yield the named values of a module or a class. Its own classes are read, other classes only named."""
        for key, value in sorted(named.items()):
            if key.startswith("__") and not isinstance(value, types.FunctionType):
                continue
            yield key
            if isinstance(value, type) and value.__module__ == home and id(value) not in self._within:
                yield from map(self._name, value.__mro__)
                with self._inside(value):
                    yield from self._members(home, vars(value))
            else:
                yield self._name(value) if isinstance(value, type) else self._of(value)

    def _of(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._within:
            return _hash("around", str(len(self._within) - self._within.index(id(value))))
        digest, met = self.read(value)
        self._met |= met
        return digest

    def _name(self, value: Any) -> str:
        home, package = _home(value), _package(value)
        if package in _OWN:
            self._met.add(home)
        elif package not in _LIBRARIES and package not in sys.stdlib_module_names:
            raise _Foreign(home)
        return f"{home}:{getattr(value, '__qualname__', '')}"

    def _parts(self, value: Any) -> Iterator[str | bytes]:
        yield self._name(type(value))
        match value:
            case enum.Enum():
                yield value.name
            case np.ndarray() | np.generic() | jax.Array():
                array = np.asarray(value)
                yield from (str(array.dtype), str(array.shape), array.tobytes())
            case np.dtype() | PartitionSpec() | AbstractMesh():
                yield str(value)
            case type() if "<locals>" in value.__qualname__:
                yield from self._members(value.__module__, {value.__qualname__: value})
            case type() | types.ModuleType() | types.BuiltinFunctionType():
                yield self._name(value)
            case types.FunctionType():
                yield from (self._name(value), *_code(value.__code__), *map(self._of, _held(value)))
            case PyTreeDef():
                yield self._tree(value)
            case dict() | types.MappingProxyType():
                yield from (self._of(one) for item in value.items() for one in item)
            case tuple() | list():
                yield from map(self._of, value)
            case set() | frozenset():
                yield from sorted(map(self._of, value))
            case _:
                yield from map(self._of, self._fields(value))

    def _tree(self, tree: PyTreeDef) -> bytes:
        """Return the digest of a tree structure, cached by value: flattening creates new ones, mostly equal."""
        if tree not in self._trees:
            self._trees[tree] = self._collected(map(self._of, (tree.node_data(), *tree.children())))
        self._met |= self._trees[tree].met
        return self._trees[tree].digest

    def _fields(self, value: Any) -> Iterator[Any]:
        """Yield the contents of an object."""
        match value:
            case functools.partial():
                yield from (value.func, value.args, value.keywords)
            case types.MethodType():
                yield from (value.__self__, value.__func__)
            case Mesh():
                yield from (value.axis_names, value.devices.shape, value.axis_types)
            case NamedSharding():
                yield from (value.mesh, value.spec, value.memory_kind)
            case jax.ShapeDtypeStruct():
                yield from (value.shape, np.dtype(value.dtype), value.weak_type, value.sharding)
            case _ if dataclasses.is_dataclass(value):
                yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))
            case _ if _package(type(value)) in _OWN and hasattr(value, "__dict__"):
                yield vars(value)
            case _:
                inner = [getattr(value, name) for name in _INNER if hasattr(value, name)]
                if _is_named(value):
                    yield value.__name__
                elif not inner and (getattr(value, "__dict__", None) or hasattr(value, "__slots__")):
                    self._met.add(_OPAQUE)
                yield from inner


def _home(value: Any) -> str:
    """Return the name of the defining module of an object; for a function, that of its globals."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__"))
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) else "builtins"


def _package(value: Any) -> str:
    return _home(value).partition(".")[0]


def _is_named(value: Any) -> bool:
    """Return whether it is a library object that represents a function by name, for example `jnp.add`."""
    return _package(type(value)) in _LIBRARIES and isinstance(getattr(value, "__name__", None), str)


def _held(function: types.FunctionType) -> Iterator[Any]:
    """Yield the defaults and the closure of a function. ``__class__`` is read as part of the class."""
    yield from (function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield None if name == "__class__" else cell.cell_contents


def _code(code: types.CodeType) -> Iterator[str | bytes]:
    """Yield the code of a function, independent of its position in a file."""
    yield from (code.co_code, code.co_exceptiontable, str(code.co_flags))
    yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    yield from map(_constant, code.co_consts)


def _constant(value: Any) -> str | bytes:
    match value:
        case types.CodeType():
            return _hash(*_code(value))
        case tuple():
            return _hash("tuple", *map(_constant, value))
        case frozenset():
            return _hash("frozenset", *sorted(map(repr, value)))
        case _:
            return f"{type(value).__name__} {value!r}"


def _hash(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()
