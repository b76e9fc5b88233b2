"""Choices of completion and chat responses in OpenAI's format, complete or as streaming chunks.

Most chunks carry only text; these are assembled from strings that are built once per output.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxinfer.serve.api.arrays import arrays_json, expert_ids
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs, TokenLogprob, WeightVersions, experts_of, version_ranges

LOWEST_LOGPROB = -9999.0
"""Log probability sent in place of -inf, which JSON cannot represent; the value is vLLM's."""


@runtime_checkable
class TokenSpeller(Protocol):
    """Text and bytes of single tokens; implemented by `jaxinfer.serve.frontend.frontend.Frontend`."""

    def token_text(self, token: int) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclasses.dataclass(frozen=True)
class ResponseFields:
    """Optional fields of a choice in addition to its text.

    Attributes:
        logprobs, prompt_logprobs, token_ids, arrays: whether the request asked for them.
        hidden: token ids that produce no text (special tokens when they are skipped).
    """

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    arrays: bool = False
    hidden: frozenset[int] = frozenset()

    @property
    def plain(self) -> bool:
        """Whether a chunk has its text alone."""
        return not (self.logprobs or self.token_ids or self.arrays)


@dataclasses.dataclass(frozen=True)
class Echo:
    """A prompt that is echoed before the output.

    Attributes:
        logprobs: of the prompt tokens, if the output has logprobs; the first is None.
        only: the output itself is not shown.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs | None] = ()
    only: bool = False


@runtime_checkable
class Choice(Protocol):
    """An output of a response; it takes its deltas either to produce chunks or to produce the complete choice."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None if the endpoint does not report it."""
        ...

    def opening(self) -> str:
        """Return the choice of the chunk before the first delta, "" if there is none."""
        ...

    def chunks(self, delta: OutputDelta) -> Sequence[str]:
        """Return the choices of the chunks for a delta, as JSON."""
        ...

    def take(self, delta: OutputDelta) -> None: ...

    def whole(self) -> dict[str, Any]:
        """Return the complete choice after all deltas were taken."""
        ...


