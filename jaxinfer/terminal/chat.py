"""`jaxinfer chat`: a conversation at the terminal, or over the lines of a pipe."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import threading
import time
from typing import Any

from jaxinfer.cli.interrupts import stopping
from jaxinfer.images.processor import ImageError
from jaxinfer.images.source import picture_of
from jaxinfer.llm import LLM
from jaxinfer.opening import model_folder
from jaxinfer.outputs import Delta
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.terminal.start import in_one_sentence, start
from jaxinfer.text import TemplateError, load_template

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 importing it adds history and editing to input()

HELP = """/system TEXT  start over with TEXT as the system message
/image FILE   show an image with the next message
/clear        start over
/exit         end the conversation (or Ctrl-D)
/help         list the commands
Ctrl-C stops an answer; at the prompt it ends the conversation."""


class StoppedError(Exception):
    """The user stopped the answer."""


@dataclasses.dataclass
class Answer:
    """An answer that is printed while it is generated, until ``stop`` is set."""

    stop: threading.Event
    text: str = ""
    tokens: int = 0
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def take(self, delta: Delta) -> None:
        self.text, self.tokens = self.text + delta.text, self.tokens + len(delta.token_ids)
        print(delta.text, end="", flush=True)
        if self.stop.is_set():
            raise StoppedError

    def stats(self, seed: int | None) -> str:
        seconds = time.perf_counter() - self.began
        what = "stopped" if seed is None else f"seed {seed}"
        return f"{self.tokens} tokens, {self.tokens / seconds:.1f} tokens/s, {what}"


class Conversation:
    """Message history of a conversation, which begins with the system message, if there is one.

    Args:
        lora: name of the adapter that answers.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, stats: bool, lora: str | None = None
    ) -> None:
        self._llm, self._params, self._stats, self._lora = llm, params, stats, lora
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._images: list[dict[str, Any]] = []

    def say(self, line: str) -> bool:
        """Answer a line, or run its command; return whether the conversation continues.

        Raises:
            RequestError, TemplateError: it cannot be answered; the conversation is unchanged.
        """
        if line in ("/exit", "/bye", "/quit"):
            return False
        if line.startswith("/"):
            self._command(*line.partition(" ")[::2])
        elif line:
            content = [*self._images, {"type": "text", "text": line}] if self._images else line
            self._answer([*self._messages, {"role": "user", "content": content}])
            self._images = []
        return True

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "/clear":
                self._begin(self._system)
            case "/system":
                self._begin(rest.strip() or None)
            case "/image":
                self._show(rest.strip())
            case "/help":
                print(HELP, file=sys.stderr)
            case _:
                print(f"{name} is not a command: /help lists them", file=sys.stderr)

    def _show(self, file: str) -> None:
        """Add an image to the next message.

        Raises:
            RequestError: it cannot be read, or the model reads text only.
        """
        if self._llm.model.vision is None:
            raise RequestError("/image", "is not known: the model reads text only")
        try:
            self._images.append({"type": "image", "image": picture_of(file)})
        except ImageError as error:
            raise RequestError("/image", f": {error}") from error

    def _answer(self, asked: list[dict[str, Any]]) -> None:
        """Print the answer while it is generated. A stopped answer stays in the conversation up to that point."""
        seed = None
        with stopping() as stop:
            answer = Answer(stop)
            with contextlib.suppress(StoppedError):
                seed = self._llm.chat(asked, self._params, lora=self._lora, on_delta=answer.take)[0].seed
        print()
        self._messages = [*asked, {"role": "assistant", "content": answer.text}]
        if self._stats:
            print(answer.stats(seed), file=sys.stderr)


@in_one_sentence
def run(args: argparse.Namespace) -> None:
    """Run the conversation until the end of the input."""
    converse(args)


def converse(args: argparse.Namespace) -> None:
    """Load a model and run a conversation with it.

    Raises:
        LoRAError: its adapter cannot be read.
        RequestError: the model has no chat template; or a line of a pipe cannot be answered. At a terminal that is only
            printed, and the conversation continues.
    """
    if load_template(model_folder(args.model), args.chat_template) is None:
        raise RequestError(None, f"the model {args.model!r} has no chat template: jaxinfer generate continues texts")
    llm, params = start(args, 1)
    conversation = Conversation(llm, params, args.system, args.stats, _adapter(llm, args))
    typed = sys.stdin.isatty()
    if typed:
        print("Type a message; /help lists commands, Ctrl-D ends the conversation.", file=sys.stderr)
    going = True
    while going and (line := _read_line(typed)) is not None:
        try:
            going = conversation.say(line.strip())
        except (RequestError, TemplateError) as error:
            if not typed:
                raise
            print(f"error: {error}", file=sys.stderr)


def _adapter(llm: LLM, args: argparse.Namespace) -> str | None:
    """Load the adapter given to `jaxinfer generate`, and return its name."""
    given: list[tuple[str, str]] = getattr(args, "lora", [])
    if len(given) > 1:
        raise RequestError("lora", f": {len(given)} given for one conversation")
    for name, path in given:
        llm.load_lora(name, path)
        return name
    return None


def _read_line(typed: bool) -> str | None:
    try:
        return input("> " if typed else "")
    except EOFError:
        return None
