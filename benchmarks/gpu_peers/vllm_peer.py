"""vLLM as a peer: its defaults, except for the settings that all engines share; deltas, as users of jaxinfer get."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.gpu_peers.drive import drive
from benchmarks.gpu_peers.loads import Load
from benchmarks.peers.protocol import Reply, answer


class VLLM:
    """`LLMEngine` that is stepped by the caller; the engine core is a process of its own, as is vLLM's default."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._runs = 0

    def load(self, config: dict[str, Any], settings: dict[str, Any], folder: str = "") -> Reply:
        """Load ``folder``, or random weights of ``config`` without one."""
        start = time.perf_counter()
        llm = LLM(
            model=folder or _folder_of(config),
            load_format="auto" if folder else "dummy",
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            seed=0,
            enable_prefix_caching=False,
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            gpu_memory_utilization=settings["gpu_memory_utilization"],
        )
        self._engine = llm.llm_engine
        return {"engine_seconds": round(time.perf_counter() - start, 2)}

    def run(self, load: dict[str, Any], seed: str, vocab: int, rate: float | None) -> Reply:
        given = Load(**load)
        self._runs += 1
        stepped = _Stepped(self._engine, f"{self._runs}")
        return drive(stepped, given, given.prompts(seed, vocab), given.due(seed, rate))

    def generate(self, prompt: list[int], output: int) -> Reply:
        """Return the greedy tokens of one prompt."""
        self._engine.add_request("check", {"prompt_token_ids": prompt}, _greedy(output))
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for made in self._engine.step():
                tokens += made.outputs[0].token_ids
        return {"tokens": tokens}


class _Stepped:
    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self._name = engine, name

    def add(self, request: int, prompt: Sequence[int], output: int) -> None:
        self._engine.add_request(f"{self._name}-{request}", {"prompt_token_ids": list(prompt)}, _greedy(output))

    def step(self) -> Iterable[tuple[int, int]]:
        # vLLM may append a suffix to a request id
        return [(int(made.request_id.split("-")[1]), len(made.outputs[0].token_ids)) for made in self._engine.step()]

    @property
    def has_work(self) -> bool:
        return self._engine.has_unfinished_requests()


def _greedy(output: int) -> SamplingParams:
    kind = RequestOutputKind.DELTA
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=kind)


def _folder_of(config: dict[str, Any]) -> str:
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    peer = VLLM()
    answer({"vllm": vllm.__version__}, {"load": peer.load, "run": peer.run, "generate": peer.generate})
