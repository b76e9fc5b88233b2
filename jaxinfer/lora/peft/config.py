"""PEFT's adapter_config.json: validation, and the model modules that it targets.

The keys are those of PEFT's ``LoraConfig`` (https://github.com/huggingface/peft, src/peft/tuners/lora/config.py, as of
0.21). A key that affects results and is not supported is rejected by name. An unknown key, of a trainer or a later
release, is ignored with a warning, as in PEFT; tensors that it adds to the file are rejected separately.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.formats import json_values
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.patterns import Budget, Pattern, Suffix, first_match

_log = logging.getLogger("jaxinfer")

ALL_LINEAR = "all-linear"
MOST_NAMES = 20_000  # in a list or a table
LARGEST = 1_000_000.0  # alpha

# Provenance, training and initialisation settings, or facts that the shapes of the base already give.
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "lora_dropout", "fan_in_fan_out", "init_lora_weights", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config"),
        *("merge_weights", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr", "model_key_mapping"),  # the last: ms-swift's
    )
)
# Affect results and are not supported; the last two are of PEFT before 0.3 and of ms-swift.
_REFUSED = frozenset(
    (
        *("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
        *("monteclora_config", "velora_config", "megatron_config", "ensure_weight_tying"),
        *("enable_lora", "use_merged_linear"),
    )
)
# Initialisations that leave the base unchanged. PiSSA, OLoRA, LoftQ, CorDA and LoRA-GA change it, so the file alone is
# not enough.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_BIASES = ("none", "all", "lora_only")
_WORD = re.compile(r"\w{1,100}")
_ANY_LAYERS = r"[^.]*"

Rules = tuple[tuple[Suffix, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """Fields of an adapter_config.json that affect results, with PEFT's names.

    Attributes:
        target_modules: names (path suffixes or whole paths), or a regular expression.
        all_linear: target all linear layers except the head instead; the set depends on the writer's module classes.
        modules_to_save: names of modules that the file contains whole.
        trainable_token_indices: replaced rows, by the table's name, or "" for the embedding table.
        canonical: all fields that affect results, JSON-serialisable.
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
    modules_to_save: tuple[str, ...]
    trainable_token_indices: Mapping[str, tuple[int, ...]]
    canonical: Mapping[str, Any]
    budget: Budget = dataclasses.field(default_factory=Budget)

    def rank(self, module: str) -> int:
        """Return the rank of a module as PEFT computes it."""
        found = first_match(self.rank_pattern, module, self.budget)
        return self.r if found is None else int(found)

    def scale(self, module: str) -> float:
        """Return the scale of a module's low-rank product."""
        found, rank = first_match(self.alpha_pattern, module, self.budget), self.rank(module)
        alpha = self.lora_alpha if found is None else found
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return whether the adapter targets a module."""
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
    """Return whether ``name`` is the path or its suffix after a dot."""
    return path == name or path.endswith(f".{name}")


def parse_config(value: Mapping[str, Any]) -> PeftConfig:
    """Validate the contents of an adapter_config.json.

    Raises:
        AdapterError: a key is missing, has a wrong type, or requests an unsupported feature.
    """
    read = _Reader(value)
    if value.get("peft_type") != "LORA":
        raise read.error("peft_type", "only LORA is served")
    start = value.get("init_lora_weights")
    if not any(start is known or (isinstance(start, str) and start == known) for known in _STARTS):
        raise read.error("init_lora_weights", "it may have changed the base's weights: save it converted to plain LoRA")
    config = PeftConfig(**read.fields(), canonical=read.effective())
    read.pass_over_others()
    if config.use_dora and config.lora_bias:
        raise read.error("lora_bias", "it cannot stand beside use_dora")
    named = config.target_modules is not None or config.all_linear or config.target_parameters
    if not named and not config.trainable_token_indices:
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
            "modules_to_save": self._names("modules_to_save"),
            "trainable_token_indices": self._tokens(),
        }

    def effective(self) -> dict[str, Any]:
        said = {key: _in_order(self.value[key]) for key in sorted(_EFFECTIVE) if not _is_empty(self.value.get(key))}
        parsed = {"layers_to_transform": sorted(self._layers() or ()), "trainable_token_indices": self._tokens()}
        return said | {key: value for key, value in parsed.items() if key in said}

    def pass_over_others(self) -> None:
        """Reject known unsupported keys; warn about unknown ones."""
        others = {key: said for key, said in self.value.items() if key not in _EFFECTIVE and not _is_empty(said)}
        for key in others:
            if key in _REFUSED:
                raise self.error(key, "this is not supported")
        if unknown := sorted(others.keys() - _WITHOUT_EFFECT):
            shown = ", ".join(f"{key[:100]!r}: {repr(others[key])[:100]}" for key in unknown[:5])
            _log.warning(f"adapter_config.json: {len(unknown)} keys that are not known here are passed over: {shown}")

    def _integer(self, key: str, default: int) -> int:
        number = json_values.whole(self.value.get(key, default))
        if number is None or not 0 < number <= 2**20:
            raise self.error(key, "it must be a positive integer")
        return number

    def _number(self, key: str, said: object) -> float:
        number = json_values.real(said)
        if number is None or not -LARGEST <= number <= LARGEST:
            raise self.error(key, f"it must be a number of at most {LARGEST:.0f}")
        return number

    def _flag(self, key: str) -> bool:
        said = self.value.get(key)
        flag = False if said is None else json_values.flag(said)
        if flag is None:
            raise self.error(key, "it must be true or false")
        return flag

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
        if whole and not all(0 < (json_values.whole(number) or 0) <= 2**20 for number in table.values()):
            raise self.error(key, "its ranks must be positive integers")
        return tuple((Suffix(name, key), self._number(key, number)) for name, number in table.items())

    def _layers(self) -> frozenset[int] | None:
        said = self.value.get("layers_to_transform")
        if said is None or said == []:
            return None
        layers = _wholes(said if isinstance(said, list) else [said])
        if layers is None:
            raise self.error("layers_to_transform", "it must be a number or a list of numbers of layers")
        if isinstance(self.value.get("target_modules"), str):
            raise self.error("layers_to_transform", "it cannot stand beside a target_modules that is a string")
        return frozenset(layers)

    def _tokens(self) -> dict[str, tuple[int, ...]]:
        said = self.value.get("trainable_token_indices") or {}
        tables = said if isinstance(said, dict) else {"": said}
        found = {name: _wholes(listed) for name, listed in tables.items() if isinstance(listed, list)}
        rows = {name: tuple(listed) for name, listed in found.items() if listed and min(listed) >= 0}
        if len(rows) < len(tables) or any(len({*listed}) < len(listed) for listed in rows.values()):
            raise self.error("trainable_token_indices", "it must be a list of different token ids, or a table of lists")
        return rows

    def _layers_pattern(self) -> tuple[str, ...]:
        said = self.value.get("layers_pattern")
        words: Sequence[Any] = [said] if isinstance(said, str) else said or []
        if not isinstance(words, list) or not all(isinstance(w, str) and _WORD.fullmatch(w) for w in words):
            raise self.error("layers_pattern", "it must be a word or a list of words")
        return tuple(words)


_EFFECTIVE = frozenset(field.name for field in dataclasses.fields(PeftConfig)) - {"all_linear", "canonical", "budget"}


def _wholes(values: Sequence[object]) -> list[int] | None:
    """Return integers; None if one of the values is not an integer."""
    found = [json_values.whole(value) for value in values[:MOST_NAMES]]
    numbers = [number for number in found if number is not None]
    return numbers if len(numbers) == len(values) else None


def _in_order(value: Any) -> Any:
    """Sort a list, as PEFT writes sets. A table keeps its order, in which the first match counts."""
    return sorted(value, key=str) if isinstance(value, list) else value


def _is_empty(value: object) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""
