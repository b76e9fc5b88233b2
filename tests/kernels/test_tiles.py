"""Looking tuned tiles up: exact, nearest, none; what a kernel refuses; broken files; and that calls find them."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tiles
from pallas_kernels.check.configuration import shaped
from pallas_kernels.check.ops import op_folders
from pallas_kernels.paged_attention.mosaic import prefill
from pallas_kernels.paged_attention.tile_keys import PREFILL, decode_key, prefill_key
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
        (key(9), {"keys": 128, "stages": 4}),  # nearer in its logarithm, though not in rows
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
    assert picked(package, key(64), device_kind=None) == Tiles()  # the tests' own device


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
    assert {path.parent.name for path in files} >= {"paged_attention", "mla_attention", "quant_matmul"}
    for path in files:
        assert tiles.as_text(tiles.read(path)) == path.read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------
# The kernels' own calls, with another file.

QUERIES = shaped(2, 64, 32, 128, dtype=jnp.bfloat16)
POOL = shaped(32, 2, 8, 64, 128, dtype=jnp.bfloat16)
TABLES, LANES = shaped(2, 16, dtype=jnp.int32), shaped(2, dtype=jnp.int32)


class Hopper(jax.sharding.AbstractDevice):
    compute_capability = "9.0"


def test_prefill_takes_tuned_tiles(tmp_path, monkeypatch):
    sizes = prefill_key(QUERIES, POOL, TABLES)
    found = Entry(
        H100, PREFILL, sizes.options, {"block_keys": 64}, (Measured(sizes.sizes, {"stages": 5, "heads": 2}, {}),)
    )
    (tmp_path / "paged_attention").mkdir()
    (tmp_path / "paged_attention/tiles.json").write_text(tiles.as_text((found,)), encoding="utf-8")
    monkeypatch.setattr(prefill, "pick", functools.partial(pick, package=tmp_path))
    seen = []
    monkeypatch.setattr(prefill, "_launcher", lambda shape, _: lambda q, *rest: (seen.append(shape), q)[1])

    def trace():
        jax.eval_shape(lambda *args: prefill.prefill(*args, scale=1.0), QUERIES, POOL, TABLES, LANES, LANES)
        return seen[-1].block_keys, seen[-1].stages, seen[-1].block_heads

    untuned = prefill.heuristic_tiles(group=4, head_dim=128, tree=False)
    assert trace() == dataclasses.astuple(untuned)
    device = Hopper(device_kind=H100, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert trace() == (64, 5, 2)


def test_a_window_shortens_the_keys_and_scales_are_told_apart():
    factors = shaped(32, 2, 8, 64, dtype=jnp.float32)
    assert decode_key(QUERIES, POOL, TABLES).sizes["keys"] == 1024
    assert decode_key(QUERIES, POOL, TABLES, window=100).sizes["keys"] == 100
    assert decode_key(QUERIES, POOL, TABLES, window=10**6).sizes["keys"] == 1024
    assert decode_key(QUERIES, POOL, TABLES).sizes["queries"] == 256
    assert decode_key(QUERIES, POOL, TABLES, scales=factors).options["scales"] == "token"
    assert decode_key(QUERIES, POOL, TABLES, scales=shaped(32, 2, 8, dtype=jnp.float32)).options["scales"] == "head"
