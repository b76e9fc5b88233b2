"""An engine without a device: the real scheduler and page allocator, with tokens by a deterministic rule.

Output ``index`` of a request cycles through the bytes of `TEXT` from an offset that depends on prompt, seed and index
(`start`). A token is a byte (`FIRST_BYTE` + its value), so characters may span several tokens. `expected_tokens`,
`expected_text` and `expected_logprobs` give the expected output. No jax.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.config import EngineConfig, ResolvedEngine, resolve
from jaxinfer.config.images import ImageNeeds
from jaxinfer.engine.core import EngineLoop, new_kv
from jaxinfer.engine.scheduling.plan import PrefillPlan, StepPlan, StepResult
from jaxinfer.lora.store import LoRAStore
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import LibraryBackend, SpecialIds, Tokenizer
from jaxinfer.types import CacheSpec, LayerSpec, PositionLogprobs, TokenLogprob

TEXT = "The naïve fox — 狐 — jumps over 3 lazy dogs. 🦊👩‍🚀 Ça va? " * 3
BYTES = TEXT.encode()
BOS, EOS, PAD, FIRST_BYTE = 0, 1, 2, 3
VOCAB = FIRST_BYTE + 256
OVERFLOWS = FIRST_BYTE + ord("!")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a] {% endif %}"
)

# Capacity for 256 sequences and more; tests with many clients set larger values.
DEFAULTS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "page_size": 16,
    "num_pages": 4096,
    "prefill_sizes": (32, 128),
    "swap_space_gib": 0.0,
}


def start(prompt: Sequence[int], seed: int, index: int) -> int:
    """Return the offset in `BYTES` at which an output begins."""
    return (sum(prompt) + len(prompt) + 7 * seed + 11 * index) % len(BYTES)


def expected_token(prompt: Sequence[int], seed: int, index: int, i: int, eos_after: int | None = None) -> int:
    """Return token ``i`` of output ``index``: a byte of the text, or EOS at index ``eos_after``."""
    if i == eos_after:
        return EOS
    return FIRST_BYTE + BYTES[(start(prompt, seed, index) + i) % len(BYTES)]


def expected_tokens(
    prompt: Sequence[int], seed: int, index: int, count: int, eos_after: int | None = None
) -> list[int]:
    """Return the first ``count`` tokens of an output that does not end earlier."""
    return [expected_token(prompt, seed, index, i, eos_after) for i in range(count)]


def expected_text(prompt: Sequence[int], seed: int, index: int, count: int) -> str:
    """Return the text of these tokens; incomplete characters become U+FFFD."""
    return bytes(t - FIRST_BYTE for t in expected_tokens(prompt, seed, index, count)).decode(errors="replace")


def expected_logprobs(token: int, position: int, top: int) -> PositionLogprobs:
    """Return the logprobs of a token at a position of the sequence: it ranks first, and its successors follow."""
    best = -(1 + position % 8) / 4
    ranked = tuple(TokenLogprob((token + k) % VOCAB, best - k / 4, 1 + k) for k in range(top))
    return PositionLogprobs(TokenLogprob(token, best, 1), ranked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mischief:
    """Faults and delays of the fake engine. Steps count from 1; empty plans are not counted.

    Attributes:
        seconds: duration of every step.
        fault_at: step that raises `ZeroDivisionError`.
        hang_at: step that does not return until `FakeEngine.release` is called.
        eos_after: index at which every output has EOS.
        overflow_after: index at which an output has non-finite logits, if `OVERFLOWS` is in its prompt.
    """

    seconds: float = 0.0
    fault_at: int | None = None
    hang_at: int | None = None
    eos_after: int | None = None
    overflow_after: int | None = None


class FakeRunner:
    """Runs plans without a device, with the results of `expected_tokens` and `expected_logprobs`.

    Attributes:
        steps: number of plans run.
        released: event that lets a hung step continue.
    """

    def __init__(self, mischief: Mischief) -> None:
        self.steps, self.released = 0, threading.Event()
        self._mischief = mischief

    def launch(self, plan: StepPlan) -> StepPlan | None:
        return plan or None

    def read(self, launched: StepPlan | None) -> StepResult | None:
        if launched is None:
            return None
        self.steps += 1
        if self._mischief.seconds:
            time.sleep(self._mischief.seconds)
        if self.steps == self._mischief.hang_at:
            self.released.wait()
        if self.steps == self._mischief.fault_at:
            raise ZeroDivisionError(f"the fake engine's fault in step {self.steps}")
        return self._made_up(launched)

    def _made_up(self, plan: StepPlan) -> StepResult:
        tokens, logprobs = [], []
        for row in plan.decodes:
            sequence = row.sequence
            prompt, params = sequence.request.prompt_token_ids, sequence.params
            assert params.seed is not None
            first, at = row.position + 1 - len(prompt), row.position + 1
            new = [
                expected_token(prompt, params.seed, sequence.index, first + k, self._mischief.eos_after)
                for k in range(plan.steps)
            ]
            if self._mischief.overflow_after in range(first, first + plan.steps) and OVERFLOWS in prompt:
                new[self._mischief.overflow_after - first] = -1
            tokens.append(new)
            top = params.logprobs
            logprobs.append(() if top is None else [expected_logprobs(t, at + k, top) for k, t in enumerate(new)])
        return StepResult(plan, tokens, logprobs, [_prompt_logprobs(prefill) for prefill in plan.prefills])


class FakeEngine(EngineLoop):
    """The real engine loop around a `FakeRunner`. Seeds of requests without one count from 1000, or ``seed``.

    Args:
        loras: adapters that requests may name; outputs do not depend on them.
        runner: runs the plans.
        images: of a vision tower, see `tests.serve.vision`; outputs do not depend on images.
        settings: fields of `EngineConfig`, on top of `DEFAULTS`.
    """

    def __init__(
        self,
        mischief: Mischief = Mischief(),
        *,
        loras: LoRAStore | None = None,
        runner: FakeRunner | None = None,
        images: ImageNeeds | None = None,
        **settings: Any,
    ) -> None:
        engine, self._fake = resolved(images, **settings), runner or FakeRunner(mischief)
        super().__init__(engine, new_kv(engine), self._fake, loras=loras)
        self._new_seed = itertools.count(1000 if engine.seed is None else engine.seed).__next__

    @property
    def steps(self) -> int:
        """Number of plans run."""
        return self._fake.steps

    def release(self) -> None:
        """Let a hung step continue."""
        self._fake.released.set()


def _prompt_logprobs(prefill: PrefillPlan) -> list[PositionLogprobs]:
    top = prefill.sequence.params.prompt_logprobs
    if not prefill.logprobs or top is None:
        return []
    first, prompt = prefill.chunk.start + 1, prefill.sequence.request.prompt_token_ids
    return [expected_logprobs(prompt[at], at, top) for at in range(first, first + prefill.chunk.length)]


def resolved(images: ImageNeeds | None = None, **settings: Any) -> ResolvedEngine:
    """Resolve `EngineConfig` settings, on top of `DEFAULTS`, for the fake engine."""
    config = EngineConfig(**{**DEFAULTS, **settings})
    return resolve(
        config, CacheSpec((LayerSpec(),), kv_heads=1, head_dim=8), max_position=1 << 20, itemsize=4, images=images
    )


# ---- tokenizer, template and model card


def fake_library() -> Library:
    """Return a tokenizer of three special tokens and the 256 bytes, without merges."""
    alphabet = _byte_characters()
    vocab = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    vocab |= {alphabet[byte]: FIRST_BYTE + byte for byte in range(256)}
    library = Library(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>", "<pad>"])
    return library


def fake_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and without BOS."""
    return Tokenizer(LibraryBackend(fake_library()), SpecialIds(bos=BOS, eos=(EOS,), pad=PAD))


def fake_template() -> ChatTemplate:
    """Return a template with one line ``[user] Hi`` per message, and ``[a] `` for the answer."""
    return ChatTemplate(TEMPLATE)


def fake_card(engine: ResolvedEngine | None = None, name: str = "fake") -> ModelCard:
    """Return the card of the model that `FakeEngine` serves."""
    engine = resolved() if engine is None else engine
    return ModelCard(
        name=name,
        architecture="FakeForCausalLM",
        dtype="float32",
        max_model_len=engine.max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=[EOS],
        defaults={},
        engine=dataclasses.asdict(engine),
        created=1,
    )


def write_fake_folder(folder: pathlib.Path) -> pathlib.Path:
    """Write the files that `Tokenizer.load` and `ChatTemplate.load` read to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    fake_library().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": false}'
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _byte_characters() -> dict[int, str]:
    """Return GPT-2's printable character for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + k) for k, byte in enumerate(rest)}
