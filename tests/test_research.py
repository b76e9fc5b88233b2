"""Research functions: internal values against transformers, padded rows, and the model run in pieces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model, research
from jaxinfer.models.families.llama import LlamaBlock
from jaxinfer.models.model import Model
from tests.fakes import random_head, random_model
from tests.models.parity import load_case
from tests.models.test_parity import GOLDENS, golden
from tools.oracle.cases import CASES

INNER = GOLDENS.parent / "inner"
"""Hidden states and attention weights of transformers in float64, from tools/oracle/inner.py."""
FAST = (
    "gpt2-hub",  # learned positions
    "falcon-rw-hub",  # ALiBi
    "gpt_oss-hub",  # sinks, windows, experts
    "deepseek_v32-odd-sizes",  # latents, index keys
    "glm_moe_dsa-every-other",  # layers that reuse another layer's token selection
    "gemma4_text-effective-hub",  # layers that read other layers' keys, per-layer embeddings
    "falcon_h1-hub",  # states in addition to keys and values
    "qwen3_next-hub",  # states in place of keys and values, a convolution
)
KINDS = dict.fromkeys((*FAST, *(case.name for case in CASES if case.served)))


def rows(names: Any, fast: Any) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def loaded(name: str, root: pathlib.Path) -> Model:
    return load_case(golden(name), root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module", params=rows(KINDS, FAST))
def model(request: pytest.FixtureRequest, root: pathlib.Path) -> Model:
    return loaded(request.param, root)


def drawn(model: Model, rows: int, time: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, model.config.vocab_size, (rows, time)))


def close(found: Any, expected: Any, share: float = 1e-5) -> None:
    """Assert equality up to rounding: within ``share`` of the largest expected magnitude."""
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * float(np.abs(expected).max()))


# ---- internal values


@pytest.mark.parametrize(
    "name",
    rows(sorted(path.stem for path in INNER.glob("*.npz")), ("llama-tiny-hub", *FAST, "gemma2-score-cap", "lfm2-hub")),
)
def test_hidden_states_and_attention_maps_are_those_of_transformers(name: str, root: pathlib.Path) -> None:
    model, expected = loaded(name, root), dict(np.load(INNER / f"{name}.npz"))
    tokens = jnp.asarray(expected["tokens"])[None]
    states = research.hidden_states(model, tokens)
    assert len(states) == len(expected["hidden"])
    streams = expected["hidden"].ndim == 4  # Gemma 3n's last ones are not normed in transformers either
    if streams:
        states = [jnp.moveaxis(state, -2, 1) for state in states]
    else:
        states[-1] = model.module.apply({"params": model.params}, states[-1], method="normed")
    for state, want in zip(states, expected["hidden"], strict=True):
        close(state[0], want, 2e-5)
    maps = research.attention_maps(model, tokens)
    assert list(maps) == [index for index, layer in enumerate(model.config.layers) if layer.attends]
    for found, want in zip(maps.values(), expected["maps"], strict=True):
        np.testing.assert_allclose(found[0], want, rtol=0, atol=2e-5)


def test_maps_do_not_show_padding_and_are_the_rows_own() -> None:
    model = random_model(sliding_window=3, model_type="mistral", architectures=["MistralForCausalLM"])
    tokens, mask = drawn(model, 2, 9), jnp.arange(9) >= jnp.asarray([[0], [4]])
    maps = research.attention_maps(model, tokens, [-1], mask)
    alone = research.attention_maps(model, tokens[1:, 4:], [1])
    assert list(maps) == list(alone) == [1]
    close(maps[1][1, :, 4:, 4:], alone[1][0])
    assert not np.asarray(maps[1][1])[:, :4].any()
    assert not np.asarray(maps[1][1])[:, :, :4].any()
    np.testing.assert_allclose(maps[1][0].sum(-1), 1.0, atol=1e-5)


def test_an_edited_block_is_what_is_looked_into() -> None:
    model = random_model()
    edited = model.replace(module=model.module.clone(overrides=((0, functools.partial(Doubled, by=jnp.asarray(2.0))),)))
    tokens = drawn(model, 1, 5)
    states, before = research.hidden_states(edited, tokens), research.hidden_states(model, tokens)
    close(states[1], 2.0 * before[1])
    close(research.attention_maps(edited, tokens)[0], research.attention_maps(model, tokens)[0])
    close(research.logits(edited, states[-1]), edited(tokens))


class Doubled(LlamaBlock):
    """A block that wraps its parent; a watcher must count both as one layer."""

    by: Any = None

    def __call__(self, x: Any, context: Any, attend: Any, cache: Any) -> Any:
        x, cache = super().__call__(x, context, attend, cache)
        return self.by * x, cache


def test_the_lens_ends_with_the_models_logits(model: Model) -> None:
    tokens = drawn(model, 1, 6)
    states, found = research.hidden_states(model, tokens), research.logit_lens(model, tokens, [0, -1])
    assert set(found) == {0, len(model.config.layers) - 1}
    close(list(found.values())[-1], model(tokens))
    close(found[0], research.logits(model, states[1]))
    if len(found) > 1:
        assert float(jnp.abs(found[0] - model(tokens)).max()) > 1e-3


def test_layers_run_from_any_state_that_suffices(model: Model) -> None:
    """Layers run from any sufficient state; other families are rejected by name."""
    tokens, count, ran = drawn(model, 1, 12), len(model.config.layers), 0
    states = research.hidden_states(model, tokens)
    for start in range(count):
        if model.module.bound or not model.module.begins(start):
            with pytest.raises(ValueError, match=rf" of {type(model.module).__name__} need more"):
                research.run(model, states[start], start)
            continue
        found = [research.run(model, states[start], start, stop) for stop in range(start, count + 1)]
        ran += 1
        for state, expected in zip(found, states[start:], strict=True):
            close(state, expected)
    assert ran or model.module.bound


def test_a_patched_state_changes_what_later_layers_make_of_it() -> None:
    model = random_model(num_hidden_layers=3)
    first, second = drawn(model, 1, 6), drawn(model, 1, 6, seed=1)
    own, other = research.hidden_states(model, first)[1], research.hidden_states(model, second)[1]
    patched = research.logits(model, research.run(model, own.at[:, 3].set(other[:, 3]), 1))
    close(patched[:, :3], model(first)[:, :3])
    assert float(jnp.abs(patched[:, 3:] - model(first)[:, 3:]).max()) > 1e-2


# ---- padded rows


def padded(model: Model) -> tuple[jax.Array, jax.Array]:
    """Return tokens and mask of four rows: padding on the left, none, on the right, inside.
    Padding has non-zero tokens; rows are longer than the top-k of sparse attention."""
    time = 20 + max(layer.index_topk or 0 for layer in model.config.layers)
    tokens, at = drawn(model, 4, time), jnp.arange(time)
    return tokens, jnp.stack([at >= 7, at >= 0, at < 13, (at < 4) | (at >= 9)])


def test_a_padded_row_has_the_logits_of_the_row_alone(model: Model) -> None:
    tokens, mask = padded(model)
    found = research.apply(model, tokens, mask)
    assert bool(jnp.isfinite(found).all())
    for row, own, live in zip(found, tokens, np.asarray(mask), strict=True):
        close(row[live], model(own[None, live])[0])
    assert float(jnp.abs(found[0, 7:] - model(tokens)[0, 7:]).max()) > 1e-2  # apply cannot mask the padding


def test_padded_rows_have_the_states_of_rows_alone() -> None:
    model = random_model()
    tokens, mask = padded(model)
    states = research.hidden_states(model, tokens, mask)
    alone = research.hidden_states(model, tokens[:1, 7:])
    close(states[-1][0, 7:], alone[-1][0])
    close(research.run(model, states[1], 1, mask=mask)[0, 7:], alone[-1][0])
    close(research.logit_lens(model, tokens, [0], mask)[0][0, 7:], research.logits(model, alone[1])[0])


def test_gradients_are_finite_beside_padding_and_do_not_reach_it(root: pathlib.Path) -> None:
    model = loaded("lfm2-hub", root)
    tokens, mask = padded(model)

    def loss(model: Model, tokens: jax.Array, mask: jax.Array | None, live: Any) -> jax.Array:
        logits = model(tokens) if mask is None else research.apply(model, tokens, mask)
        return (logits[:, live] ** 2).mean()

    found = jax.jit(jax.grad(loss), static_argnums=3)(model, tokens[:1], mask[:1], slice(7, None))
    expected = jax.grad(loss)(model, tokens[:1, 7:], None, slice(None))
    for ours, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close(ours, want, 1e-4)


# ---- a cache


def test_decoding_in_pieces_is_apply(model: Model) -> None:
    """Decoding padded rows in chunks of several tokens, then one at a time, matches apply; compiled once."""
    tokens, mask = padded(model)
    step, time = jax.jit(research.decode), tokens.shape[1]
    cache = research.init_cache(model, 4, time + 4)
    pieces, cuts = [], (0, *range(time - 9, time, 3)[:2], *range(time - 5, time + 1))
    for first, last in itertools.pairwise(cuts):
        logits, cache = step(model, tokens[:, first:last], cache, mask[:, first:last])
        pieces.append(logits)
    close(jnp.concatenate(pieces, axis=1)[mask], research.apply(model, tokens, mask)[mask])
    assert int(cache.used) == time
    assert (cache.positions.max(-1) + 1).tolist() == mask.sum(-1).tolist()


def test_a_scan_carries_the_cache_and_a_gradient_goes_through_it() -> None:
    model = random_model()
    tokens = drawn(model, 2, 8)

    def decoded(model: Model) -> jax.Array:
        def step(cache: Any, token: jax.Array) -> Any:
            logits, cache = research.decode(model, token[:, None], cache)
            return cache, logits[:, 0]

        _, logits = jax.lax.scan(step, research.init_cache(model, 2, 8), tokens.T)
        return jnp.moveaxis(logits, 0, 1)

    close(jax.jit(decoded)(model), model(tokens))
    found, expected = (jax.grad(lambda m, f=f: (f(m) ** 2).mean())(model) for f in (decoded, lambda m: m(tokens)))
    for ours, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close(ours, want, 1e-4)


def test_a_full_cache_is_refused_and_within_jit_says_so_by_nan() -> None:
    model = random_model()
    tokens = drawn(model, 1, 3)
    _, cache = research.decode(model, tokens, research.init_cache(model, 1, 5))
    with pytest.raises(ValueError, match=r"3 tokens after 3 do not fit the cache's length, 5"):
        research.decode(model, tokens, cache)
    logits, _ = jax.jit(research.decode)(model, tokens, cache)
    assert bool(jnp.isnan(logits).all())
    logits, _ = jax.jit(research.decode)(model, tokens[:, :2], cache)
    assert bool(jnp.isfinite(logits).all())


def test_the_cache_has_the_models_dtype_and_shapes_that_stay() -> None:
    model = random_model("bfloat16")
    cache = research.init_cache(model, 2, 7)
    assert [(layer.k.shape, layer.k.dtype) for layer in cache.layers] == [((2, 7, 2, 8), jnp.bfloat16)] * 2
    _, after = jax.eval_shape(research.decode, model, drawn(model, 2, 3), cache)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


@pytest.mark.parametrize(("length", "original"), [(16, 32), (48, 32)])
def test_frequencies_that_depend_on_length_are_those_of_the_caches(length: int, original: int) -> None:
    """Longrope frequencies depend on the cache length; `up_to` matches an engine of that `max_model_len`."""
    factors = {"short_factor": (1.0,) * 4, "long_factor": (3.0,) * 4, "original_max_position": original}
    model = random_model()
    model = model.replace(
        config=dataclasses.replace(
            model.config, rope=dataclasses.replace(model.config.rope, kind="longrope", **factors)
        )
    )
    tokens = drawn(model, 1, 10)
    found, _ = research.decode(model, tokens, research.init_cache(model, 1, length))
    close(found, model.up_to(length)(tokens))
    assert (float(jnp.abs(found - model(tokens)).max()) > 1e-3) == (length > original)


# ---- rejected calls


def rope_of_a_kind(kind: str) -> Model:
    model = random_model()
    rope = dataclasses.replace(model.config.rope, kind=kind, factor=2.0, original_max_position=16)
    return model.replace(config=dataclasses.replace(model.config, rope=rope))


def test_dynamic_rope_has_a_cache_within_its_context_only() -> None:
    model = rope_of_a_kind("dynamic")
    tokens = drawn(model, 1, 9)
    close(research.decode(model, tokens, research.init_cache(model, 1, 16))[0], model(tokens))
    with pytest.raises(ValueError, match=r"init_cache: length 17 .* of Llama with dynamic RoPE"):
        research.init_cache(model, 1, 17)


def test_a_chunk_bounds_the_cache(root: pathlib.Path) -> None:
    model = loaded("llama4-hub", root)
    with pytest.raises(ValueError, match=r"init_cache: length .* attention_chunk_size .* of Llama4"):
        research.init_cache(model, 1, model.config.chunk + 1)


def test_a_layer_without_attention_has_no_map(root: pathlib.Path) -> None:
    model = loaded("lfm2-hub", root)
    without = [index for index, layer in enumerate(model.config.layers) if not layer.attends]
    with pytest.raises(ValueError, match=rf"attention_maps: layer {without[0]} of Lfm2 has no attention"):
        research.attention_maps(model, drawn(model, 1, 4), without)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda m, t: research.attention_maps(m, t, [2]),
            "attention_maps: layer 2 must be from -2 to 1, those of Llama",
        ),
        (lambda m, t: research.logit_lens(m, t, [-3]), "logit_lens: layer -3 must be from -2 to 1, those of Llama"),
        (lambda m, t: research.run(m, m.hidden(m.params, t), 1, 3), "run: layers 1 to 3 must be within 0 to 2"),
        (lambda m, t: research.run(m, m.hidden(m.params, t), 2, 1), "run: layers 2 to 1 must be within 0 to 2"),
        (
            lambda m, t: research._mask(t.shape, t[:, :-1] > 0, "apply"),
            r"apply: mask is \(1, 3\), and must be \(1, 4\)",
        ),
        (lambda m, t: research._shape(t[0], "apply"), r"apply: tokens is \(4,\), and must be \[batch, time\]"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, sentence: str) -> None:
    model = random_model()
    with pytest.raises(ValueError, match=sentence):
        call(model, drawn(model, 1, 4))


def test_a_module_that_is_no_decoder_is_refused() -> None:
    head = random_head("medusa", random_model())
    with pytest.raises(ValueError, match=r"hidden_states: Medusa is no Decoder"):
        research.hidden_states(head, drawn(random_model(), 1, 4))


def test_the_demo_runs_padded() -> None:
    model = load_model("demo", dtype="float32")
    ids = [model.tokenizer.encode(text) for text in ("To be, or not to be", "ROMEO:")]
    longest = max(map(len, ids))
    tokens = jnp.asarray([[0] * (longest - len(row)) + row for row in ids])
    mask = jnp.arange(longest) >= jnp.asarray([[longest - len(row)] for row in ids])
    found = research.apply(model, tokens, mask)
    for row, own in zip(found, ids, strict=True):
        close(row[-len(own) :], model(jnp.asarray([own]))[0])
