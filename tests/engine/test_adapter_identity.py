"""Requests with and without adapters in mixed batches are bitwise identical to their runs alone, in every mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.lora.door import LoRARequest
from jaxinfer.models.model import Model
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_identity import MODES, ROOMY, SETTINGS, Requests, check_mode, make_requests, run
from tests.fakes import random_model
from tests.lora.drawn import drawn

NAMES = ("pirate", None, "poet", "clerk")
MODULES = ("all-linear", "embed_tokens", "lm_head")
LORAS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "lora_target_modules": MODULES}
FAST = ("full batch", "swapped", "drafts, recomputed")


class Adapted(LLM):
    """An LLM that assigns adapters by the seed of a request: three adapters, two of them resident."""

    def generate(self, prompts: Any, sampling_params: Any = None, **_: Any) -> list[RequestOutput]:
        return super().generate(prompts, sampling_params, lora=[request(params) for params in sampling_params])


def request(params: SamplingParams) -> LoRARequest | None:
    assert params.seed is not None
    name = NAMES[params.seed % len(NAMES)]
    return None if name is None else LoRARequest(name, name)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch adapter loading: the folder name determines the adapter (`drawn`)."""
    monkeypatch.setattr(
        "jaxinfer.lora.open.read_adapter", lambda folder, specs, **_: drawn(specs, folder.name, modules=MODULES)
    )


@functools.cache
def tiny() -> tuple[Model, Requests]:
    model = random_model()
    return model, make_requests(40, model.config.vocab_size)


@functools.cache
def alone() -> list[Any]:
    """Return the results of each request alone, the prefix cache reset in between."""
    model, requests = tiny()
    llm, results = Adapted(model, num_pages=ROOMY, **SETTINGS, **LORAS), []
    for each in requests:
        results += run(llm, [each])
        llm.engine.reset_prefix_cache()
    return results


@pytest.mark.parametrize("mode", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_every_mode_gives_the_bits_of_each_request_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny()
    changes, happened = MODES[mode]
    if mode.endswith("swapped"):
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    model = model.replace(draft=random_model(seed=1, num_hidden_layers=1))
    llm = Adapted(model, **{**SETTINGS, **LORAS, "num_pages": ROOMY, **changes})
    check_mode(llm, requests, alone(), happened)
    assert llm.engine.stats().loras.loads > 2


def test_those_without_have_the_bits_of_an_engine_without_adapters() -> None:
    model, requests = tiny()
    plain = [each for each in requests if request(each[1]) is None]
    assert len(plain) > 5
    llm = LLM(model, num_pages=ROOMY, **SETTINGS)
    with count_compilations() as compilations:
        found = [run(llm, [each])[0] for each in plain]
    assert compilations.count == 0
    assert found == [bits for each, bits in zip(requests, alone(), strict=True) if request(each[1]) is None]
