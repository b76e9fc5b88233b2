"""Lookup of tuned tiles: exact, nearest, none; rejected tiles; broken files; and use by the kernels."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tiles
from pallas_kernels.grouped_matmul import mosaic as grouped_matmul
from pallas_kernels.grouped_matmul.arg_specs import product
from pallas_kernels.grouped_matmul.tile_keys import matmul_key as grouped_key
from pallas_kernels.mla_attention import LatentOptions
from pallas_kernels.mla_attention.mosaic import attention as mla
from pallas_kernels.mla_attention.tile_keys import decode_key as mla_key
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.paged_attention.hopper.decode import launch as decode
from pallas_kernels.paged_attention.hopper.prefill import launch as prefill
from pallas_kernels.paged_attention.tile_keys import decode_key, prefill_key
from pallas_kernels.quant_matmul.fit import of_rows
from pallas_kernels.quant_matmul.mosaic import launch as quant_matmul
from pallas_kernels.quant_matmul.tile_keys import matmul_key
from pallas_kernels.specs import op_folders, shaped
from pallas_kernels.tiles import Entry, Key, Measured, pick, tuned

H100, KERNEL = "NVIDIA H100 80GB HBM3", "fake_op.sum"


@dataclasses.dataclass(frozen=True)
class Tiles:
    keys: int = 64
    stages: int = 3

    def __post_init__(self):
        if self.keys % 64:
            raise ValueError(f"keys must be a multiple of 64: {self}")


def measured(rows, stages, context=1024):
    return Measured({"rows": rows, "context": context}, {"stages": stages}, {"microseconds": 1.5})


def entry(*sizes, page=64, keys=128, device=H100, kernel=KERNEL):
    return Entry(device, kernel, {"page": page, "dtype": "bfloat16"}, {"keys": keys}, sizes)


def key(rows, context=1024, page=64):
    return Key({"page": page, "dtype": "bfloat16"}, {"rows": rows, "context": context})


def write(package, *entries):
    (package / "fake_op").mkdir(exist_ok=True)
    (package / "fake_op/tiles.json").write_text(tiles.as_text(entries), encoding="utf-8")
    return package


@pytest.fixture
def package(tmp_path):
    return write(tmp_path, entry(measured(1, 2), measured(64, 4), measured(64, 5, context=16)), entry(page=16, keys=64))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (key(64), {"keys": 128, "stages": 4}),
        (key(1), {"keys": 128, "stages": 2}),
        (key(7), {"keys": 128, "stages": 2}),
        (key(9), {"keys": 128, "stages": 4}),  # nearer in log scale, though not in rows
        (key(50, context=100), {"keys": 128, "stages": 5}),
        (key(64, page=16), {"keys": 64}),
        (key(64, page=32), None),
    ],
)
def test_exact_else_nearest_with_the_same_options(package, wanted, found):
    assert tuned(KERNEL, H100, wanted, package=package) == found


def test_other_devices_and_kernels_are_other_entries(package):
    assert tuned(KERNEL, "NVIDIA H200", key(64), package=package) is None
    assert tuned(KERNEL, None, key(64), package=package) is None
    assert tuned("fake_op.product", H100, key(64), package=package) is None
    assert tuned("no_such_op", H100, key(64), package=package) is None


def test_a_size_that_is_not_written_down_counts_as_one(package):
    assert tuned(KERNEL, H100, Key(key(1).options, {"rows": 64}), package=package)["stages"] == 5


def picked(package, wanted, most_stages=9, device_kind=H100):
    def refusal(one):
        return f"{one.stages} stages" if one.stages > most_stages else None

    return pick(KERNEL, wanted, Tiles(), refusal, device_kind=device_kind, package=package)


def test_what_the_kernel_refuses_is_passed_over(package):
    assert picked(package, key(64)) == Tiles(128, 4)
    assert picked(package, key(64), most_stages=2) == Tiles(128, 2)
    assert picked(package, key(64), most_stages=1) == Tiles()


def test_the_heuristic_keeps_to_the_bits_that_were_decided(package):
    assert picked(write(package, entry(measured(64, 4))), key(64), most_stages=3) == Tiles(128, 3)


def test_without_an_entry_the_heuristic_decides(package):
    assert picked(package, key(64), device_kind="cpu") == Tiles()
    assert picked(package, key(64), device_kind=None) == Tiles()  # the device of the tests


def test_no_size_changes_the_bits(package):
    found = {
        tuned(KERNEL, H100, key(rows, context), package=package)["keys"] for rows in (1, 9, 999) for context in (1, 99)
    }
    assert found == {128}


ENTRY = json.loads(tiles.as_text((entry(measured(1, 2)),)))["entries"][0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ('{"entries": []}', "'format' is missing"),
        ('{"format": 2, "entries": []}', "format is 2"),
        ('{"format": 1}', "'entries' is missing"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "bits": {"keys": "64"}}]}), "positive integers"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "bits": {"keys": True}}]}), "positive integers"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "options": {"page": [1]}}]}), "text, integers or null"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "device": 3}]}), "must be text"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "measured": [{"sizes": {"rows": 0}}]}]}), "positive integers"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "measured": 3}]}), "not iterable"),
        (json.dumps({"format": 1, "entries": [ENTRY, ENTRY]}), "more than one entry"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "bits": {"keys": 65}}]}), "multiple of 64"),
        (json.dumps({"format": 1, "entries": [{**ENTRY, "bits": {"depth": 64}}]}), "depth"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, why):
    path = write(tmp_path) / "fake_op/tiles.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=why) as error:
        picked(tmp_path, key(64))
    assert str(path) in str(error.value)


def test_a_file_survives_being_read_and_written(package):
    path = package / "fake_op/tiles.json"
    assert tiles.as_text(tiles.read(path)) == path.read_text(encoding="utf-8")


def test_a_file_is_read_once_a_process(package):
    assert picked(package, key(64)) == Tiles(128, 4)
    write(package)
    assert picked(package, key(64)) == Tiles(128, 4)


def test_what_ships_can_be_read():
    files = [folder / "tiles.json" for folder in op_folders() if (folder / "tiles.json").exists()]
    assert {path.parent.name for path in files} >= {
        "paged_attention",
        "mla_attention",
        "quant_matmul",
        "grouped_matmul",
    }
    for path in files:
        assert tiles.as_text(tiles.read(path)) == path.read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------
# Kernel calls with another tiles file.

FEW = shaped(2, 1, 32, 128, dtype=jnp.bfloat16)
QUERIES = shaped(2, 64, 32, 128, dtype=jnp.bfloat16)
POOL = shaped(32, 2, 8, 64, 128, dtype=jnp.bfloat16)
TABLES, PER_SEQUENCE = shaped(2, 16, dtype=jnp.int32), shaped(2, dtype=jnp.int32)


class Hopper(jax.sharding.AbstractDevice):
    compute_capability = "9.0"


def prefill_tiles(shape):
    return prefill.Tiles(shape.block_keys, shape.stages, shape.block_heads)


X, WEIGHTS = shaped(16, 1024, dtype=jnp.bfloat16), shaped(512, 1024, dtype=jnp.int4)
SCALES = shaped(8, 512, dtype=jnp.bfloat16)
ROWS, EXPERTS = shaped(9, 32, 512, dtype=jnp.bfloat16), shaped(8, 1024, 512, dtype=jnp.bfloat16)
LATENTS, LATENT_POOL = shaped(2, 1, 16, 576, dtype=jnp.bfloat16), shaped(32, 64, 576, dtype=jnp.bfloat16)
PLAIN = AttentionOptions(1.0)
# kernel: (module, launcher, tiles of a shape), (call, operands), (key, tuned tiles, fields that affect bits)
CALLS = {
    "paged_attention.decode": (
        (decode, "_launcher", lambda shape: shape.tiles),
        (functools.partial(decode.extend, options=PLAIN), (FEW, POOL, TABLES, PER_SEQUENCE, PER_SEQUENCE)),
        (decode_key(FEW, POOL, TABLES, PLAIN), decode.Tiles(128, 2, 256, 66), {"block_keys", "keys_per_split"}),
    ),
    "paged_attention.prefill": (
        (prefill, "_launcher", prefill_tiles),
        (functools.partial(prefill.prefill, options=PLAIN), (QUERIES, POOL, TABLES, PER_SEQUENCE, PER_SEQUENCE)),
        (prefill_key(QUERIES, POOL, TABLES, PLAIN), prefill.Tiles(64, 3, 2), {"block_keys"}),
    ),
    "quant_matmul": (
        (quant_matmul, "launcher", lambda shape: shape.tiles),
        (quant_matmul.matmul, (X, WEIGHTS, SCALES)),
        (matmul_key(of_rows(X, WEIGHTS, SCALES)), quant_matmul.Tiles(1, 128, 3, 2), {"splits"}),
    ),
    "grouped_matmul": (
        (grouped_matmul, "_launcher", lambda shape: shape.tiles),
        (product, (ROWS, EXPERTS, shaped(9, dtype=jnp.int32), shaped(dtype=jnp.int32))),
        (grouped_key(ROWS, EXPERTS), grouped_matmul.Tiles(1, 64, 3, 264), set()),
    ),
    "mla_attention.decode": (
        (mla, "_launch", lambda shape: shape.tiles),
        (
            functools.partial(mla.extend, options=LatentOptions(1.0)),
            (LATENTS, LATENT_POOL, TABLES, PER_SEQUENCE, PER_SEQUENCE),
        ),
        (mla_key(LATENTS, LATENT_POOL, TABLES), mla.Tiles(256, 66), {"keys_per_split"}),
    ),
}


@pytest.mark.parametrize("kernel", CALLS)
def test_a_call_without_tiles_takes_the_tuned_ones(kernel, tmp_path, monkeypatch):
    (module, launcher, tiles_of), (call, operands), (sizes, best, bits) = CALLS[kernel]
    fields = dataclasses.asdict(best)
    rest = {name: value for name, value in fields.items() if name not in bits}
    found = Entry(
        H100, kernel, sizes.options, {name: fields[name] for name in bits}, (Measured(sizes.sizes, rest, {}),)
    )
    path = tiles.tiles_file(kernel, tmp_path)
    path.parent.mkdir()
    path.write_text(tiles.as_text((found,)), encoding="utf-8")
    monkeypatch.setattr(getattr(module, "fit", module), "pick", functools.partial(pick, package=tmp_path))
    seen, launch = [], getattr(module, launcher)
    monkeypatch.setattr(module, launcher, lambda shape, *args: (seen.append(tiles_of(shape)), launch(shape, *args))[1])
    jax.eval_shape(call, *operands)
    device = Hopper(device_kind=H100, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        jax.eval_shape(call, *operands)
    assert seen[0] != best
    assert seen[1] == best


def test_a_window_shortens_the_keys_and_scales_are_told_apart():
    factors = shaped(32, 2, 8, 64, dtype=jnp.float32)
    assert decode_key(QUERIES, POOL, TABLES, PLAIN).sizes["keys"] == 1024
    assert decode_key(QUERIES, POOL, TABLES, AttentionOptions(1.0, window=100)).sizes["keys"] == 100
    assert decode_key(QUERIES, POOL, TABLES, AttentionOptions(1.0, window=10**6)).sizes["keys"] == 1024
    assert decode_key(QUERIES, POOL, TABLES, PLAIN).sizes["queries"] == 256
    assert decode_key(QUERIES, POOL, TABLES, AttentionOptions(1.0, scales=factors)).options["scales"] == "token"
    assert (
        decode_key(QUERIES, POOL, TABLES, AttentionOptions(1.0, scales=shaped(32, 2, 8, dtype=jnp.float32))).options[
            "scales"
        ]
        == "head"
    )
