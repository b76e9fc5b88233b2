"""``python -m jaxinfer.gpu_check.greedy DTYPE TOKENS``: greedy tokens of the demo model, as one line of JSON.

Uses `LLM` if its packages are installed, else the engine with fixed token ids.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import time
from typing import Any

from jaxinfer.gpu_check import standins

DEMO = pathlib.Path(__file__).resolve().parents[2] / "jaxinfer" / "demo" / "target"
PROMPT = "ROMEO:\n"
PROMPT_IDS = (11, 23, 7, 42, 5, 31, 19, 64)
MAX_MODEL_LEN = 512
PREFILL_SIZES = (64,)  # one program to compile instead of three
NEEDED_BY_LLM = ("tokenizers", "sentencepiece", "jinja2", "huggingface_hub", "rich")


def missing_for_llm() -> list[str]:
    """Return the packages that `LLM` imports beyond JAX, Flax and numpy and that are not installed."""
    return [name for name in NEEDED_BY_LLM if importlib.util.find_spec(name) is None]


def with_llm(dtype: str, tokens: int) -> dict[str, Any]:
    from jaxinfer.llm import LLM
    from jaxinfer.sampling_params import SamplingParams

    llm = LLM(
        model="demo",
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2,
        prefill_sizes=PREFILL_SIZES,
        compilation_cache_dir="",
        show_progress=False,
    )
    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    (request,) = llm.generate(PROMPT, params)
    output = request.outputs[0]
    return {"prompt": PROMPT, "text": output.text, "token_ids": output.token_ids, "seconds": _since(start)}


def with_engine(dtype: str, tokens: int) -> dict[str, Any]:
    import jax

    from jaxinfer.config import EngineConfig
    from jaxinfer.engine.engine import Engine
    from jaxinfer.engine.execution.prepare import prepare
    from jaxinfer.models.model import abstract
    from jaxinfer.sampling_params import SamplingParams
    from jaxinfer.types import Request
    from jaxinfer.weights import load_params

    config_json = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    model = abstract(config_json, dtype)
    params = load_params(DEMO, model.specs, dtype, ignore=("lm_head.weight",) if model.config.tied else ())
    model = model.replace(params=params)
    settings = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=2, prefill_sizes=PREFILL_SIZES)
    engine = Engine(prepare(model, settings, jax.default_backend()))
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    engine.add(Request("demo", PROMPT_IDS, sampling))
    produced: list[int] = []
    while engine.has_work:
        produced += [token for delta in engine.step() for token in delta.token_ids]
    return {"prompt_ids": PROMPT_IDS, "token_ids": produced, "seconds": _since(start)}


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)


if __name__ == "__main__":
    standins.provide()
    generate = with_engine if missing_for_llm() else with_llm
    print(json.dumps(generate(sys.argv[1], int(sys.argv[2]))))
