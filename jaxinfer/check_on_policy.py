"""`jaxinfer check-on-policy`: compare the log-probabilities that an engine serves with those of a training step."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

from jaxinfer.agreement import Difference, Sample, Sequences, applied, requests, training_step
from jaxinfer.cli.app import run as run_command
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.llm import LLM
from jaxinfer.loading import LOADING_ERRORS
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import RequestError


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a check.

    Attributes:
        forced: of `LLM.logprobs`, which forces the generated tokens.
        exact: of `Model.logprobs`; None: refused.
        applied: of `Model.apply`.
        refused: why by what: requests whose log-probabilities `Model.logprobs` does not reproduce.
    """

    forced: Difference
    exact: Difference | None
    applied: Difference
    refused: dict[str, str]

    @property
    def passed(self) -> bool:
        return self.exact is not None and self.forced.largest == self.exact.largest == 0


def samples_of(outputs: Sequence[RequestOutput]) -> Iterator[Sample]:
    """Yield the samples of outputs with ``logprobs``."""
    for output in outputs:
        for sample in output.outputs:
            logprobs = sample.arrays.logprobs
            assert logprobs is not None
            yield Sample(output.prompt_token_ids, sample.token_ids, logprobs.tolist())


def check(llm: LLM, sequences: int, max_tokens: int, seed: int = 0) -> Report:
    """Generate about ``sequences`` sequences, and compare their log-probabilities.

    Args:
        max_tokens: tokens that each sequence generates.
    """
    programs, model = llm.served_programs(), llm.model
    prompts, params = requests(llm.engine.config, model.config.vocab_size, sequences, max_tokens, seed)
    generated = Sequences.of(samples_of(llm.generate(prompts, params, progress=False)))
    forced = generated.difference_from(llm.logprobs(*zip(*generated.parts, strict=True)))
    refused, exact = dict(programs.exceptions), None
    if (why := programs.refusal()) is not None:
        refused = {"all requests": why, **refused}
    else:
        exact = generated.difference(training_step(model, programs))
    return Report(forced, exact, generated.difference(applied(model)), refused)


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
    rows = {"LLM.logprobs": report.forced, "Model.logprobs": report.exact, "Model.apply": report.applied}
    for name, found in rows.items():
        if found is not None:
            yield f"{name:16} {found.tokens:8} {found.largest:20.3g} {found.kl:12.3g}"
    for what, why in report.refused.items():
        yield f"refused, {what}: {why}"


if __name__ == "__main__":
    sys.exit(main())
