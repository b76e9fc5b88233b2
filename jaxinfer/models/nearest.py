"""Error messages for unknown architectures: the nearest known ones, and how their config.json differs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.models.config import ConfigError

Readers = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""Readers of config.json by architecture, which raise `ConfigError` if it is not supported."""

_NESTED = ("text_config", "llm_config", "language_config")
_TRIES = 12
_FIELDS = 100
_SHOWN = 8
_BY_NAME, _SHARE = 6.0, 0.6  # fields that an equal name outweighs; least share of a name to count
_READ = 3  # least number of fields that a near architecture reads
_VALUE = reprlib.Repr(maxstring=40, maxother=40, maxlist=4, maxdict=4, maxlevel=2)
_FIELD = re.compile(r"config\.json: (\w+)")
# Fields of training, of tokens, and of the libraries that wrote the file, which do not affect the computation.
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
    """Differences between a config.json and one architecture.

    Attributes:
        missing: required fields that are absent.
        refused: error messages about fields that it reads.
        unread: set fields that it does not read.
    """

    name: str
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def fields(self) -> int:
        """Total number of differing fields."""
        return len(self.missing) + len(self.refused) + len(self.unread)

    def __str__(self) -> str:
        said = [
            *(["needs " + _listed(self.missing)] if self.missing else []),
            *(["does not read " + _listed(self.unread)] if self.unread else []),
            *(["says that " + _listed(self.refused)] if self.refused else []),
        ]
        return f"{self.name}, which {', '.join(said) if said else 'reads all of its fields'}"


def nearest(name: str, config_json: Mapping[str, Any], known: Readers, most: int = 3) -> list[Difference]:
    """Find the known architectures nearest to a config.json of another ``name``, nearest first: by fields that are
    missing, rejected and not read, and by common name prefixes. Architectures with nothing in common are left out."""
    fields = _text_fields(config_json)

    def distance(found: Difference) -> float:
        return found.fields - _BY_NAME * _alike(_stem(name), _stem(found.name))

    found = sorted((_compare(kind, fields, read) for kind, read in known.items()), key=distance)[:most]
    return [each for each in found if len(_telling(fields)) - len(each.unread) >= _READ]


def _alike(name: str, other: str) -> float:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
    return same / max(len(name), len(other)) if same >= _SHARE * min(len(name), len(other)) else 0.0


def _text_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, if config.json nests one."""
    outer = [(name, value) for name, value in config_json.items() if name not in _NESTED]
    inner = next((found for name in _NESTED if isinstance(found := config_json.get(name), dict)), {})
    return dict([*inner.items(), *outer][:_FIELDS])


def _stem(name: str) -> str:
    return re.sub(r"(For\w+|LMHeadModel|Model)$", "", name).lower()


def _needs(name: str, fields: Mapping[str, Any], read: Callable[..., Any]) -> tuple[Difference, dict[str, Any]]:
    """Return the difference except unread fields, and fields that the architecture accepts, with missing fields filled
    in and rejected fields left out."""
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
    """Return the fields that may affect the computation: fields that are off or empty do not."""
    return [key for key, value in fields.items() if value and not _ASIDE.fullmatch(key)]


def _shown(key: str, value: object) -> str:
    return f"{_VALUE.repr(key)[1:-1]} = {_VALUE.repr(value)}"


class _Odd:
    """A value that no field can have: a reader of the field raises, or returns another result."""


def _outcome(read: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Return the result of a reader, or the error message."""
    try:
        return read(fields)
    except ConfigError as error:
        return str(error)
    except _ERRORS as error:  # due to the odd value, or to a filled-in field
        return type(error)


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields without ``name``, and without objects that contain it."""
    return {
        key: value for key, value in fields.items() if key != name and not (isinstance(value, dict) and name in value)
    }


def _listed(parts: tuple[str, ...]) -> str:
    more = [f"{len(parts) - _SHOWN} more"] if len(parts) > _SHOWN else []
    return ", ".join([*parts[:_SHOWN], *more])
