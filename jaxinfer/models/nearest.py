"""What to say of an architecture that is not known: the nearest known ones, and in what its config.json differs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.models.config import ConfigError

Readers = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""By architecture what reads its config.json, and raises `ConfigError` where it cannot."""

_NESTED = ("text_config", "llm_config", "language_config")
_TRIES = 12
_FIELDS = 100
_SHOWN = 8
_BY_NAME, _SHARE = 6.0, 0.6  # fields that the same name outweighs, and the share of a name that says something
_READ = 3  # fields, without which nothing is near
_VALUE = reprlib.Repr(maxstring=40, maxother=40, maxlist=4, maxdict=4, maxlevel=2)
_FIELD = re.compile(r"config\.json: (\w+)")
# Of training, of tokens, and of the libraries that wrote the file: nothing of what is computed.
_ASIDE = re.compile(
    r"_?(architectures|model_type|auto_map|(torch_)?dtype|\w*(name_or_path|_version|attn_implementation|_token_ids?|dropout"
    r"|pdrop|_drop|aux_loss\w*|z_loss\w*|loss_coef|loss_coeff)|use_cache|initializer\w*|init_\w+|pretraining_tp|id2label"
    r"|label2id|output_\w+|return_dict|tokenizer_class|task_\w+|keys_to_ignore\w*|summary_\w+|chunk_size_feed_forward"
    r"|aux_loss_alpha|seq_aux|use_flash_attn\w*|gradient_checkpointing|problem_type|quantization_config|vision_config"
    r"|audio_config|unsloth\w*|is_\w*decoder|attn_impl\w*|fused?_\w+|rescale_\w+|router_jitter_noise|ep_size)"
)
_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)


@dataclasses.dataclass(frozen=True)
class Difference:
    """What stands between a config.json and one architecture.

    Attributes:
        missing: fields that it needs and that are not there.
        refused: sentences about fields that it reads.
        unread: fields that say something and that it does not read.
    """

    name: str
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def fields(self) -> int:
        """How many they are together."""
        return len(self.missing) + len(self.refused) + len(self.unread)

    def __str__(self) -> str:
        said = [
            *(["needs " + _listed(self.missing)] if self.missing else []),
            *(["does not read " + _listed(self.unread)] if self.unread else []),
            *(["says that " + _listed(self.refused)] if self.refused else []),
        ]
        return f"{self.name}, which {', '.join(said) if said else 'reads all of its fields'}"


def nearest(name: str, config_json: Mapping[str, Any], known: Readers, most: int = 3) -> list[Difference]:
    """Find the known architectures that a config.json of another ``name`` has the most in common with, the nearest
    first: by fields that are missing, refused and not read, and by how the names begin. None of them is one that has
    nothing in common with it."""
    fields = _text_fields(config_json)

    def distance(found: Difference) -> float:
        return found.fields - _BY_NAME * _alike(_stem(name), _stem(found.name))

    found = sorted((_compare(kind, fields, read) for kind, read in known.items()), key=distance)[:most]
    return [each for each in found if len(_telling(fields)) - len(each.unread) >= _READ]


def _alike(name: str, other: str) -> float:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
    return same / max(len(name), len(other)) if same >= _SHARE * min(len(name), len(other)) else 0.0


def _text_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model around a text model, those of the latter."""
    outer = [(name, value) for name, value in config_json.items() if name not in _NESTED]
    inner = next((found for name in _NESTED if isinstance(found := config_json.get(name), dict)), {})
    return dict([*inner.items(), *outer][:_FIELDS])


def _stem(name: str) -> str:
    return re.sub(r"(For\w+|LMHeadModel|Model)$", "", name).lower()


def _needs(name: str, fields: Mapping[str, Any], read: Callable[..., Any]) -> tuple[Difference, dict[str, Any]]:
    """The difference but for what is not read, and fields with which the architecture has nothing more to say: those
    that are missing are made up, those that it refuses are left out."""
    missing, refused, tried = [], [], dict(fields)
    for _ in range(_TRIES):
        said = _outcome(read, tried)
        found = _FIELD.match(said) if isinstance(said, str) else None
        if found is None:
            break
        if said.endswith(" is missing"):
            missing.append(found[1])
            tried[found[1]] = 1
        else:
            refused.append(said.removeprefix("config.json: "))
            tried = _without(tried, found[1])
        if len(missing) != len(set(missing)) or len(refused) != len(set(refused)):
            break
    return Difference(name, tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(refused))), tried


def _compare(name: str, fields: Mapping[str, Any], read: Callable[..., Any]) -> Difference:
    found, tried = _needs(name, fields, read)
    before = _outcome(read, tried)
    unread = [key for key in _telling(fields) if key in tried and _outcome(read, {**tried, key: _Odd()}) == before]
    return dataclasses.replace(found, unread=tuple(_shown(key, fields[key]) for key in unread))


def _telling(fields: Mapping[str, Any]) -> list[str]:
    """Fields that may say something of the computation: what is off or empty says nothing."""
    return [key for key, value in fields.items() if value and not _ASIDE.fullmatch(key)]


def _shown(key: str, value: object) -> str:
    return f"{_VALUE.repr(key)[1:-1]} = {_VALUE.repr(value)}"


class _Odd:
    """A value that no field can have: whoever reads it says so, or answers otherwise."""


def _outcome(read: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """What is read, or the sentence that says why it cannot be."""
    try:
        return read(fields)
    except ConfigError as error:
        return str(error)
    except _ERRORS as error:  # of the odd value, or of what was made up
        return type(error)


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Without a field, or what holds one of this name."""
    return {
        key: value for key, value in fields.items() if key != name and not (isinstance(value, dict) and name in value)
    }


def _listed(parts: tuple[str, ...]) -> str:
    more = [f"{len(parts) - _SHOWN} more"] if len(parts) > _SHOWN else []
    return ", ".join([*parts[:_SHOWN], *more])
