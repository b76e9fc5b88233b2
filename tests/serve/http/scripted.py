"""A server whose model returns scripted answers, including special tokens, over the real scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxinfer.engine.core import EngineLoop, new_kv
from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.parsers.registry import Parsers, detect
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.settings import ServeConfig
from jaxinfer.structured.matcher import Vocabulary
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import LibraryBackend, SpecialIds, Tokenizer
from tests.serve.fake_engine import BOS, EOS, PAD, FakeEngine, FakeRunner, Mischief, fake_card, fake_library, resolved
from tests.serve.http.support import Running, listening

QWEN = """\
{%- if tools %}Call in <tool_call></tool_call>: {{ tools | tojson }}
{% endif %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
"""Template like Qwen3's: tools, reasoning, calls and their results, and a switch for thinking."""

SPECIAL = ("<think>", "</think>", "<|secret|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")


def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and `SPECIAL`."""
    library = fake_library()
    library.add_special_tokens(list(SPECIAL))
    return Tokenizer(LibraryBackend(library), SpecialIds(bos=BOS, eos=(EOS,), pad=PAD))


def vocabulary() -> Vocabulary:
    """Return the tokenizer's vocabulary for grammars."""
    tokens = tokenizer()
    spelt = [tokens.token_bytes(number) for number in range(tokens.vocab_size)]
    return Vocabulary(spelt, frozenset(tokens.special_ids), tokens.eos_ids, tokens.vocab_size)


class ScriptedRunner(FakeRunner):
    """Runs requests with scripted answers, in order of arrival."""

    def __init__(self, answers: Sequence[str], tokens: Tokenizer) -> None:
        super().__init__(Mischief(seconds=0.001))  # slow steps, so that a stream gets more than one delta
        self._answers = [[*tokens.encode(answer, add_special_tokens=False), EOS] for answer in answers]
        self._place: dict[str, int] = {}

    def _made_up(self, plan: StepPlan) -> StepResult:
        said = []
        for row in plan.decodes:
            request = row.sequence.request
            answer = self._answers[self._place.setdefault(request.request_id, len(self._place)) % len(self._answers)]
            first = row.position + 1 - len(request.prompt_token_ids)
            said.append([*answer, *[EOS] * plan.steps][first : first + plan.steps])
        made = super()._made_up(plan)
        return dataclasses.replace(made, tokens=said)


class ScriptedEngine(FakeEngine):
    """`FakeEngine` with a `ScriptedRunner`."""

    def __init__(self, runner: ScriptedRunner) -> None:
        super().__init__()
        engine, self._fake = resolved(), runner
        EngineLoop.__init__(self, engine, new_kv(engine), runner, vocabulary=vocabulary)


@contextlib.asynccontextmanager
async def speaker(
    *answers: str, parsers: Parsers | None = None, template: str = QWEN
) -> AsyncIterator[tuple[Frontend, AsyncEngine]]:
    """Yield a front end and its engine. ``parsers``: default: detected from the template."""
    tokens = tokenizer()
    parsers = detect(template) if parsers is None else parsers
    async with AsyncEngine(ScriptedEngine(ScriptedRunner(answers, tokens))) as backend:
        card = dataclasses.replace(fake_card(), vocab_size=tokens.vocab_size)
        yield Frontend(backend, card, tokens, ChatTemplate(template), parsers=parsers), backend


@contextlib.asynccontextmanager
async def speaking(*answers: str, reasoning_fields: Sequence[str] | None = None, **how: Any) -> AsyncIterator[Running]:
    """Yield an HTTP server. ``how``: see `speaker`."""
    fields: dict[str, Any] = {} if reasoning_fields is None else {"reasoning_fields": reasoning_fields}
    async with speaker(*answers, **how) as (frontend, backend):
        door = AppState("1.2.3", frontend=frontend, **fields)
        async with listening(ServeConfig(model="fake", http_port=0), door, frontend, backend) as running:
            yield running
