"""DeepSeek-V3.2 and GLM-5: accepted and rejected configs, index keys and shared token selection in the engine."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution.prepare import resolve_for
from jaxinfer.engine.execution.stages import cut
from jaxinfer.layers.attention import causal_attend, causal_choice
from jaxinfer.llm import LLM
from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.deepseek_sparse import DeepseekSparseConfig
from jaxinfer.models.head import HeadFiles
from jaxinfer.models.heads.mtp import config as mtp_config
from jaxinfer.models.model import Model
from jaxinfer.models.registry import family_for
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels.kv_write.reference import quantize, token_scales
from pallas_kernels.token_index import Index
from tests.engine.test_identity import ROOMY, SETTINGS, alone, check_mode, make_requests, preempted, run
from tests.engine.test_kv_dtype import forced
from tests.fakes import random_model
from tests.kv.test_quantized_pool import KINDS
from tests.models.test_deepseek import config_json as deepseek_json

ARCHITECTURES = {"v32": "DeepseekV32ForCausalLM", "glm": "GlmMoeDsaForCausalLM"}
TOP = 24


def config_json(kind: str, **changes: Any) -> dict[str, Any]:
    index = {"index_n_heads": 6, "index_head_dim": 8, "index_topk": TOP}
    return deepseek_json(3, architectures=[ARCHITECTURES[kind]], **index | changes)


def config(kind: str, **changes: Any) -> DeepseekSparseConfig:
    fields = config_json(kind, **changes)
    read: DeepseekSparseConfig = family_for(fields).config(fields)
    return read


@functools.cache
def sparse_model(kind: str = "v32", layers: int = 2) -> Model:
    """Return a random model; in "glm" every other layer reuses the token selection of the layer before."""
    return random_model(**config_json(kind, num_hidden_layers=layers, index_topk_freq=2, index_skip_topk_offset=1))


# --------------------------------------------------------------------------------------------------------------
# config.json


def test_what_is_left_out_is_what_transformers_takes():
    left_out = "index_n_heads index_head_dim index_topk kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim"
    left_out += " v_head_dim n_group topk_group n_routed_experts moe_intermediate_size first_k_dense_replace"
    left_out += " max_position_embeddings num_experts_per_tok"
    read = []
    for kind in ARCHITECTURES:
        fields = config_json(kind, num_hidden_layers=5)
        for name in left_out.split():
            del fields[name]
        read.append(family_for(fields).config(fields))
    v32, glm = read
    layer = LayerSpec(latent_rank=512, index_topk=2048, index_dim=128)
    for cfg in read:
        assert (cfg.layers, cfg.head_dim, cfg.indexed) == ((layer,) * 5, 512 + 64 + 128, (True,) * 5)
        assert (cfg.dense, cfg.experts, cfg.expert_size, cfg.rule.top_k, cfg.rule.scale) == (3, 256, 2048, 8, 2.5)
    assert (v32.index_heads, v32.index_interleaved, v32.max_position, v32.norm_eps) == (64, False, 163840, 1e-6)
    assert (glm.index_heads, glm.index_interleaved, glm.max_position, glm.norm_eps) == (32, True, 202752, 1e-5)
    assert (v32.q_rank, v32.nope, v32.rope_dim, v32.value_dim, v32.rule.groups) == (1536, 128, 64, 128, 8)
    assert (glm.q_rank, glm.nope, glm.rope_dim, glm.value_dim, glm.rule.groups) == (2048, 192, 64, 256, 1)


GLM_52 = tuple(index < 3 or (index - 2) % 4 == 0 for index in range(78))
FULL, SHARED = "full", "shared"


@pytest.mark.parametrize(
    ("layers", "changes", "indexed"),
    [
        (78, {"index_topk_freq": 4, "index_skip_topk_offset": 3}, GLM_52),
        (6, {"index_topk_freq": 2}, (True, True, False, True, False, True)),
        (3, {"index_topk_pattern": "FSF", "index_topk_freq": 3}, (True, False, True)),
        (3, {"index_topk_pattern": [FULL, FULL, SHARED]}, (True, True, False)),
        (2, {"indexer_types": [FULL, SHARED], "index_topk_pattern": "FF"}, (True, False)),
        (2, {"indexer_types": None, "index_topk_freq": None}, (True, True)),
    ],
)
def test_layers_that_share_a_choice(layers: int, changes: dict[str, Any], indexed: tuple[bool, ...]):
    cfg = config("glm", num_hidden_layers=layers, **changes)
    assert cfg.indexed == indexed
    specs = family_for(config_json("glm")).param_specs(cfg)
    assert tuple("indexer" in specs[f"layers_{index}"]["attention"] for index in range(layers)) == indexed
    assert config("v32", num_hidden_layers=layers, **changes).indexed == (True,) * layers


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("v32", {"index_topk": 0}, ["index_topk", "0"]),
        ("v32", {"index_n_heads": "4"}, ["index_n_heads", "'4'"]),
        ("v32", {"index_head_dim": 3}, ["index_head_dim", "3", "qk_rope_head_dim (4)"]),
        ("v32", {"q_lora_rank": None}, ["q_lora_rank", "None", "indexers"]),
        ("v32", {"scoring_func": "softmax"}, ["scoring_func", "softmax"]),
        ("glm", {"indexer_types": [FULL]}, ["indexer_types", "2 layers"]),
        ("glm", {"indexer_types": [FULL, "none"]}, ["indexer_types", "full or shared"]),
        ("glm", {"indexer_types": [SHARED, FULL]}, ["indexer_types", "begin with a full layer"]),
        ("glm", {"index_topk_pattern": "FX"}, ["index_topk_pattern", "'FX'"]),
        ("glm", {"index_topk_pattern": 3}, ["index_topk_pattern", "3"]),
        ("glm", {"index_topk_freq": 0}, ["index_topk_freq", "0"]),
        ("glm", {"mlp_layer_types": ["sparse", "dense"]}, ["mlp_layer_types", "dense layers"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(kind: str, changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        config(kind, **changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_page_holds_an_index_key_beside_each_latent():
    model = sparse_model()
    layer = LayerSpec(latent_rank=12, index_topk=TOP, index_dim=8)
    assert model.cache_spec == CacheSpec((layer,) * 2, 1, 12 + 4 + 8)
    assert model.cache_spec.bytes_per_page(16, 2) == 2 * 16 * 24 * 2
    assert model.with_cache("int8").cache_spec.bytes_per_page(16, 2) == 2 * 16 * (24 + 3 * 4)


def test_what_is_not_there_is_refused_by_name():
    with pytest.raises(EngineConfigError, match=r"attention_backend = mosaic cannot be: .*index keys"):
        resolve_for(sparse_model(), EngineConfig(attention_backend="mosaic"), "gpu")
    cfg = config("v32", num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match="indexer"):
        mtp_config(HeadFiles({}, frozenset(), cfg, (None,)))


def test_a_stage_begins_where_a_choice_is_made():
    glm = sparse_model("glm", 4)
    assert glm.config.indexed == (True, False, True, False)
    assert [stage.layers for stage in cut(glm, 2)] == [range(2), range(2, 4)]
    with pytest.raises(EngineConfigError, match="pipeline_parallel_size = 4 cannot be: layer 1 would begin a stage"):
        cut(glm, 4)
    assert len(cut(sparse_model("v32", 4), 4)) == 4


# --------------------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_gradients_flow_around_a_choice(kind: str):
    model, tokens = sparse_model(kind), jnp.asarray([np.random.default_rng(0).integers(0, 97, 40)])
    gradients = jax.jit(jax.grad(lambda params: (model.apply(params, tokens) ** 2).sum()))(model.params)
    without = {jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(gradients) if not leaf.any()}
    assert all("indexer" in name or "correction" in name for name in without)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_token_beyond_the_choice_makes_no_difference():
    """Up to ``index_topk`` tokens affect the last query; tokens that no query selects have no effect."""
    model, ids = sparse_model("v32", 1), np.random.default_rng(0).integers(0, 97, 60)

    def seen(length: int) -> int:
        """Return how many of the first ``length`` tokens affect the last one."""
        changed = np.tile(ids[:length], (length, 1))
        changed[np.arange(length - 1), np.arange(length - 1)] = (ids[: length - 1] + 1) % 97
        last = np.asarray(jax.jit(model.apply)(model.params, changed))[:, -1]
        return int((np.abs(last[:-1] - last[-1]).max(-1) > 1e-4).sum())

    assert seen(TOP) == TOP - 1
    assert TOP - 1 <= seen(60) < TOP + 15  # a changed token may itself be selected


# --------------------------------------------------------------------------------------------------------------
# The engine


def test_requests_have_the_bits_of_each_alone_in_short():
    model = sparse_model("v32", 1)
    llm = LLM(model, **{**SETTINGS, "prefill_sizes": (16,)}, num_pages=ROOMY)
    requests = make_requests(6, model.config.vocab_size)
    expected = [run(llm, [request])[0] for request in requests]
    assert run(llm, requests) == expected
    assert max(len(prompt) for prompt, _ in requests) > 2 * TOP


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KINDS])
def test_requests_have_the_bits_of_each_alone(kind: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch):
    """Cold and warm cache, small steps, drafts, and pages swapped to the host and back."""
    model, settings = sparse_model(kind), {**SETTINGS, "kv_cache_dtype": kv_cache_dtype}
    requests = make_requests(10, model.config.vocab_size, longest=40)
    expected = alone(model, requests, **settings)
    small = LLM(model, **settings, num_pages=200, max_num_batched_tokens=72)
    check_mode(small, requests, expected, lambda stats: stats.prefix_hits > 0)
    drafts = LLM(model, **settings, num_pages=12, speculative="ngram", swap_space_gib=0)
    check_mode(drafts, requests, expected, preempted("recompute"))
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    check_mode(LLM(model, **settings, num_pages=12), requests, expected, preempted("swap"))


class RoundingAttend:
    """Contiguous attention over latents and index keys that are quantised and dequantised."""

    def __init__(self, kind: str, rank: int) -> None:
        self.dtype, self.rank = jnp.dtype(KINDS[kind]), rank

    def rounded(self, x: jax.Array) -> jax.Array:
        scales = token_scales(x, self.dtype)
        return quantize(x, scales, self.dtype).astype(x.dtype) * scales[..., None]

    def __call__(self, q: Any, k: Any, v: None, cache: Any, layer: LayerSpec, scale: float, sinks=None, chosen=None):
        k = jnp.concatenate([self.rounded(part) for part in jnp.split(k, [self.rank], axis=-1)], axis=-1)
        return causal_attend(q, k, v, cache, layer, scale, sinks, chosen)

    def choosing(self, q: Any, k: Any, index: Index, cache: Any, layer: LayerSpec, scale: float):
        chosen = causal_choice(index._replace(k=self.rounded(index.k)), layer)
        mixed, cache = self(q, k, None, cache, layer, scale, chosen=chosen)
        return mixed, chosen, cache


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_served_logprobs_are_those_of_a_model_that_rounds_latents_and_index_keys(kind: str):
    model = sparse_model("glm")
    prompt = np.random.default_rng(3).integers(0, model.config.vocab_size, 60).tolist()
    llm = LLM(model, **{**SETTINGS, "prefill_sizes": (16,)}, kv_cache_dtype=kind)
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    (sample,) = output.outputs
    ids, told = prompt + sample.token_ids, [*output.prompt_logprobs, *sample.logprobs]
    served = np.array([each[token].logprob for each, token in zip(told[1:], ids[1:], strict=True)])
    rounded, exact = (forced(model, each, ids) for each in (RoundingAttend(kind, 12), causal_attend))
    error = np.abs(rounded - exact)
    assert error.max() > 1e-2
    # A number midway between two steps may round either way and change which token is selected.
    assert np.median(np.abs(served - rounded)) < np.median(error) / 20
    assert (np.abs(served - rounded) > 1e-4).mean() < 0.1
