"""PyTorch without an engine as a peer: static batches, static KV cache, cuBLAS, SDPA, decoding as one CUDA graph."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_peers.loads import Load
from benchmarks.gpu_peers.timeline import Timeline
from benchmarks.gpu_peers.torch_llama import Llama, tensors_of
from benchmarks.peers.checkpoint import read_config
from benchmarks.peers.protocol import Reply, answer

_TOKENS_AT_ONCE = 8192  # prompt tokens of one forward pass

Step = Callable[[Tensor, int], Tensor]


class Torch:
    """Static batching with `Llama`: at most ``max_num_seqs`` requests; the next batch waits until this one ends."""

    def __init__(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._most = 0
        self._model: Llama | None = None

    def load(self, config: dict[str, Any], settings: dict[str, Any], folder: str = "") -> Reply:
        """Load ``folder``, or random weights of ``config`` without one."""
        start = time.perf_counter()
        self._most = settings["max_num_seqs"]
        dtype = getattr(torch, settings["dtype"])
        with torch.inference_mode():
            if folder:
                path = pathlib.Path(folder)
                self._model = Llama(read_config(path), tensors_of(path), dtype, self._device)
            else:
                self._model = Llama(config, None, dtype, self._device)
        self._wait()
        return {"engine_seconds": round(time.perf_counter() - start, 2)}

    def run(self, load: dict[str, Any], seed: str, vocab: int, rate: float | None) -> Reply:
        """Run a load. Raises ``ValueError`` for requests that do not arrive all at once."""
        given = Load(**load)
        if rate is not None:
            raise ValueError("a static batch has no arrivals")
        prompts = torch.tensor(given.prompts(seed, vocab), device=self._device)
        step = self._prepare(min(self._most, given.requests), given.prompt + given.output)
        timeline = Timeline(given.due(seed, None))
        for first in range(0, given.requests, self._most):
            self._batch(prompts[first : first + self._most], given.output, step, timeline, first)
        return timeline.figures(given.output)

    def generate(self, prompt: list[int], output: int) -> Reply:
        """Return the greedy tokens of one prompt."""
        tokens = torch.tensor([prompt], device=self._device)
        step = self._prepare(1, len(prompt) + output)
        return {"tokens": self._batch(tokens, output, step, Timeline([0.0]), 0)[0].tolist()}

    @torch.inference_mode()
    def _batch(self, prompts: Tensor, output: int, step: Step, timeline: Timeline, name: int) -> Tensor:
        """Decode prompts ``[batch, time]``; their request numbers start at ``name``. Returns ``[batch, output]``."""
        assert self._model is not None
        batch, length = prompts.shape
        at_once = max(1, _TOKENS_AT_ONCE // length)
        found = []
        for first in range(0, batch, at_once):
            part = prompts[first : first + at_once]
            found.append(self._model.prefill(part, first).argmax(-1, keepdim=True))
            self._wait()
            for at in range(len(part)):
                timeline.add(name + first + at, 1)
        tokens = [torch.cat(found)]
        for place in range(length, length + output - 1):
            tokens.append(step(tokens[-1], place).clone())
            self._wait()
            for at in range(batch):
                timeline.add(name + at, 1)
        return torch.cat(tokens, dim=1)

    @torch.inference_mode()
    def _prepare(self, batch: int, length: int) -> Step:
        """Build a step of ``batch`` sequences (fewer are padded): tokens ``[batch, 1]``, position -> next tokens."""
        assert self._model is not None
        model = self._model
        model.reserve(batch, length)
        tokens = torch.zeros(batch, 1, dtype=torch.long, device=self._device)
        place = torch.zeros(1, dtype=torch.long, device=self._device)

        def once() -> Tensor:
            return model.decode(tokens, place).argmax(-1, keepdim=True)

        replay, result = self._captured(once)

        def step(given: Tensor, at: int) -> Tensor:
            tokens[: len(given)].copy_(given)
            place.fill_(at)
            return replay(result)[: len(given)]

        return step

    def _captured(self, once: Callable[[], Tensor]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Capture ``once`` as a CUDA graph; return its replay and its output tensor. Without a GPU, run ``once``."""
        result = once()
        if self._device == "cpu":
            return lambda _: once(), result
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            once()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = once()

        def replay(written: Tensor) -> Tensor:
            graph.replay()
            return written

        return replay, result

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    peer = Torch()
    answer({"torch": torch.__version__}, {"load": peer.load, "run": peer.run, "generate": peer.generate})
