"""Expected operations of a stage's programs, derived from the declarations of its parameters."""

from types import SimpleNamespace

import numpy as np

from jaxinfer.types import LayerSpec, ParamSpec
from tools.check_programs.expected import expected, weight_bytes

SIZES = {"data": 1, "stage": 1, "expert": 4, "tensor": 2}
DENSE = {
    "attention": {
        "qkv": ParamSpec((64, 8, 6, 8), ("embed", "kv_heads", "group", "head_dim")),
        "qkv_bias": ParamSpec((8, 6, 8), ("kv_heads", "group", "head_dim"), init="zeros"),
        "out": ParamSpec((256, 64), ("heads", "embed")),
    },
    "mlp_norm": {"scale": ParamSpec((64,), ("norm",), init="ones")},
    "mlp": {"down": ParamSpec((96, 64), ("mlp", "embed"))},
}
SPARSE = {
    "attention": {"down": ParamSpec((64, 24), ("embed", None)), "out": ParamSpec((256, 64), ("heads", "embed"))},
    "mlp": {
        "router": ParamSpec((16, 64), ("router", "embed"), dtype="float32"),
        "gate_up": ParamSpec((16, 2, 32, 64), ("expert", None, "expert_mlp", "embed")),
        "down": ParamSpec((16, 64, 32), ("expert", "embed", "expert_mlp")),
        "shared": {"down": ParamSpec((96, 64), ("mlp", "embed"))},
    },
}


def test_what_a_device_has_follows_from_the_declarations():
    assert weight_bytes(DENSE, SIZES, 2) == 2 * (64 * 6 * 8 + 6 * 8 + 32 * 64 + 64 + 12 * 64)
    experts = 4 * 2 * 16 * 64 + 4 * 64 * 16
    assert weight_bytes(SPARSE, SIZES, 2) == 2 * (64 * 24 + 32 * 64 + experts + 12 * 64) + 4 * 16 * 64
    odd = {"table": ParamSpec((97, 64), ("vocab", "embed"))}
    assert weight_bytes(odd, SIZES, 2) == 2 * 97 * 64


def expected_of(first, last, vocab=96, sizes=SIZES, norms=False, dense=DENSE):
    """Return the expectations for a stage of two layers."""
    specs = {"layers_9": dense, "layers_10": SPARSE}
    config, cache = SimpleNamespace(vocab_size=vocab), SimpleNamespace(layers=(LayerSpec(), LayerSpec()))
    model = SimpleNamespace(specs=specs, config=config, cache_spec=cache, dtype=np.dtype(np.float16), module=None)
    return expected(SimpleNamespace(model=model, first=first, last=last, prompts=False), sizes, norms)


def test_collectives_and_gemms_follow_from_the_declarations():
    whole = expected_of(first=True, last=True)
    assert whole.gemms("decode") == ((3, 6), 1)
    assert whole.gemms("prefill") == ((3,), 1)
    assert [whole.sums(name) for name in ("decode", "prefill_logprobs", "prefill")] == [2 + 2 + 1, 2 + 2 + 1, 2 + 1]
    assert [whole.gathers(name) for name in ("decode", "prefill_logprobs", "prefill")] == [1, 1, 0]
    assert whole.widest == 4 * 64
    first, last = expected_of(first=True, last=False), expected_of(first=False, last=True)
    assert first.gemms("prefill") == ((3, 6), 0)
    assert [first.sums("prefill"), first.gathers("decode"), first.logits("decode")] == [5, 0, 0]
    assert [last.sums("decode"), last.sums("prefill"), last.gathers("decode")] == [4, 2, 1]
    odd = expected_of(first=True, last=True, vocab=97)
    assert [odd.sums("decode"), odd.gathers("decode")] == [4, 0]
    one = expected_of(first=True, last=True, sizes=dict.fromkeys(SIZES, 1))
    assert [one.sums("decode"), one.gathers("decode")] == [0, 0]


def test_taps_and_gates_of_one_number_are_no_matrices():
    mixer = DENSE["attention"] | {"conv": ParamSpec((8, 24, 4), ("heads", None, None))}
    gated = DENSE["mlp"] | {"shared_gate": ParamSpec((1, 64), (None, "embed"))}
    found = expected_of(first=True, last=True, dense=DENSE | {"attention": mixer, "mlp": gated})
    assert found.gemms("decode") == expected_of(first=True, last=True).gemms("decode")


def test_norms_of_queries_and_keys_are_known_from_the_declarations():
    norm = {"scale": ParamSpec((8,), ("norm",), init="ones")}
    normed = {**DENSE, "attention": {**DENSE["attention"], "q_norm": norm, "k_norm": norm}}
    assert [expected_of(first=True, last=True, dense=dense).head_norms for dense in (DENSE, normed)] == [False, True]


def test_norms_over_all_heads_are_a_sum_more_of_each_layer():
    """The sum also occurs in the last layer of a chunk that is computed only for its keys and values."""
    norm = {"scale": ParamSpec((32, 8), ("all_heads", "norm"), init="ones")}
    normed = {**DENSE, "attention": {**DENSE["attention"], "q_norm": norm}}
    plain, whole = (expected_of(first=True, last=True, dense=dense) for dense in (DENSE, normed))
    for name in ("decode", "prefill"):
        assert (whole.sums(name), whole.gemms(name)) == (plain.sums(name) + 1, plain.gemms(name))
    one = expected_of(first=True, last=True, sizes=dict.fromkeys(SIZES, 1), dense=normed)
    assert one.sums("decode") == 0
    spread = expected_of(first=True, last=True, norms=True, dense=normed)
    assert (spread.sums("prefill"), spread.scatters("prefill")) == (1, plain.sums("prefill"))


def test_sums_are_scattered_and_gathered_where_hidden_states_are_spread_over_tokens():
    whole = expected_of(first=True, last=True, norms=True)
    programs = ("decode", "prefill_logprobs", "prefill")
    assert [whole.sums(name) for name in programs] == [5, 0, 0]
    assert [whole.scatters(name) for name in programs] == [0, 5, 3]
    assert [whole.gathers(name) for name in programs] == [1, 4 + 1 + 1, 2 + 1]
    assert whole.width == 64
    first = expected_of(first=True, last=False, norms=True)
    assert [first.scatters("prefill"), first.gathers("prefill")] == [5, 4 + 1]
    alone = expected_of(first=True, last=True, sizes=dict.fromkeys(SIZES, 1), norms=True)
    assert [alone.scatters("prefill"), alone.gathers("prefill")] == [0, 0]
