"""`jaxinfer check-on-policy`: compare the log-probabilities that an engine serves with those of a training step."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence

from jaxinfer.agreement import Difference, Sample, Sequences, applied, requests, training_step
from jaxinfer.cli.app import run as run_command
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.llm import LLM
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared
from jaxinfer.lora.parts import random_adapter
from jaxinfer.opening import LOADING_ERRORS
from jaxinfer.outputs import RequestOutput
from jaxinfer.quant.banks import lora_targets
from jaxinfer.sampling_params import RequestError

_NAME = "check-on-policy"  # of the adapter


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a check.

    Attributes:
        forced: of `LLM.logprobs`, which forces the generated tokens.
        exact: of `Model.logprobs`; None: refused.
        applied: of `Model.apply`.
        refused: why by what: requests whose log-probabilities `Model.logprobs` does not reproduce.
        adapted: of `Model.logprobs` for requests with an adapter, which ``exact`` and ``applied`` exclude; None: there
            are none.
    """

    forced: Difference
    exact: Difference | None
    applied: Difference
    refused: dict[str, str]
    adapted: Difference | None = None

    @property
    def passed(self) -> bool:
        found = [each.largest for each in (self.forced, self.exact, self.adapted) if each is not None]
        return self.exact is not None and max(found) == 0


def samples_of(outputs: Iterable[RequestOutput]) -> Iterator[Sample]:
    """Yield the samples of outputs with ``logprobs``."""
    for output in outputs:
        for sample in output.outputs:
            logprobs = sample.arrays.logprobs
            assert logprobs is not None
            yield Sample(output.prompt_token_ids, sample.token_ids, logprobs.tolist())


def check(llm: LLM, sequences: int, max_tokens: int, seed: int = 0) -> Report:
    """Generate about ``sequences`` sequences, and compare their log-probabilities. If the engine serves adapters, every
    other request has one, with random arrays.

    Args:
        max_tokens: tokens that each sequence generates.
    """
    programs, model, adapter = llm.served_programs(), llm.model, _adapter_of(llm, seed)
    plain, adapted, forced = _generated(llm, sequences, max_tokens, seed, adapter)
    refused, exact, of_adapted = dict(programs.exceptions), None, None
    if (why := programs.refusal()) is not None:
        refused = {"all requests": why, **refused}
    else:
        exact = plain.difference(training_step(model, programs))
        of_adapted = None if adapter is None else adapted.difference(training_step(model, programs, adapter))
    return Report(forced, exact, plain.difference(applied(model)), refused, of_adapted)


def _adapter_of(llm: LLM, seed: int) -> Adapter | None:
    """Return a random adapter of all weights that the engine has banks for, of half the largest rank; None: there are
    no banks."""
    engine, specs = llm.engine.config, declared(llm.model)
    if not engine.lora_slots:
        return None
    rank = max(1, engine.max_lora_rank // 2)
    return random_adapter(lora_targets(specs, specs, rank, engine.lora_target_modules), seed)


def _generated(
    llm: LLM, sequences: int, max_tokens: int, seed: int, adapter: Adapter | None
) -> tuple[Sequences, Sequences, Difference]:
    """Run requests in one batch; return the sequences without the adapter, those with it, and the difference of
    `LLM.logprobs` for all."""
    prompts, params = requests(llm.engine.config, llm.model.config.vocab_size, sequences, max_tokens, seed)
    names = [None if adapter is None or number % 2 else _NAME for number in range(len(prompts))]
    if adapter is not None:
        llm.load_lora(_NAME, adapter)
    outputs = llm.generate(prompts, params, lora=names, progress=False)
    every = Sequences.of(samples_of(outputs))
    of_samples = [name for name, each in zip(names, params, strict=True) for _ in range(each.n)]
    forced = every.difference_from(llm.logprobs(*zip(*every.parts, strict=True), lora=of_samples))
    if adapter is not None:
        llm.unload_lora(_NAME)
    groups = ((output for output, name in zip(outputs, names, strict=True) if name == own) for own in (None, _NAME))
    plain, adapted = (Sequences.of(samples_of(group)) for group in groups)
    return plain, adapted, forced


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("check-on-policy", arguments)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if all log-probabilities are bitwise equal, 1 if not, or 2 with one sentence on stderr for an
    error."""
    try:
        with LLM(
            args.model,
            args.dtype,
            family=args.family,
            config=EngineConfig(**args.settings),
            check_finite=args.check_finite,
            compilation_cache_dir=args.compilation_cache_dir,
        ) as llm:
            report = check(llm, args.sequences, args.max_tokens, args.seed)
    except (*LOADING_ERRORS, EngineConfigError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(report)) if args.json else "\n".join(lines(report)))
    return 0 if report.passed else 1


def lines(report: Report) -> Iterator[str]:
    """Yield a report as text."""
    yield f"{'':16} {'tokens':>8} {'largest difference':>20} {'k3 KL':>12}"
    rows = {"LLM.logprobs": report.forced, "Model.logprobs": report.exact, "with an adapter": report.adapted}
    for name, found in {**rows, "Model.apply": report.applied}.items():
        if found is not None:
            yield f"{name:16} {found.tokens:8} {found.largest:20.3g} {found.kl:12.3g}"
    for what, why in report.refused.items():
        yield f"refused, {what}: {why}"


if __name__ == "__main__":
    sys.exit(main())
