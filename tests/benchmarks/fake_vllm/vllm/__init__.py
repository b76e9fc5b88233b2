"""As much of vLLM as its peer uses: every step gives each request one more token, its number modulo 50."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.0"


class LLM:
    def __init__(self, model: str, **settings: Any) -> None:
        assert settings["load_format"] in ("dummy", "auto")
        assert settings["enable_prefix_caching"] is False
        self.llm_engine = _Engine()


class _Engine:
    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> str:
        assert params.settings["ignore_eos"]
        assert prompt["prompt_token_ids"]
        self._left[request_id] = params.settings["max_tokens"]
        return request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[SimpleNamespace]:
        made = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[left % 50])])
            for name, left in self._left.items()
        ]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        return made
