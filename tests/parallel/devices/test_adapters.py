"""Adapters over meshes: as `apply` says, neighbours' and the model's own bits untouched, nothing compiled for them."""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.execution.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.door import LoRARequest
from jaxinfer.lora.merge import declared
from jaxinfer.models.model import Model
from jaxinfer.quant.banks import lora_targets
from jaxinfer.types import ParamTree
from tests.engine.test_invariance import bits
from tests.lora.test_served import asked, check_is_apply
from tests.parallel.devices.test_tensor import model_of

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 64,
    "page_size": 4,
    "prefill_sizes": (16,),
    "max_prefill_rows": 1,
    "num_pages": 80,
    "show_progress": False,
    "structured_output_helpers": 0,
}
RANK = 4
LORAS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
NAMES = ("pirate", None, "poet", "pirate", "clerk", None, "poet", "clerk")


def drawn(specs: ParamTree, name: str) -> Adapter:
    """An adapter of every weight that can have one, with magnitudes and biases, from its name."""
    rng, deltas = np.random.default_rng(zlib.crc32(name.encode())), {}
    for path, target in lora_targets(specs, specs, RANK).items():
        arrays = {kind: rng.normal(0, 0.1, shape).astype(np.float32) for kind, shape in target.shapes.items()}
        arrays["magnitude"] += 1.0
        deltas[path] = Delta(**arrays)
    return Adapter(name, RANK, deltas)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are names: what would be read there is `drawn`."""
    monkeypatch.setattr("jaxinfer.lora.open.read_adapter", lambda folder, specs, **_: drawn(specs, folder.name))


def request(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, name)


@functools.cache
def model(kind: str) -> Model:
    return model_of(kind, intermediate_size=32, hidden_size=32, num_attention_heads=8, num_hidden_layers=2)


def check(base: Model, **sizes: Any) -> None:
    """Eight requests with three adapters, of which two have room, against `apply`, alone, and without any."""
    prompts, params = asked(base, len(NAMES))
    plain = LLM(base, **SETTINGS, **sizes).generate(prompts, params)
    llm = LLM(base, **LORAS, **SETTINGS, **sizes)
    with count_compilations() as compilations:
        mixed = llm.generate(prompts, params, lora=[request(name) for name in NAMES])
        llm.engine.reset_prefix_cache()
        alone = [llm.generate([prompts[at]], [params[at]], lora=request(NAMES[at]))[0] for at in (0, 2, 4)]
    assert compilations.count == 0
    llm.engine.check()
    for name, prompt, output in zip(NAMES, prompts, mixed, strict=True):
        check_is_apply(base if name is None else adapted(base, name), prompt, output)
    assert [bits(each) for each in alone] == [bits(mixed[at]) for at in (0, 2, 4)]
    assert [bits(mixed[at]) for at in (1, 5)] == [bits(plain[at]) for at in (1, 5)]
    assert bits(mixed[0]) != bits(plain[0])
    check_reload(llm, base, prompts[0], params[0])


def adapted(base: Model, name: str) -> Model:
    return base.with_lora(drawn(declared(base), name))


def check_reload(llm: LLM, base: Model, prompt: list[int], params: Any) -> None:
    """A name that is loaded again means the new content, while requests run with the old one; then it means nothing."""
    llm.load_lora("actor", "first")
    with count_compilations() as compilations:
        run = llm.generate([prompt], [params], lora="actor")
        llm.load_lora("actor", "second")
        again = llm.generate([prompt], [params], lora="actor")
        llm.unload_lora("actor")
    assert compilations.count == 0
    check_is_apply(adapted(base, "first"), prompt, run[0])
    check_is_apply(adapted(base, "second"), prompt, again[0])


MESHES: Mapping[str, tuple[str, dict[str, int]]] = {
    "tp2": ("biases", {"tensor_parallel_size": 2}),
    "tp4, few KV heads": ("few KV heads", {"tensor_parallel_size": 4}),
    "pp2": ("groups", {"pipeline_parallel_size": 2}),
    "tp2 x pp2": ("groups", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "ep2": ("experts", {"expert_parallel_size": 2}),
    "ep2 x tp2": ("experts", {"expert_parallel_size": 2, "tensor_parallel_size": 2}),
    "dp2": ("groups", {"data_parallel_size": 2}),
}
FAST = ("tp4, few KV heads", "pp2", "ep2 x tp2")


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MESHES]
)
def test_each_says_what_apply_says(mesh: str) -> None:
    kind, sizes = MESHES[mesh]
    check(model(kind), **sizes)
