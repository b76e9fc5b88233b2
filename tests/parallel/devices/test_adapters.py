"""Adapters on meshes: results match `apply`, other rows and the base model keep their bits, nothing is compiled."""

import collections
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.door import LoRARequest
from jaxinfer.lora.merge import declared
from jaxinfer.models.model import Model
from jaxinfer.quant.banks import ALL_LINEAR, weight_path
from jaxinfer.quant.layouts import Grouped
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_invariance import bits
from tests.lora.drawn import drawn
from tests.lora.goldens import GOLDENS, golden, load_base, read
from tests.lora.test_served import asked, check_is_apply
from tests.parallel.devices.test_families import NORMS, load
from tests.parallel.devices.test_quantised import stored
from tests.parallel.devices.test_tensor import COLLECTIVES, model_of

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
VOCABULARY = (ALL_LINEAR, "embed_tokens", "lm_head")
WORDS = ("wordy", None, "poet", "wordy", "wordless", None, "poet", "wordless")  # some adapt `VOCABULARY`


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the reader: folders are names, and their contents are `drawn`."""

    def read(folder: pathlib.Path, specs: Any, **_: Any) -> Adapter:
        return drawn(specs, folder.name, RANK, modules_of(folder.name))

    monkeypatch.setattr("jaxinfer.lora.open.read_adapter", read)


def modules_of(name: str) -> tuple[str, ...]:
    """Return the modules that an adapter changes, by its name."""
    return VOCABULARY if name.startswith("word") else (ALL_LINEAR,)


def request(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, name)


@functools.cache
def model(kind: str) -> Model:
    return model_of(kind, intermediate_size=32, hidden_size=32, num_attention_heads=8, num_hidden_layers=2)


def of_two_lengths(base: Model) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of one chunk and of two: each length costs `apply` a program."""
    prompts, params = asked(base, len(NAMES))
    rng = np.random.default_rng(1)
    return [rng.integers(0, base.config.vocab_size, 11 + 12 * (at % 2)).tolist() for at in range(len(prompts))], params


def check(base: Model, names: Sequence[str | None] = NAMES, **sizes: Any) -> LLM:
    """Run eight requests with three adapters in two slots; compare with `apply`, single requests, and no LoRA."""
    prompts, params = of_two_lengths(base)
    plain = LLM(base, **SETTINGS, **sizes).generate(prompts, params)
    modules = tuple(dict.fromkeys(module for name in names for module in modules_of(name or "")))
    llm = LLM(base, **LORAS, **SETTINGS, **sizes, lora_target_modules=modules)
    with count_compilations() as compilations:
        mixed = llm.generate(prompts, params, lora=[request(name) for name in names])
        llm.engine.reset_prefix_cache()
        alone = [llm.generate([prompts[at]], [params[at]], lora=request(names[at]))[0] for at in (0, 3)]
    assert compilations.count == 0
    llm.engine.check()
    for name, prompt, output in zip(names, prompts, mixed, strict=True):
        check_is_apply(base if name is None else adapted(base, name), prompt, output)
    assert [bits(each) for each in alone] == [bits(mixed[at]) for at in (0, 3)]
    assert [bits(mixed[at]) for at in (1, 5)] == [bits(plain[at]) for at in (1, 5)]
    assert bits(mixed[0]) != bits(plain[0])
    check_reload(llm, base, prompts[0], params[0])
    if not sizes.keys() & {"data_parallel_size", "enable_dp_attention"}:
        check_banks(llm.engine)
    return llm


def check_banks(engine: Any) -> None:
    """Check that a bank is sharded as its weight, and that loads use no collective."""
    for runtime in engine._executor.runtimes:
        assert not any(re.search(COLLECTIVES, program.as_text()) for program in runtime.run.load.values())
        for part, banks in runtime.banks.items():
            for name, bank in banks.items():
                weight, path = runtime.params, (part, *name.split(":")[0].split("/"))
                for key in weight_path(weight, path):
                    weight = weight[key]
                over = {axes for axes in jax.tree.leaves(weight)[0].sharding.spec if axes is not None}
                assert {axes for axes in bank.sharding.spec if axes is not None} <= over
            kinds = {name.rpartition(":")[2] for name, bank in banks.items() if not bank.sharding.is_fully_replicated}
            if part.startswith("layers_"):
                assert kinds == ({"a", "b", "magnitude", "bias"} if runtime.mesh.size > 1 else set())


