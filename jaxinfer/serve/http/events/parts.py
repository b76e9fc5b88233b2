"""Parts of an answer (reasoning, text, tool call) and the steps in which they are streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxinfer.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from jaxinfer.parsers.parser import Parser
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.frontend.chat.outputs import EventFilter
from jaxinfer.serve.frontend.chat.token_texts import TokenTexts
from jaxinfer.serve.http.choices import TokenSpeller
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason, PositionLogprobs, WeightVersions

REASONING: Literal["reasoning"] = "reasoning"
TEXT: Literal["text"] = "text"
CALL: Literal["call"] = "call"


@dataclasses.dataclass
class Part:
    """A part of an answer.

    Attributes:
        index: index among the parts of the answer.
        id, name: of a tool call, as the model or its parser gives them.
        texts: its text in chunks; for a tool call its arguments.
        logprobs: of the tokens of its text, if requested.
        cut: whether the output was truncated within the part.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    id: str = ""
    name: str = ""
    texts: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A part begins; the previous part has ended."""

    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class More:
    """More text of a part; ``logprobs`` as in `Part`."""

    part: Part
    texts: list[str]
    logprobs: list[PositionLogprobs]

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """A part is complete, or truncated (``cut``)."""

    part: Part


Step = Opened | More | Closed


class PlainText:
    """Parser for outputs without reasoning or tool calls."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Event]:
        return []


class PartReader:
    """Parses one output token by token, so that each token is attributed to its part.

    Args:
        parser: parser of this output.
        words: converts tokens to bytes.
        hidden: token ids that produce no text.

    Attributes:
        parts: parts that have begun and are shown.
        reasoning_tokens: number of reasoning tokens, shown or not, without markers.
        finish_reason, stop_reason, weight_versions: as in the last delta.
    """

    def __init__(self, parser: Parser | None, shown: EventFilter, words: TokenSpeller, hidden: frozenset[int]) -> None:
        self._parser, self._shown = parser or PlainText(), shown
        self._tokens = TokenTexts(words.token_bytes, hidden)
        self._open: Part | None = None
        self.parts: list[Part] = []
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.weight_versions: WeightVersions = ()

    def read(self, delta: OutputDelta) -> list[Step]:
        """Return the steps of a delta.

        Raises:
            ServeError: CANCELLED: the output was aborted.
        """
        if delta.finish_reason == FinishReason.ABORT:
            raise ServeError(Kind.CANCELLED, "the request was aborted")
        steps: list[Step] = []
        for text in self._tokens.texts(delta):
            self._follow(self._parser.feed(text), steps, cut=False)
        if delta.finish_reason is not None:
            self._finish(delta, steps)
        return steps

    @property
    def called(self) -> bool:
        """Whether a tool call is shown."""
        return any(part.kind == CALL for part in self.parts)

    def _finish(self, delta: OutputDelta, steps: list[Step]) -> None:
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.weight_versions = delta.weight_versions
        cut = delta.finish_reason != FinishReason.STOP
        self._follow(self._parser.finish(cut=cut), steps, cut=cut)
        self._close(steps, cut=cut)

    def _follow(self, events: Sequence[Event], steps: list[Step], *, cut: bool) -> None:
        for event in events:
            said = [] if isinstance(event, CallStart | CallEnd) else self._tokens.taken(event.text)
            if isinstance(event, Reasoning):
                self.reasoning_tokens += len(said)
            if self._shown.shows(event):
                self._step(event, [each.logprobs for each in said if each.logprobs is not None], steps, cut=cut)

    def _step(self, event: Event, logprobs: list[PositionLogprobs], steps: list[Step], *, cut: bool) -> None:
        match event:
            case CallStart(_, call_id, name):
                self._begin(CALL, steps, call_id, name)
            case CallEnd():
                self._close(steps, cut=cut)
            case Arguments(_, text):
                self._more(text, logprobs, steps)
            case Content(text) | Reasoning(text):
                kind = TEXT if isinstance(event, Content) else REASONING
                if self._open is None or self._open.kind != kind:
                    self._begin(kind, steps)
                self._more(text, logprobs, steps)

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], steps: list[Step], call_id: str = "", name: str = ""
    ) -> None:
        self._close(steps, cut=False)
        self._open = Part(kind, len(self.parts), call_id, name)
        self.parts.append(self._open)
        steps.append(Opened(self._open))

    def _more(self, text: str, logprobs: list[PositionLogprobs], steps: list[Step]) -> None:
        assert self._open is not None
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        if not (steps and isinstance(steps[-1], More)):
            steps.append(More(self._open, [], []))
        more = steps[-1]
        assert isinstance(more, More)
        more.texts.append(text)
        more.logprobs.extend(logprobs)

    def _close(self, steps: list[Step], *, cut: bool) -> None:
        if self._open is not None:
            self._open.cut, part, self._open = cut, self._open, None
            steps.append(Closed(part))
