"""The process in which Hugging Face's transformers generates, for ``jaxinfer bench --backend transformers``.

It may have another Python than jaxinfer, so it imports nothing of it. Each line of standard input is a question in
JSON, answered by a line of standard output: for versions (an empty one), to load a ``model``, or to generate for
``prompts``.
"""

import json
import os
import sys
import time
from typing import Any

try:
    import torch  # noqa: TID251 only this process has it
    import transformers
except ImportError as error:  # the parent says what to do
    torch = transformers = None
    missing = str(error)


class _Ticks:
    """A stopping criterion that never stops, and notes the time of each step."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - self.start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load(asked: dict[str, Any]) -> Any:
    """Return the model of a folder, in ``asked["dtype"]``, on the first GPU if there is one."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, asked["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=dtype).to(place).eval()
    if asked["ignore_eos"]:
        model.generation_config.eos_token_id = None
    return model


def generate(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Generate in batches of ``asked["batch_size"]`` prompts, and return seconds and times of all requests."""
    torch.manual_seed(asked["seed"])
    start = time.perf_counter()
    deliveries: list[list[list[float]]] = []
    finishes: list[str] = []
    for first in range(0, len(asked["prompts"]), asked["batch_size"]):
        part = slice(first, first + asked["batch_size"])
        times, lengths = _batch(model, asked["prompts"][part], asked["output_lens"][part], asked["temperature"], start)
        wanted = asked["output_lens"][part]
        deliveries += [[[each, 1] for each in times[:length]] for length in lengths]
        finishes += ["length" if length == most else "stop" for length, most in zip(lengths, wanted, strict=True)]
    return {"seconds": time.perf_counter() - start, "deliveries": deliveries, "finishes": finishes}


def _batch(
    model: Any, prompts: list[list[int]], wanted: list[int], temperature: float, start: float
) -> tuple[list[float], list[int]]:
    """Generate one batch, padded on the left; return the time of each step, and the tokens of each output."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=model.device)
    ticks = _Ticks(start)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    found = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max(wanted),
        pad_token_id=0,
        stopping_criteria=transformers.StoppingCriteriaList([ticks]),
        **sampling,
    )
    ends = model.generation_config.eos_token_id
    ends = set([ends] if isinstance(ends, int) else ends or [])
    rows = found[:, width:].tolist()
    lengths = [next((n + 1 for n, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return ticks.times, [min(pair) for pair in zip(lengths, wanted, strict=True)]


def answer(asked: dict[str, Any], model: Any) -> tuple[dict[str, Any], Any]:
    """Answer one question; return the answer and the model, which is None until it is loaded."""
    if torch is None:
        return {"missing": missing}, None
    if "prompts" in asked:
        with torch.inference_mode():
            return generate(model, asked), model
    if "model" in asked:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model = load(asked)
        return {"device": str(model.device)}, model
    return {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}, None


def main() -> None:
    """Answer each line of standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    model = None
    for line in sys.stdin:
        try:
            told, model = answer(json.loads(line), model)
        except Exception as error:  # noqa: BLE001 - process boundary: the parent has the sentence
            told = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