@dataclasses.dataclass
class _Parts:
    """Accumulated deltas of an output."""

    text: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    acceptance: str | None = None
    weight_versions: WeightVersions = ()

    def add(self, delta: OutputDelta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.acceptance, self.weight_versions = delta.acceptance, delta.weight_versions
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs

    def delta(self, index: int) -> OutputDelta:
        return OutputDelta(
            index,
            "".join(self.text),
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
            self.prompt_logprobs,
            self.acceptance,
            self.weight_versions,
        )


class TextChoice:
    """Choice of ``/v1/completions``. ``index``: index of the choice; ``echo``: prompt shown before the first delta."""

    reasoning_tokens = None

    def __init__(
        self, index: int, words: TokenSpeller, wanted: ResponseFields, prompt: Sequence[int], echo: Echo | None = None
    ) -> None:
        self._index, self._words, self._wanted = index, words, wanted
        self._prompt: Sequence[int] | None = prompt
        self.echo = echo
        self._plain = wanted.plain
        self._before = f'{{"index":{index},"text":'
        self._offsets = Offsets(words.token_bytes, wanted.hidden)
        self._parts = _Parts()

    def opening(self) -> str:
        return ""

    def chunks(self, delta: OutputDelta) -> Sequence[str]:
        if self._plain and delta.finish_reason is None and self.echo is None and delta.prompt_logprobs is None:
            return (
                (f'{self._before}{json.dumps(delta.text)},"logprobs":null,"finish_reason":null}}',)
                if delta.text
                else ()
            )
        return (json.dumps(self._shape(delta)),)

    def take(self, delta: OutputDelta) -> None:
        self._parts.add(delta)

    def whole(self) -> dict[str, Any]:
        return self._shape(self._parts.delta(self._index))

    def _shape(self, delta: OutputDelta) -> dict[str, Any]:
        echo, self.echo = self.echo, None
        text, tokens, positions = delta.text, delta.token_ids, list[PositionLogprobs | None](delta.logprobs)
        shown = list(tokens)
        if echo is not None:
            if echo.only:
                text, tokens, positions, shown = "", [], [], []
            text, positions, shown = echo.text + text, [*echo.logprobs, *positions], [*echo.token_ids, *shown]
        logprobs = None
        if self._wanted.logprobs:
            if echo is not None:
                self._offsets.begin(echo.text, echo.token_ids)
            logprobs = self._logprobs(shown[len(shown) - len(positions) :], positions)
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return choice | self._extras(delta, tokens)

    def _extras(self, delta: OutputDelta, tokens: Sequence[int]) -> dict[str, Any]:
        prompt, self._prompt = self._prompt, None  # sent once, in the first chunk
        return _extras(delta, tokens, prompt, self._wanted, self._words)

    def _logprobs(self, tokens: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        return {
            "tokens": [self._words.token_text(token) for token in tokens],
            "token_logprobs": [None if p is None else _finite(p.chosen.logprob) for p in positions],
            "top_logprobs": [None if p is None else self._best(p) for p in positions],
            "text_offset": [self._offsets.next(token) for token in tokens],
        }

    def _best(self, position: PositionLogprobs) -> dict[str, float]:
        """Return log probabilities by token text; if two tokens have the same text, the more likely one is kept."""
        found: dict[str, float] = {}
        for candidate in (*position.top, position.chosen):
            found.setdefault(self._words.token_text(candidate.token_id), _finite(candidate.logprob))
        return found


class ChatChoice:
    """Choice of ``/v1/chat/completions``."""

    @property
    def reasoning_tokens(self) -> int | None:
        return 0

    def __init__(self, index: int, words: TokenSpeller, wanted: ResponseFields) -> None:
        self._index, self._words, self._wanted = index, words, wanted
        self._plain = wanted.plain
        self._before = f'{{"index":{index},"delta":{{"content":'
        self._parts = _Parts()

    def opening(self) -> str:
        delta = {"role": "assistant", "content": ""}
        return json.dumps({"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunks(self, delta: OutputDelta) -> Sequence[str]:
        if self._plain and delta.finish_reason is None and delta.prompt_logprobs is None:
            text = json.dumps(delta.text)
            return (f'{self._before}{text}}},"logprobs":null,"finish_reason":null}}',) if delta.text else ()
        found = []
        if delta.text or delta.token_ids or delta.prompt_logprobs is not None:
            found.append(json.dumps(self._shape(delta, "delta", {"content": delta.text}, None)))
        if delta.finish_reason is not None:
            last = dataclasses.replace(delta, text="", token_ids=[], logprobs=(), prompt_logprobs=None)
            found.append(json.dumps(self._shape(last, "delta", {}, delta.finish_reason)))
        return found

    def take(self, delta: OutputDelta) -> None:
        self._parts.add(delta)

    def whole(self) -> dict[str, Any]:
        delta = self._parts.delta(self._index)
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._shape(delta, "message", message, delta.finish_reason)

    def _shape(self, delta: OutputDelta, name: str, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._wanted.logprobs and (delta.logprobs or name == "message"):
            logprobs = {"content": [position_json(p, self._words) for p in delta.logprobs], "refusal": None}
        choice = {"index": self._index, name: content, "logprobs": logprobs, "finish_reason": reason}
        if reason is None:
            delta = dataclasses.replace(delta, finish_reason=None, stop_reason=None, acceptance=None)
        return choice | _extras(delta, delta.token_ids, None, self._wanted, self._words)


class Offsets:
    """Character offsets of tokens in a text; tokens within one character share the offset of its first token.

    Args:
        spell: returns the bytes of a token.
        hidden: token ids that produce no text.
    """

    def __init__(self, spell: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._spell, self._hidden = spell, hidden
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def begin(self, text: str, token_ids: Sequence[int]) -> None:
        """Start after the ``text`` of these tokens. It may exceed their bytes: some tokenizers prepend a space."""
        ahead = Offsets(self._spell, self._hidden)
        for token in token_ids:
            ahead.next(token)
        self._count = len(text) - ahead._count

    def next(self, token: int) -> int:
        at = max(self._count, 0)
        if token not in self._hidden:
            self._count += len(self._characters.decode(self._spell(token)))
        return at


def position_json(position: PositionLogprobs, words: TokenSpeller) -> dict[str, Any]:
    """Return the logprobs of a position in chat format: the chosen token and ``top_logprobs``."""
    return {**_token(position.chosen, words), "top_logprobs": [_token(each, words) for each in position.top]}


def _token(candidate: TokenLogprob, words: TokenSpeller) -> dict[str, Any]:
    text, spelt = words.token_text(candidate.token_id), words.token_bytes(candidate.token_id)
    return {"token": text, "logprob": _finite(candidate.logprob), "bytes": list(spelt)}


def _extras(
    delta: OutputDelta, tokens: Sequence[int], prompt: Sequence[int] | None, wanted: ResponseFields, words: TokenSpeller
) -> dict[str, Any]:
    """Return vLLM's extension fields that were requested or are set, how draft tokens were accepted, and the versions
    of the weights."""
    found = {} if delta.finish_reason is None else version_fields(delta.weight_versions)
    if delta.acceptance is not None:
        found["speculation"] = {"acceptance": delta.acceptance}
    if delta.stop_reason is not None:
        found["stop_reason"] = delta.stop_reason
    if wanted.token_ids:
        found["token_ids"] = list(tokens)
        if prompt is not None:
            found["prompt_token_ids"] = list(prompt)
    if wanted.arrays and delta.logprobs:
        found["arrays"] = arrays_json(delta.logprobs, LOWEST_LOGPROB)
    if wanted.prompt_logprobs and delta.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None if p is None else _candidates(p, words) for p in delta.prompt_logprobs]
    if wanted.arrays and (experts := experts_of(delta.prompt_logprobs or ())):
        found["prompt_routed_experts"] = list(map(expert_ids, experts))
    return found


def version_fields(versions: WeightVersions) -> dict[str, Any]:
    """Return the fields of an output for the weights that computed it: ``weight_version``, that of the last token, and,
    if there are several, ``weight_versions``: those of ranges of tokens."""
    found: dict[str, Any] = {"weight_version": versions[-1][0] if versions else 0}
    if len(versions) > 1:
        ranges = version_ranges(versions)
        found["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in ranges]
    return found


def _candidates(position: PositionLogprobs, words: TokenSpeller) -> dict[str, dict[str, Any]]:
    return {
        str(each.token_id): {
            "logprob": _finite(each.logprob),
            "rank": each.rank,
            "decoded_token": words.token_text(each.token_id),
        }
        for each in (*position.top, position.chosen)
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
