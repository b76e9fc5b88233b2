"""`SamplingParams`, validated at construction, and the errors of rejected requests. No jax."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn


class RequestError(ValueError):
    """A request that cannot be served. ``field`` is the name of the invalid field, if there is one.

    Args:
        place: the field or an entry of it: ``top_p``, ``logit_bias[7]``; None: ``reason`` is the whole sentence.
        reason: continuation of the sentence: ``=2 must be ...``, ``: 9 must be ...``, ``must hold at most ...``.
    """

    def __init__(self, place: str | None, reason: str) -> None:
        joint = "" if place is None or reason.startswith(("=", ":")) else " "
        super().__init__(f"{place or ''}{joint}{reason}")
        self.place, self.reason = place, reason
        self.field = None if place is None else re.split(r"\W", place, maxsplit=1)[0]


class ContextLengthError(RequestError):
    """A prompt that exceeds the context.

    Attributes:
        size: size of the prompt, with its unit: "9000 tokens".
        most: maximum size.
    """

    def __init__(self, place: str, reason: str, size: str, most: int) -> None:
        super().__init__(place, reason)
        self.size, self.most = size, most


class QueueFullError(RequestError):
    """A request rejected because the queue is full; the client may retry later."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)


LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
"""Values of ``logprobs_mode``, vLLM's."""
MAX_LOGPROB_TOKEN_IDS = 128

