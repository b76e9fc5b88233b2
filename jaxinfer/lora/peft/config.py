"""An adapter_config.json of PEFT: what it may say, and which of a model's modules it means.

The keys are those of PEFT's ``LoraConfig`` (https://github.com/huggingface/peft, src/peft/tuners/lora/config.py, as of
0.21). A key that changes results and is not served is refused by its name, and so is one that is not known here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.patterns import Budget, Pattern, Suffix, first_match

ALL_LINEAR = "all-linear"
MOST_NAMES = 20_000  # of a list or a table
LARGEST = 1_000_000.0  # alpha

# They say where the adapter came from, how it was trained or started, or repeat what the base's own shapes say.
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "lora_dropout", "fan_in_fan_out", "init_lora_weights", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config"),
    )
)
# Starts that leave the base as it is. PiSSA, OLoRA, LoftQ, CorDA and LoRA-GA change it, so the file alone says nothing.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_BIASES = ("none", "all", "lora_only")
_WORD = re.compile(r"\w{1,100}")
_ANY_LAYERS = r"[^.]*"

Rules = tuple[tuple[Suffix, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What an adapter_config.json says of results; the names are PEFT's.

    Attributes:
        target_modules: names (of ends of paths, or whole paths), or a regular expression.
        all_linear: in their place, all products but the head's. Which these are follows from the writer's classes.
        canonical: everything of it that changes a result, as JSON can hold it.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    bias: str
    rank_pattern: Rules
    alpha_pattern: Rules
    target_modules: tuple[str, ...] | Pattern | None
    all_linear: bool
    exclude_modules: tuple[str, ...] | Pattern | None
    target_parameters: tuple[str, ...]
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    canonical: Mapping[str, Any]
    budget: Budget = dataclasses.field(default_factory=Budget)

    def rank(self, module: str) -> int:
        """The rank that PEFT gives to a module."""
        found = first_match(self.rank_pattern, module, self.budget)
        return self.r if found is None else int(found)

    def scale(self, module: str) -> float:
        """What a module's product is multiplied by."""
        found, rank = first_match(self.alpha_pattern, module, self.budget), self.rank(module)
        alpha = self.lora_alpha if found is None else found
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the module is among those that the adapter changes."""
        if self.exclude_modules is not None and self._named(module, self.exclude_modules):
            return False
        if self.all_linear:
            return True
        if self.target_modules is None or not self._named(module, self.target_modules):
            return False
        return self.layers_to_transform is None or self._layer(module) in self.layers_to_transform

    def _named(self, module: str, names: tuple[str, ...] | Pattern) -> bool:
        if isinstance(names, Pattern):
            return names.fullmatch(module, self.budget)
        self.budget.spend(len(names))
        return any(ends_with(module, name) for name in names)

    def _layer(self, module: str) -> int | None:
        words = self.layers_pattern or (_ANY_LAYERS,)
        found = (re.search(rf"\.{word}\.(\d+)\.", module) for word in words)
        return next((int(match[1]) for match in found if match), None)


def ends_with(path: str, name: str) -> bool:
    """Whether ``name`` is the path, or its end behind a dot."""
    return path == name or path.endswith(f".{name}")


def parse_config(value: Mapping[str, Any]) -> PeftConfig:
    """Checks what an adapter_config.json holds.

    Raises:
        AdapterError: a key is missing, of a wrong type, or asks for what cannot be served.
    """
    read = _Reader(value)
    if value.get("peft_type") != "LORA":
        raise read.error("peft_type", "only LORA is served")
    start = value.get("init_lora_weights")
    if not any(start is known or (isinstance(start, str) and start == known) for known in _STARTS):
        raise read.error("init_lora_weights", "it may have changed the base's weights: save it converted to plain LoRA")
    config = PeftConfig(**read.fields(), canonical=read.effective())
    read.refuse_others()
    if config.use_dora and config.lora_bias:
        raise read.error("lora_bias", "it cannot stand beside use_dora")
    if config.target_modules is None and not config.all_linear and not config.target_parameters:
        raise read.error("target_modules", "it must say which modules are adapted")
    return config


@dataclasses.dataclass(frozen=True)
class _Reader:
    value: Mapping[str, Any]

    def error(self, key: str, why: str) -> AdapterError:
        said = repr(self.value.get(key))
        return AdapterError(f"adapter_config.json: {key} is {said[:100]}: {why}")

    def fields(self) -> dict[str, Any]:
        return {
            "r": self._integer("r", 8),
            "lora_alpha": self._number("lora_alpha", self.value.get("lora_alpha", 8)),
            **{key: self._flag(key) for key in ("use_rslora", "use_dora", "lora_bias")},
            "bias": self._bias(),
            "rank_pattern": self._rules("rank_pattern", whole=True),
            "alpha_pattern": self._rules("alpha_pattern", whole=False),
            "target_modules": self._modules("target_modules"),
            "all_linear": self._all_linear(),
            "exclude_modules": self._modules("exclude_modules"),
            "target_parameters": self._names("target_parameters"),
            "layers_to_transform": self._layers(),
            "layers_pattern": self._layers_pattern(),
        }

    def effective(self) -> dict[str, Any]:
        return {key: _in_order(self.value[key]) for key in sorted(_EFFECTIVE) if not _is_empty(self.value.get(key))}

    def refuse_others(self) -> None:
        for key, said in self.value.items():
            if key not in _EFFECTIVE and key not in _WITHOUT_EFFECT and not _is_empty(said):
                shown = key if len(key) <= 100 else key[:100] + "..."
                raise AdapterError(f"adapter_config.json: {shown!r} is {repr(said)[:100]}: this is not supported")

    def _integer(self, key: str, default: int) -> int:
        number = self.value.get(key, default)
        if type(number) is not int or not 0 < number <= 2**20:
            raise self.error(key, "it must be a positive integer")
        return number

    def _number(self, key: str, number: object) -> float:
        if type(number) not in (int, float) or not -LARGEST <= number <= LARGEST:  # type: ignore[operator]
            raise self.error(key, f"it must be a number of at most {LARGEST:.0f}")
        return float(number)  # type: ignore[arg-type]

    def _flag(self, key: str) -> bool:
        flag = self.value.get(key)
        if flag is not None and type(flag) is not bool:
            raise self.error(key, "it must be true or false")
        return bool(flag)

    def _bias(self) -> str:
        bias = self.value.get("bias", "none")
        if not isinstance(bias, str) or bias not in _BIASES:
            raise self.error("bias", f"it must be one of {', '.join(_BIASES)}")
        return bias

    def _names(self, key: str) -> tuple[str, ...]:
        names = self.value.get(key)
        if names is None:
            return ()
        if not isinstance(names, list) or len(names) > MOST_NAMES or not all(isinstance(name, str) for name in names):
            raise self.error(key, "it must be a list of names")
        return tuple(sorted(names))

    def _modules(self, key: str) -> tuple[str, ...] | Pattern | None:
        said = self.value.get(key)
        if isinstance(said, str):
            return None if key == "target_modules" and self._all_linear() else Pattern(said, key)
        return self._names(key) or None

    def _all_linear(self) -> bool:
        said = self.value.get("target_modules")
        return isinstance(said, str) and said.lower() == ALL_LINEAR

    def _rules(self, key: str, whole: bool) -> Rules:
        table = self.value.get(key) or {}
        if not isinstance(table, dict) or len(table) > MOST_NAMES:
            raise self.error(key, "it must be a table of numbers")
        if whole and not all(type(number) is int and 0 < number <= 2**20 for number in table.values()):
            raise self.error(key, "its ranks must be positive integers")
        return tuple((Suffix(name, key), self._number(key, number)) for name, number in table.items())

    def _layers(self) -> frozenset[int] | None:
        said = self.value.get("layers_to_transform")
        layers = [said] if type(said) is int else said
        if layers is None or layers == []:
            return None
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise self.error("layers_to_transform", "it must be a number or a list of numbers of layers")
        if isinstance(self.value.get("target_modules"), str):
            raise self.error("layers_to_transform", "it cannot stand beside a target_modules that is a string")
        return frozenset(layers)

    def _layers_pattern(self) -> tuple[str, ...]:
        said = self.value.get("layers_pattern")
        words: Sequence[Any] = [said] if isinstance(said, str) else said or []
        if not isinstance(words, list) or not all(isinstance(w, str) and _WORD.fullmatch(w) for w in words):
            raise self.error("layers_pattern", "it must be a word or a list of words")
        return tuple(words)


_EFFECTIVE = frozenset(field.name for field in dataclasses.fields(PeftConfig)) - {"all_linear", "canonical", "budget"}


def _in_order(value: Any) -> Any:
    """A list in an order of its own: PEFT writes sets. A table keeps its own, in which its first match counts."""
    return sorted(value) if isinstance(value, list) else value


def _is_empty(value: object) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""