def adapted(base: Model, name: str) -> Model:
    return base.with_lora(drawn(declared(base), name, RANK, modules_of(name)))


def check_reload(llm: LLM, base: Model, prompt: list[int], params: SamplingParams) -> None:
    """Check that a reloaded name means the new contents."""
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
FAST = ("pp2", "ep2 x tp2")


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MESHES]
)
@pytest.mark.usefixtures("folders")
def test_each_says_what_apply_says(mesh: str) -> None:
    kind, sizes = MESHES[mesh]
    llm = check(model(kind), NAMES, **sizes)
    if mesh.startswith("tp4"):
        check_collectives(llm.engine)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("folders")
def test_ranks_with_slots_of_their_own(ranks: int) -> None:
    engine: Any = check(model("experts"), WORDS, expert_parallel_size=ranks, enable_dp_attention=True).engine
    lockstep = engine.lockstep
    assert not any(re.search(COLLECTIVES, program.as_text()) for program in lockstep.programs.load.values())
    plain, adapted = (
        collections.Counter(re.findall(COLLECTIVES, each.widest_decode.as_text()))
        for each in (lockstep.programs, lockstep.programs.adapted)
    )
    assert adapted == plain == {"all-to-all": 2 * 2}
    for part, banks in lockstep.banks.items():
        for name, bank in banks.items():
            is_expert = name.split(":")[0] in ("mlp/gate_up", "mlp/down")
            shape = bank.sharding.shard_shape(bank.shape)
            assert bank.shape[0] == ranks * LORAS["max_loras"], (part, name)
            assert shape[0] == (bank.shape[0] if is_expert else LORAS["max_loras"])
            assert not is_expert or shape[1] == bank.shape[1] // ranks


def check_collectives(engine: Any) -> None:
    """Check that adapter sums are reduced in the same collectives as those of the weights."""
    run = engine._executor.runtimes[-1].run
    plain, adapted = (
        collections.Counter(re.findall(COLLECTIVES, each.widest_decode.as_text())) for each in (run, run.adapted)
    )
    assert adapted == plain == {"all-reduce": 2 * 2 + 1, "all-gather": 1}


OF_WORDS: Mapping[str, tuple[str, dict[str, int]]] = {
    "tp2, tied": ("tied", {"tensor_parallel_size": 2}),
    "tp2, odd vocabulary": ("odd vocabulary", {"tensor_parallel_size": 2}),
    "pp2, tied": ("tied", {"pipeline_parallel_size": 2}),
    "tp2 x pp2": ("groups", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(name, marks=() if name == "tp2, tied" else pytest.mark.slow) for name in OF_WORDS],
)
@pytest.mark.usefixtures("folders")
def test_embeddings_and_heads(mesh: str) -> None:
    kind, sizes = OF_WORDS[mesh]
    llm = check(model(kind), WORDS, **sizes)
    if mesh.startswith("tp2, tied"):
        check_collectives(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NORMS, "cohere2-hub", "gpt_neox-hub", "glm4_moe-hub", "ernie4_5_moe-hub"])
@pytest.mark.usefixtures("folders")
def test_families_whose_layers_differ(name: str, tmp_path: pathlib.Path) -> None:
    check(load(name, tmp_path), tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.usefixtures("folders")
def test_beside_quantised_weights_of_which_heads_are_copied(tmp_path: pathlib.Path) -> None:
    check(stored(tmp_path, Grouped("int4", 8, zeros=True), "few KV heads"), tensor_parallel_size=4)


@pytest.mark.slow
@pytest.mark.usefixtures("folders")
def test_where_tokens_are_spread_between_layers() -> None:
    check(model("groups"), tensor_parallel_size=2, sequence_parallel_norms=True)


@pytest.mark.slow
def test_norms_of_heads_that_are_copied(tmp_path: pathlib.Path) -> None:
    """DoRA's magnitudes use norms of the weights, which are loaded onto the mesh with copies of heads."""
    base, prompt = load_base(golden("llama-dora"), tmp_path), list(range(3, 14))
    llm = LLM(str(tmp_path), "float32", **{**LORAS, "max_lora_rank": 8}, **SETTINGS, tensor_parallel_size=4)
    params = SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=1, ignore_eos=True, temperature=0)
    (output,) = llm.generate([prompt], [params], lora=LoRARequest("dora", str(GOLDENS / "llama-dora")))
    check_is_apply(base.with_lora(read(GOLDENS / "llama-dora", base)), prompt, output)