_ACCEPTANCES = ("exact", "typical")
_MAX_DRAFT = 2**31 - 1
_INT64 = 2**63 - 1
_MAX_BIAS = 100.0
_MAX_STRINGS = 64
_MAX_CHARACTERS = 1024
_MAX_GRAMMAR = 1 << 20  # characters
_MAX_CHOICES = 4096
_AT_ONCE = 1 << 16  # characters parsed at construction; whether longer text is JSON is found when it is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Constraint on an output (docs/structured_outputs.md): exactly one of these is given. Names are vLLM's.

    Attributes:
        json: a JSON Schema, as an object or as text; stored as text.
        json_object: true: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: texts; the output is one of them.
        grammar: a grammar in llguidance's Lark syntax, or in GBNF.
        structural_tag: texts, tags and free text between them, in vLLM's and xgrammar's format: an object or its text.
        enable_in_reasoning: in addition to one of those: the grammar also constrains the reasoning.

    Raises:
        RequestError: a value is invalid. Whether a grammar can be compiled is found at compilation.
    """

    __no_type_check__ = True  # as in `SamplingParams`

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.enable_in_reasoning, bool):
            _refuse("structured_outputs.enable_in_reasoning", self.enable_in_reasoning, "must be true or false")
        names = [field.name for field in dataclasses.fields(self) if field.name != "enable_in_reasoning"]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            reason = f"must have exactly one of {', '.join(names)}, not {len(given)} of them"
            raise RequestError("structured_outputs", reason)
        make: dict[str, Any] = {"json": _object, "json_object": _true, "choice": _choices, "structural_tag": _object}
        for name in given:
            value = make.get(name, _grammar_text)(f"structured_outputs.{name}", getattr(self, name))
            object.__setattr__(self, name, value)

    @property
    def asked(self) -> tuple[str, str]:
        """Name of the given field, and its value as text; choices as JSON."""
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        names = ("json", "regex", "grammar", "structural_tag")
        texts = {name: getattr(self, name) for name in names}
        return next(((name, str(text)) for name, text in texts.items() if text is not None), ("json_object", ""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding options of a request (docs/speculation.md).

    Attributes:
        enabled: false: no tokens are drafted for it.
        max_tokens: maximum draft tokens of a step, 0: none; None: the engine's number.
        acceptance: "exact": a draft token is accepted if it equals the token that would be sampled anyway: drafts
            change no token. "typical": also if it is likely enough (Medusa's rule), which changes tokens.

    Raises:
        RequestError: a value is invalid; the message names field and value: ``speculation.max_tokens=-1 must be ...``.
    """

    __no_type_check__ = True  # as of `SamplingParams`

    enabled: bool = True
    max_tokens: int | None = None
    acceptance: str = "exact"

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            _refuse("speculation.enabled", self.enabled, "must be true or false")
        if self.max_tokens is not None:
            most = _integer("speculation.max_tokens", self.max_tokens, 0, _MAX_DRAFT)
            object.__setattr__(self, "max_tokens", most)
        if not isinstance(self.acceptance, str) or self.acceptance not in _ACCEPTANCES:
            _refuse("speculation.acceptance", self.acceptance, f"must be {' or '.join(_ACCEPTANCES)}")
        if self.acceptance == "typical" and self.most(1) == 0:
            none = "max_tokens=0 has none" if self.enabled else "enabled=False has none"
            _refuse("speculation.acceptance", self.acceptance, f"is about drafts, and speculation.{none}")

    def most(self, engine: int) -> int:
        """Return the maximum draft tokens of a step, on an engine that drafts up to ``engine`` tokens."""
        if not self.enabled:
            return 0
        return engine if self.max_tokens is None else min(engine, self.max_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A row of `PARAMETERS`: facts about a field of `SamplingParams`.

    Its checks, HTTP fields, flag, sampler array, probe and row of docs/sampling.md are made of it;
    tests compare messages and the client with it.

    Attributes:
        kind: declared type, without None, which is valid if ``optional``.
        low, high: smallest and largest valid number; None: no bound.
        positive: 0 itself is invalid.
        negative_is_default: negative numbers mean the default, 0.
        also_in: "responses", "messages" (APIs) and "generation_config" (of checkpoints), where these have the field.
            Every other API has all fields.
        neutral: value without effect of the sampler's array of this name, for unused slots; None: there is no array.
        probe: value with an effect on the device, for the probe of batch invariance; None: no value has one.
        choices: valid texts.
        trains: values other than the default need ``enable_training_outputs``.
    """

    name: str
    kind: str
    optional: bool
    default: Any
    low: float | None = None
    high: float | None = None
    positive: bool = False
    negative_is_default: bool = False
    also_in: Collection[str] = ()
    neutral: float | None = None
    probe: Any = None
    choices: Collection[str] = ()
    trains: bool = False


def _field(default: Any, **facts: Any) -> Any:
    """Declare a field of `SamplingParams` with the facts of its `Parameter`."""
    return dataclasses.field(default=default, metadata=facts)


_APIS = ("responses", "messages")
_ALL = (*_APIS, "generation_config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling and stopping. Names and defaults are vLLM's. The fields are the rows of `PARAMETERS`.

    Log probabilities are those of the raw logits, before any processor, unless ``logprobs_mode`` says otherwise.
    ``logprob_token_ids``, ``return_entropy``, ``return_sampling_mask`` and ``return_routed_experts`` imply ``logprobs``
    0. ``seed`` None is drawn once, at admission.

    Values are normalised: numbers to ``int`` and ``float``, ``top_k`` and ``top_n_sigma`` -1 to 0, sequences and a
    single ``stop`` string to tuples, ``logit_bias`` to a plain dict. Checks that need the model (is a token id in the
    vocabulary?) are in ``jaxinfer.request_checks.validate_request``.

    Attributes:
        max_tokens: maximum number of generated tokens per output
        temperature: sampling temperature; 0: greedy, higher: more random
        top_p: nucleus sampling: cumulative probability of the most likely tokens to sample from
        top_k: number of most likely tokens to sample from; 0: all
        min_p: drop tokens with probability below min_p times that of the most likely token
        top_n_sigma: drop tokens with a logit this many standard deviations below the largest one; 0: keep all
        presence_penalty: subtracted from the logits of tokens that occur in the output
        frequency_penalty: subtracted from the logits of tokens for each occurrence in the output
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output
        seed: sampling seed; equal seeds give equal text (default: random; shown by --stats and --json)
        n: number of outputs per prompt
        min_tokens: minimum number of generated tokens per output
        thinking_token_budget: reasoning budget: end the think block after N tokens
        logprobs: number of most likely tokens to return with log probabilities, per output position; -1: the whole
            vocabulary, where max_logprobs is -1
        prompt_logprobs: number of most likely tokens per prompt position; shown with --json
        logprobs_mode: what log probabilities of the output are: raw_logprobs, raw_logits (before any processor),
            processed_logprobs or processed_logits (after all of them, with temperature)
        logprob_token_ids: up to 128 token ids whose log probabilities are returned at each output position
        return_entropy: return the entropy at each output position
        return_sampling_mask: return the token ids that the sampler could draw at each output position
        return_routed_experts: return the experts that the forward pass of each output position took, by layer
        logit_bias: numbers from -100 to 100 by token id, added to the logits
        allowed_token_ids: the only token ids that may be generated, at least one
        forced_token_ids: the output is exactly these token ids, with their own log probabilities; max_tokens is their
            number
        bad_words: at most 64 texts of 1 to 1024 characters that must not occur in the output; they may make at most 32
            token sequences of at most 8 tokens
        stop: at most 64 strings of 1 to 1024 characters, or one; each ends the output
        stop_token_ids: token ids that end the output; with EOS at most 64
        ignore_eos: continue after the EOS token
        include_stop_str_in_output: keep the stop string in the output
        skip_special_tokens: omit special tokens from the text
        speculation: a `Speculation` or a mapping of its fields; None: the engine's drafts, with exact acceptance
        structured_outputs: a `StructuredOutputs` or a mapping of its fields; None: unconstrained

    Raises:
        RequestError: a value is out of range; the message names field and value.
    """

    __no_type_check__ = True  # run-time type checkers must skip this class: it validates itself, and accepts 0 for 0.0

    max_tokens: int | None = _field(16, low=1, high=_INT64)
    temperature: float = _field(1.0, low=0, neutral=0, probe=0.8, also_in=_ALL)
    top_p: float = _field(1.0, low=0, high=1, positive=True, neutral=1, probe=0.9, also_in=_ALL)
    top_k: int = _field(0, low=-1, negative_is_default=True, neutral=0, probe=8, also_in=_ALL)
    min_p: float = _field(0.0, low=0, high=1, neutral=0, probe=0.01, also_in=_ALL)
    top_n_sigma: float = _field(0.0, low=-1, negative_is_default=True, neutral=0, probe=1.5, also_in=_APIS)
    presence_penalty: float = _field(0.0, low=-2, high=2, neutral=0, probe=0.5)
    frequency_penalty: float = _field(0.0, low=-2, high=2, neutral=0, probe=0.3)
    repetition_penalty: float = _field(1.0, low=0, positive=True, neutral=1, probe=1.3, also_in=_ALL)
    seed: int | None = _field(None, low=-(2**63), high=2**64 - 1, also_in=_APIS)
    n: int = _field(1, low=1, high=1024)
    min_tokens: int = _field(0, low=0, high=_INT64, neutral=0, probe=1)
    thinking_token_budget: int | None = _field(None, low=0, high=_INT64, also_in=("responses",))
    logprobs: int | None = _field(None, low=-1, probe=1)
    prompt_logprobs: int | None = _field(None, low=0)
    logprobs_mode: str = _field(LOGPROBS_MODES[0], choices=LOGPROBS_MODES, trains=True)
    logprob_token_ids: Sequence[int] | None = _field(None, trains=True)
    return_entropy: bool = _field(False, trains=True)
    return_sampling_mask: bool = _field(False, trains=True)
    return_routed_experts: bool = _field(False, trains=True)
    logit_bias: Mapping[int, float] | None = _field(None, probe={0: 3.0})
    allowed_token_ids: Sequence[int] | None = _field(None)
    forced_token_ids: Sequence[int] | None = _field(None)
    bad_words: Sequence[str] | None = _field(None)
    stop: str | Sequence[str] | None = _field(None)
    stop_token_ids: Sequence[int] | None = _field(None)
    ignore_eos: bool = _field(False, also_in=_APIS)
    include_stop_str_in_output: bool = _field(False)
    skip_special_tokens: bool = _field(True)
    speculation: Speculation | Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, check, optional in _CHECKS:
            value = getattr(self, name)
            if value is not None or not optional:
                object.__setattr__(self, name, check(name, value))
        if self.forced_token_ids is not None:
            _check_forced(self)
            object.__setattr__(self, "max_tokens", len(self.forced_token_ids))
        _check_outputs(self)
        if self.logprobs is None and any(getattr(self, name) for name in EXTRAS):
            object.__setattr__(self, "logprobs", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", self.allowed_token_ids, "must hold at least one token id")

    @property
    def typical(self) -> bool:
        """Whether drafts of this request are accepted by typical acceptance, which is lossy."""
        return isinstance(self.speculation, Speculation) and self.speculation.acceptance == "typical"

    @property
    def training_output(self) -> str | None:
        """The first field that needs ``enable_training_outputs``; None: there is none."""
        if self.logprobs == -1:
            return "logprobs"
        return next((name for name in _TRAINING if getattr(self, name) != PARAMETERS[name].default), None)

    @property
    def never_ends_before(self) -> int:
        """Number of generated tokens before which no token ends an output."""
        return self.min_tokens if self.forced_token_ids is None else len(self.forced_token_ids)

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Constraint on the output, see `StructuredOutputs.asked`; None: unconstrained."""
        return self.structured_outputs.asked if isinstance(self.structured_outputs, StructuredOutputs) else None


PARAMETERS: Mapping[str, Parameter] = {
    field.name: Parameter(
        name=field.name,
        kind=str(field.type).removesuffix(" | None"),
        optional=str(field.type).endswith(" | None"),
        default=field.default,
        **field.metadata,
    )
    for field in dataclasses.fields(SamplingParams)
}
"""Sampling parameters by name."""


_TRAINING = tuple(row.name for row in PARAMETERS.values() if row.trains)
EXTRAS = tuple(name for name in _TRAINING if name != "logprobs_mode")
"""Parameters that ask for outputs besides log probabilities."""


def _check_outputs(params: SamplingParams) -> None:
    if params.logprob_token_ids is not None and not 0 < len(params.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS:
        size = len(params.logprob_token_ids)
        raise RequestError("logprob_token_ids", f"must hold 1 to {MAX_LOGPROB_TOKEN_IDS} token ids, not {size}")
    if params.prompt_logprobs is not None and params.logprobs_mode != LOGPROBS_MODES[0]:
        _refuse("logprobs_mode", params.logprobs_mode, "and prompt_logprobs exclude each other: these are raw")


def _check_forced(params: SamplingParams) -> None:
    """Reject what cannot be combined with forced tokens: it would choose other tokens, or another end."""
    if not params.forced_token_ids:
        _refuse("forced_token_ids", params.forced_token_ids, "must hold at least one token id")
    for name in ("n", "min_tokens", "thinking_token_budget", "stop", "structured_outputs"):
        value = getattr(params, name)
        if value != PARAMETERS[name].default and value != ():
            _refuse(name, value, "and forced_token_ids exclude each other")
    if params.typical:
        _refuse("speculation.acceptance", "typical", "and forced_token_ids exclude each other")


def _refuse(field: str, value: object, reason: str) -> NoReturn:
    raise RequestError(field, f"={reprlib.repr(value)} {reason}")


def _number(field: str, value: object, low: float | None, high: float | None, *, above: bool = False) -> float:
    """Return ``value`` as a float within [low, high], or (low, high] if ``above``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _refuse(field, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _refuse(field, value, "must be finite")
    if low is not None and (number < low or (above and number == low)):
        _refuse(field, value, f"must be {'greater than' if above else 'at least'} {low:g}")
    if high is not None and number > high:
        _refuse(field, value, f"must be at most {high:g}")
    return number


def _integer(field: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(field, value, "must be an integer")
    integer = int(value)
    if integer < low:
        _refuse(field, value, f"must be at least {low}")
    if high is not None and integer > high:
        _refuse(field, value, f"must be at most {high}")
    return integer


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(field, value, "must be true or false")
    return value


def _strings(field: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) and field == "stop" else value
    if isinstance(items, str) or not isinstance(items, Sequence):
        _refuse(field, value, "must be a list of strings")
    if len(items) > _MAX_STRINGS:
        _refuse(field, value, f"must hold at most {_MAX_STRINGS} strings, not {len(items)}")
    for item in items:
        if not isinstance(item, str):
            _refuse(field, item, "must be a string")
        if not 0 < len(item) <= _MAX_CHARACTERS:
            _refuse(field, item, f"must have 1 to {_MAX_CHARACTERS} characters, not {len(item)}")
    return tuple(items)


def _choice(choices: Collection[str], field: str, value: object) -> str:
    if not isinstance(value, str) or value not in choices:
        _refuse(field, value, f"must be one of {', '.join(choices)}")
    return value


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        _refuse(field, value, "must be a list of token ids")
    return tuple(_integer(field, item, 0) for item in value)


def _bias(field: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        _refuse(field, value, "must map token ids to numbers")
    return {
        _integer(f"{field} key", token, 0): _number(f"{field}[{token}]", bias, -_MAX_BIAS, _MAX_BIAS)
        for token, bias in value.items()
    }


def _object(place: str, value: object) -> str:
    """Return the text of a JSON object."""
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as cause:
            raise RequestError(place, f"must be JSON: {cause}") from cause
    text = _grammar_text(place, value)
    if len(text) > _AT_ONCE:
        if not text.lstrip().startswith("{"):
            raise RequestError(place, "must be JSON: an object")
        return text
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise RequestError(place, f"must be JSON: {cause}") from cause
    if not isinstance(schema, dict):
        _refuse(place, schema, "must be an object")
    return text


def _true(place: str, value: object) -> bool:
    if value is not True:
        _refuse(place, value, "must be true or false")
    return True


def _choices(place: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        _refuse(place, value, "must be a list of strings")
    if not 0 < len(value) <= _MAX_CHOICES:
        raise RequestError(place, f"must hold 1 to {_MAX_CHOICES} strings, not {len(value)}")
    for item in value:
        if not isinstance(item, str) or not item:
            _refuse(place, item, "must be a string that is not empty")
    _grammar_text(place, "".join(value))
    return tuple(value)


def _grammar_text(place: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(place, value, "must be a string")
    if not 0 < len(value) <= _MAX_GRAMMAR:
        raise RequestError(place, f"must have 1 to {_MAX_GRAMMAR} characters, not {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(place, f"has a lone surrogate at character {cause.start}: not Unicode") from cause
    return value


def _fields_of(kind: Any, name: str, value: object) -> Any:
    """Make a dataclass from a mapping of its fields; None values count as not given."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        _refuse(name, value, "must be an object")
    known = [field.name for field in dataclasses.fields(kind)]
    for key in value:
        if key not in known:
            plain = isinstance(key, str) and key.isidentifier()
            place = f"{name}.{key:.50}" if plain else f"{name}[{reprlib.repr(key)}]"
            raise RequestError(place, f"is no field of it: they are {', '.join(known)}")
    return kind(**{key: given for key, given in value.items() if given is not None})


_KINDS: Mapping[str, Callable[[str, object], Any]] = {
    "bool": _flag,
    "str | Sequence[str]": _strings,
    "Sequence[str]": _strings,
    "Sequence[int]": _token_ids,
    "Mapping[int, float]": _bias,
    "Speculation | Mapping[str, Any]": functools.partial(_fields_of, Speculation),
    "StructuredOutputs | Mapping[str, Any]": functools.partial(_fields_of, StructuredOutputs),
}


def _check_of(row: Parameter) -> Callable[[str, object], Any]:
    """Return the function that checks and normalises values of a parameter."""
    if row.kind == "str":
        return functools.partial(_choice, row.choices)
    if row.kind not in ("int", "float"):
        return _KINDS[row.kind]
    range_: dict[str, Any] = {"low": row.low, "high": row.high}
    if row.kind == "float":
        check: Callable[..., Any] = functools.partial(_number, **range_, above=row.positive)
    else:
        check = functools.partial(_integer, **range_)
    return (lambda name, value: max(check(name, value), row.default)) if row.negative_is_default else check


_CHECKS = tuple((row.name, _check_of(row), row.optional) for row in PARAMETERS.values())


@dataclasses.dataclass(frozen=True)
class SamplingLimits:
    """Limits on what a request may use of the sampler, fixed before compilation: array sizes (counts) and drafts.

    Attributes:
        max_stop_ids: token ids that can end one request (EOS and its own).
        max_bad_words: forbidden token sequences of one request.
        max_bad_word_tokens: tokens of one such sequence.
        max_logprobs: top logprobs of one position.
        drafts: the engine speculates, so that requests may choose an acceptance rule.
        grammars: the engine supports structured outputs.
        masks: the decode programs take token masks, which force tokens.
        training: the engine has outputs for training (``enable_training_outputs``).
        whole: these may be of the whole vocabulary.
        vocabulary_bytes: bytes of all those of a request; None: any.
        experts: these may be the experts that tokens take.
    """

    max_stop_ids: int = 64
    max_bad_words: int = 32
    max_bad_word_tokens: int = 8
    max_logprobs: int = 20
    drafts: bool = False
    grammars: bool = False
    masks: bool = False
    training: bool = False
    whole: bool = False
    vocabulary_bytes: int | None = None
    experts: bool = False
