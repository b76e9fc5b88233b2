"""Special and added tokens declared by a folder's configuration in addition to the tokenizer's own file.

The sources are tokenizer_config.json and, if that has no ``added_tokens_decoder``, special_tokens_map.json and
added_tokens.json. Precedence, and the order in which tokens missing from the vocabulary get the next ids, follow
``transformers`` 5 (``PreTrainedTokenizerBase._from_pretrained``, ``TokenizersBackend.__init__``).
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxinfer.text.files import read_object

CONFIG = "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Fields that name a special token of every tokenizer; other fields that end in ``_token`` are model-specific."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"


@dataclasses.dataclass(frozen=True)
class Declared:
    """Tokens declared by the files.

    Attributes:
        named: special tokens by the field that names them (``bos_token``, ``image_token`` ...); None: explicitly none.
        extra: special tokens without a name.
        listed: tokens by the id that a file gives them, in ascending order.
        legacy: ``listed`` is from added_tokens.json, which tokenizer.json overrides.
        plain: see `with_defaults`.
    """

    named: Mapping[str, AddedToken | None] = dataclasses.field(default_factory=dict)
    extra: tuple[AddedToken, ...] = ()
    listed: Mapping[int, AddedToken] = dataclasses.field(default_factory=dict)
    legacy: bool = False
    plain: bool = False

    def with_defaults(self, defaults: Mapping[str, str], plain: bool = False) -> Declared:
        """Return a copy with default special tokens (text by name) for the fields that no file has.

        Args:
            plain: special tokens do not strip whitespace around them, whatever the files declare.
        """
        missing = {name: special(text) for name, text in defaults.items() if name not in self.named}
        order = dict.fromkeys((*NAMES, *defaults, *self.named))
        named = {name: token for name in order if (token := {**missing, **self.named}.get(name)) is not None}
        return dataclasses.replace(self, named=named, plain=plain)

    @property
    def texts(self) -> dict[str, str]:
        """Text of each named token, for chat templates."""
        return {name: token.content for name, token in self.named.items() if token is not None}

    def merged(self, own: Mapping[int, AddedToken]) -> dict[str, AddedToken]:
        """Return all added tokens by text, in the order in which new ones get ids; special ones as made by `special`.

        Args:
            own: added tokens of tokenizer.json by id.
        """
        listed = (token for token_id, token in self.listed.items() if not (self.legacy and token_id in own))
        tokens = {token.content: token for token in (*own.values(), *listed)}
        named = [token for token in self.named.values() if token is not None]
        for token in (*named, *self.extra):
            tokens.setdefault(token.content, token)
        again = {token.content for token in (*named, *self.extra) if self.plain}
        hidden = again.union(*({token.content} for token in (*own.values(), *named) if token.special))
        return {
            text: special(text if text in again else token) if token.special or text in hidden else token
            for text, token in tokens.items()
        }


def read_declared(folder: Path, error: type[ValueError]) -> Declared:
    """Return the tokens that the files in ``folder`` declare.

    Raises:
        error: a file cannot be read, or a field has an invalid type; the message names both and the value.
    """
    path = folder / CONFIG
    config = read_object(path, error)
    named, extra = _named(config, path, error), _extra(config, path, error)
    if "added_tokens_decoder" in config:
        return Declared(named, extra or (), _decoder(config["added_tokens_decoder"], path, error))
    path = folder / "special_tokens_map.json"
    tokens = read_object(path, error)
    named, mapped = named | _named(tokens, path, error), _extra(tokens, path, error)
    extra = _merged(extra, mapped, _EXTRA in tokens)
    known = {token.content for token in (*filter(None, named.values()), *extra)}
    return Declared(named, extra, _added(folder / "added_tokens.json", known, error), legacy=True)


def special(token: AddedToken | str) -> AddedToken:
    """Return the token as a special one, which is matched before normalisation."""
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip")}
    return AddedToken(token.content, **flags, special=True, normalized=False)


def _named(config: Mapping[str, Any], path: Path, error: type[ValueError]) -> dict[str, AddedToken | None]:
    """Return special tokens by name: of the fields that end in ``_token``, and of a table of extra ones."""
    named: dict[str, AddedToken | None] = {}
    for name, value in config.items():
        if name in NAMES:
            named[name] = None if value is None else special(_token(value, f"{name} in {path}", error))
        elif name.endswith("_token") and (isinstance(value, str) or _is_token(value)):
            named[name] = special(_token(value, f"{name} in {path}", error))
    table = config.get(_EXTRA)
    for name, value in table.items() if isinstance(table, Mapping) else ():
        named[name] = special(_token(value, f"{name} of {_EXTRA} in {path}", error))
    return named


def _extra(config: Mapping[str, Any], path: Path, error: type[ValueError]) -> tuple[AddedToken, ...] | None:
    """Return special tokens without a name; None: the file has no field for them. The newer field has precedence."""
    fields = [name for name in (_EXTRA, _ADDITIONAL) if name in config]
    field = next((name for name in fields if config[name]), fields[0] if fields else None)
    if field is None:
        return None
    value = config[field]
    if value is None or (field == _EXTRA and isinstance(value, Mapping)):
        return ()
    if not isinstance(value, list):
        raise error(f"{field} in {path} must be a list of tokens, not {reprlib.repr(value)}")
    return tuple(special(_token(item, f"{field}[{rank}] in {path}", error)) for rank, item in enumerate(value))


def _merged(
    first: tuple[AddedToken, ...] | None, second: tuple[AddedToken, ...] | None, joins: bool
) -> tuple[AddedToken, ...]:
    """Merge the lists of both files: the second counts if there is no first; ``joins``: it adds its missing tokens."""
    if first is None or second is None:
        return (first or ()) + (second or ())
    known = {token.content for token in first}
    return first + tuple(token for token in second if joins and token.content not in known)


def _decoder(value: Any, path: Path, error: type[ValueError]) -> dict[int, AddedToken]:
    entries = {} if value is None else value
    if not isinstance(entries, Mapping):
        raise error(f"added_tokens_decoder in {path} must be an object, not {reprlib.repr(value)}")
    tokens: dict[int, AddedToken] = {}
    for token_id, token in entries.items():
        where = f"entry {reprlib.repr(token_id)} of added_tokens_decoder in {path}"
        if not (token_id.isascii() and token_id.isdigit()) or len(token_id) > 10 or not isinstance(token, Mapping):
            raise error(f"{where} must be a token id and an object with its content, not {reprlib.repr(token)}")
        tokens[int(token_id)] = _token(token, where, error)
    return dict(sorted(tokens.items()))


def _added(path: Path, known: Collection[str], error: type[ValueError]) -> dict[int, AddedToken]:
    tokens: dict[int, AddedToken] = {}
    for text, token_id in read_object(path, error).items():
        if type(token_id) is not int or token_id < 0:
            raise error(f"{path} must map texts to token ids: {reprlib.repr(text)} has {reprlib.repr(token_id)}")
        tokens[token_id] = AddedToken(text, normalized=text not in known, special=text in known)
    return dict(sorted(tokens.items()))


def _is_token(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _token(value: Any, where: str, error: type[ValueError]) -> AddedToken:
    """Parse a token, given as text or as an object with ``content`` and flags."""
    if isinstance(value, str):
        return AddedToken(value)
    if not _is_token(value):
        raise error(f"{where} must be a token (its text, or an object with its content), not {reprlib.repr(value)}")
    flags = {flag: value[flag] for flag in FLAGS if value.get(flag) is not None}
    for flag, state in flags.items():
        if not isinstance(state, bool):
            raise error(f"{flag} of {where} must be true or false, not {reprlib.repr(state)}")
    return AddedToken(value["content"], **flags)
