"""grouped_matmul against its definition on all platforms' paths; the cost of a row and independence from other rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choice import Target
from pallas_kernels.grouped_matmul import Groups, explain, group, groups, matmul, reference, taken

CPU, GPU = Target("cpu"), Target("gpu", (9, 0))
EXPERTS, TOP_K = 6, 2


def choices(tokens: int, seed: int = 0, experts: int = EXPERTS) -> jax.Array:
    """Return the experts of each token, distinct, flattened by token; one token has none."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(tokens)])
    chosen[tokens // 2] = experts
    return jnp.asarray(chosen.reshape(-1), jnp.int32)


def numbers(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def grouped(x: jax.Array, weights: jax.Array, experts: jax.Array, target: Target = CPU, most: int = 0) -> jax.Array:
    """Return the product row by row, computed in tiles."""
    groups = group(experts, weights.shape[0], most or x.shape[0], target=target)
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    result = matmul(rows, weights, groups, target=target)
    return result.reshape(-1, *weights.shape[1:-1]).at[groups.places].get(mode="fill", fill_value=0)


@pytest.mark.parametrize("tokens", [1, 3, 40, 150])
@pytest.mark.parametrize("target", [CPU, GPU])
def test_every_row_meets_its_own_expert(tokens: int, target: Target):
    experts = choices(tokens)
    x, weights = numbers(1, tokens * TOP_K, 24), numbers(2, EXPERTS, 2, 15, 24)
    got = jax.jit(lambda *a: grouped(*a, target=target, most=tokens))(x, weights, experts)
    np.testing.assert_allclose(got, reference.matmul(x, weights, experts), rtol=0, atol=2e-5)


@pytest.mark.parametrize("target", [CPU, GPU])
def test_all_rows_may_have_one_expert_and_none(target: Target):
    x, weights = numbers(1, 600, 8), numbers(2, 4, 5, 8)
    for chosen in (3, 4, -1):
        experts = jnp.full(600, chosen, jnp.int32)
        got = grouped(x, weights, experts, target)
        np.testing.assert_allclose(got, reference.matmul(x, weights, experts), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("outputs", [129, 700])  # 4096 inputs: an expert's weights are processed in several slices
def test_pieces_of_weights_fit_together(dtype: str, outputs: int):
    experts = choices(5, experts=3)
    x, weights = numbers(1, 10, 4096, dtype=dtype), numbers(2, 3, outputs, 4096, dtype=dtype)
    got = np.asarray(jax.jit(grouped)(x, weights, experts), np.float32)
    tolerance = 1e-3 if dtype == "float32" else 0.5  # for sums with a deviation of 64
    np.testing.assert_allclose(got, reference.matmul(x, weights, experts), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 2), ("float32", 1)])
def test_a_tile_of_one_row_has_a_second_one_in_16_bits(dtype: str, rows: int):
    experts, x, weights = jnp.array([4, 1]), numbers(1, 2, 64, dtype=dtype), numbers(2, EXPERTS, 7, 64, dtype=dtype)
    run = jax.jit(functools.partial(grouped, most=1))
    tiles = re.findall(r"tensor<\d+x(\d+)x64xb?f", run.lower(x, weights, experts).as_text())
    assert str(rows) in tiles
    expected = reference.matmul(x, weights, experts)
    np.testing.assert_allclose(np.asarray(run(x, weights, experts), np.float32), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [2, 40])
def test_a_rows_bits_do_not_depend_on_the_other_rows(tokens: int):
    weights = numbers(2, EXPERTS, 70, 300)
    run = jax.jit(grouped)
    x, experts = numbers(1, tokens * TOP_K, 300), choices(tokens)
    expected = np.asarray(run(x, weights, experts))
    for seed in range(6):
        others, chosen = numbers(seed + 9, *x.shape), choices(tokens, seed + 1)
        at = seed % (tokens * TOP_K)
        others, chosen = others.at[at].set(x[0]), chosen.at[at].set(experts[0])
        assert np.asarray(run(others, weights, chosen))[at].tobytes() == expected[0].tobytes()


def tiles(experts: list[int], count: int, target: Target = CPU, most: int = 64) -> Groups:
    return group(jnp.asarray(experts, jnp.int32), count, most, target=target)


def test_tiles_are_as_many_as_the_active_experts_need():
    groups = tiles([5, 5, 70, 5, 128, 5, 5, 128], 128)
    assert groups.entries.shape == (8, 4)
    assert int(groups.occupied) == 3
    assert groups.experts is not None
    assert groups.experts[:3].tolist() == [5, 5, 70]
    assert groups.entries[:3].tolist() == [[0, 1, 3, 5], [6, 8, 8, 8], [2, 8, 8, 8]]
    assert groups.places.tolist() == [0, 1, 8, 2, 32, 3, 4, 32]
    assert groups.of_tiles(jnp.arange(128)).tolist()[:3] == [[5], [5], [70]]


@pytest.mark.parametrize("target", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("experts", [[0], [9], [7, 7], [9, 9, 9], [-1, 3, 8]])
def test_tiles_that_hold_nothing_have_an_expert(experts: list[int], target: Target):
    found = tiles(experts, 8, target, most=513).experts
    assert found is not None
    assert all(0 <= expert < 8 for expert in found.tolist())


def test_entries_take_the_value_that_they_share():
    values = jnp.arange(6.0).reshape(3, 2) + 1
    np.testing.assert_array_equal(taken(values, jnp.array([[4, 0], [6, 5]]), 2), [[[5, 6], [1, 2]], [[0, 0], [5, 6]]])
    np.testing.assert_array_equal(taken(values[:, 0], jnp.array([2, 3])), [5, 0])


@pytest.mark.parametrize(("count", "entries"), [(1, 9), (4, 37), (11, 8), (11, 199)])
def test_no_choice_needs_more_tiles_than_there_are(count: int, entries: int):
    rng = np.random.default_rng(0)
    make = jax.jit(lambda experts: group(experts, count, 64, target=CPU))
    for active in (1, count // 2, count, count):
        groups = make(jnp.asarray(rng.integers(0, max(1, active), entries), jnp.int32))
        assert int(groups.occupied) <= groups.entries.shape[0]
        held = np.asarray(groups.entries).reshape(-1)
        assert held[np.asarray(groups.places)].tolist() == list(range(entries))


@pytest.mark.parametrize("most", [groups.COUNTED, 0])
@pytest.mark.parametrize("entries", [1, 40, 300])
def test_counting_and_sorting_find_the_same_rows(entries: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """Counting gives the same rows as sorting, in one comparison of all pairs and in blocks."""
    monkeypatch.setattr(groups, "COUNTED", most)
    monkeypatch.setattr(groups, "BLOCK", 16)
    experts = jnp.asarray(np.random.default_rng(entries).integers(-1, 13, entries), jnp.int32)
    ordered, counted = (group(experts, 11, entries, spread=20, path="mosaic", target=target) for target in (CPU, GPU))
    for one, other in zip(counted, ordered, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("entries", [groups.COUNTED, 3 * groups.COUNTED])
def test_only_a_cpu_sorts(entries: int):
    def sorts(target: Target) -> bool:
        make = functools.partial(group, count=8, most=entries, target=target)
        return " sort[" in str(jax.make_jaxpr(make)(jax.ShapeDtypeStruct((entries,), jnp.int32)))

    assert (sorts(CPU), sorts(GPU)) == (True, False)


def test_tiles_are_for_what_an_expert_gets_of_all_entries():
    """A device with 20 of 160 experts expects an eighth of the entries, but has capacity for all of them."""
    experts = jnp.arange(384, dtype=jnp.int32) % 160
    alone, spread = (group(experts, 20, most=64, spread=spread, path="mosaic") for spread in (None, 160))
    assert alone.entries.shape == (25, 64)
    assert spread.entries.shape == (20 + 364 // 8, 8)
    assert int(spread.occupied) == 20


def test_a_gpu_multiplies_all_experts_at_once_while_tokens_are_few():
    few = tiles([2, 0, 2, 1], 3, GPU, most=4)
    assert few.experts is None
    assert few.entries.shape == (3, 4)
    assert few.entries.tolist() == [[1, 4, 4, 4], [3, 4, 4, 4], [0, 2, 4, 4]]
    assert few.of_tiles(jnp.arange(3)).tolist() == [[0], [1], [2]]
    many = tiles([2, 0, 2, 1], 3, GPU, most=513)
    assert many.experts is not None
    assert many.entries.shape == (3, 64)


@pytest.mark.parametrize(
    ("entries", "count", "most", "rows", "count_of_tiles"),
    [(2, 8, 1, 8, 2), (128, 8, 64, 32, 11), (1024, 8, 512, 128, 15), (384, 64, 64, 16, 84)],
)
def test_tiles_for_the_kernel(entries: int, count: int, most: int, rows: int, count_of_tiles: int):
    """Tiles have wgmma column counts as rows, twice the mean rows per expert; their number is never the worst case."""
    rng = np.random.default_rng(0)
    groups = group(jnp.asarray(rng.integers(0, count, entries), jnp.int32), count, most, path="mosaic", target=GPU)
    assert groups.experts is not None
    assert groups.entries.shape == (count_of_tiles, rows)
    held = np.asarray(groups.entries).reshape(-1)
    assert held[np.asarray(groups.places)].tolist() == list(range(entries))


BF16, FP16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@pytest.mark.parametrize(
    ("x", "weights", "target", "path", "why"),
    [
        (BF16, (BF16, 2, 1408, 2048), GPU, "mosaic", "does these operands"),
        (FP16, (FP16, 2880, 2880), GPU, "mosaic", "does these operands"),
        (BF16, (BF16, 64, 64), CPU, "xla", "platform cpu"),
        (BF16, (BF16, 64, 64), Target("gpu", (8, 0)), "xla", "8.0"),
        (F32, (F32, 64, 64), GPU, "xla", "float32"),
        (BF16, (FP16, 64, 64), GPU, "xla", "float16 weights times bfloat16"),
        (BF16, (BF16, 2, 48, 64), GPU, "xla", "64 outputs"),
        (BF16, (BF16, 64, 96), GPU, "xla", "64 inputs"),
    ],
)
def test_the_path_and_why(x, weights, target, path, why):
    dtype, *dims = weights
    chosen = explain(jax.ShapeDtypeStruct((7, dims[-1]), x), jax.ShapeDtypeStruct((8, *dims), dtype), target=target)
    assert chosen.path == path
    assert why in chosen.why


def test_tiles_of_another_path_are_multiplied_by_it():
    x, weights = jax.ShapeDtypeStruct((3, 4, 64), BF16), jax.ShapeDtypeStruct((3, 64, 64), BF16)
    dense, few = tiles([2, 0, 2, 1], 3, GPU, most=4), tiles([2, 0, 2, 1], 3)
    assert "of its own" in explain(x, weights, dense, target=GPU).why
    assert "4 rows" in explain(x, weights, few, target=GPU).why
    with pytest.raises(ValueError, match="4 rows"):
        explain(x, weights, few, path="mosaic")


def by_path(path: str, x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    groups = group(experts, EXPERTS, 8, path="mosaic", target=GPU)
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    return jnp.sin(matmul(rows, weights, groups, path=path, target=GPU).astype(jnp.float32)).sum()


def products_of_experts() -> tuple[jax.Array, ...]:
    return numbers(1, 16, 64, dtype="bfloat16"), numbers(2, EXPERTS, 64, 64, dtype="bfloat16"), choices(8)


def test_gradients_and_batches_take_the_xla_path_all_the_way():
    x, weights, experts = products_of_experts()
    forced = functools.partial(by_path, "mosaic")
    kernel, gradients, batch = (
        str(jax.make_jaxpr(function)(*operands))
        for function, operands in (
            (forced, (x, weights, experts)),
            (jax.grad(forced, (0, 1)), (x, weights, experts)),
            (jax.vmap(forced, (0, None, None)), (x[None], weights, experts)),
        )
    )
    assert "name=grouped_matmul" in kernel
    assert "name=grouped_matmul" not in gradients
    assert "name=grouped_matmul" not in batch


@pytest.mark.slow
def test_gradients_and_batches_of_the_kernels_path_are_those_of_the_xla_path():
    x, weights, experts = products_of_experts()
    kernel, plain = (functools.partial(by_path, path) for path in ("mosaic", "xla"))
    got, expected = (jax.jit(jax.grad(one, (0, 1)))(x, weights, experts) for one in (kernel, plain))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    both = jax.jit(jax.vmap(kernel, (0, None, None)))(jnp.stack([x, -x]), weights, experts)
    np.testing.assert_allclose(both, [plain(x, weights, experts), plain(-x, weights, experts)], rtol=1e-5)


def test_stacked_weights_are_never_copied_as_a_whole():
    weights = jax.ShapeDtypeStruct((7, 33, 65), jnp.bfloat16)
    x, experts = jax.ShapeDtypeStruct((20, 65), jnp.bfloat16), jax.ShapeDtypeStruct((20,), jnp.int32)
    text = jax.jit(grouped).lower(x, weights, experts).compile().as_text()
    makers = set(re.findall(r"= (?:bf16|f32)\[7,33,65\]\S* (\S+?)\(", text))
    assert makers <= {"parameter", "get-tuple-element", "bitcast"}, makers


@pytest.mark.parametrize("target", [CPU, GPU])
@pytest.mark.parametrize("most", [12, 600])
def test_gradients_are_those_of_the_equation(target: Target, most: int):
    experts = choices(12)
    x, weights, weight = numbers(1, 24, 9), numbers(2, EXPERTS, 7, 9), numbers(3, 24, 7)

    def loss(product, *operands: jax.Array) -> jax.Array:
        return (jnp.sin(product(*operands, experts)) * weight).sum()

    def by_tiles(*operands: jax.Array) -> jax.Array:
        return grouped(*operands, target=target, most=most)

    got = jax.jit(jax.grad(lambda *a: loss(by_tiles, *a), argnums=(0, 1)))(x, weights)
    expected = jax.grad(lambda *a: loss(reference.matmul, *a), argnums=(0, 1))(x, weights)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_it_can_be_vmapped():
    experts = jnp.stack([choices(8, seed) for seed in range(3)])
    x, weights = numbers(1, 3, 16, 12), numbers(2, EXPERTS, 5, 12)
    got = jax.vmap(grouped, in_axes=(0, None, 0))(x, weights, experts)
    for index in range(3):
        expected = reference.matmul(x[index], weights, experts[index])
        np.testing.assert_allclose(got[index], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("weights", [(2, 3, 5), (2, 4)])
def test_operands_that_do_not_fit_are_refused(weights: tuple[int, ...]):
    with pytest.raises(ValueError, match="do not fit"):
        reference.check(jnp.zeros((1, 4, 4)), jnp.zeros(weights))
