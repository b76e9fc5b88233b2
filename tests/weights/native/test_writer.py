"""Converted folders: weights read back equal, Orbax reads them, and each defect gives an error of one sentence."""

import contextlib
import fcntl
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxinfer.parallel.heads import copied, parts_of_copies, with_copies
from jaxinfer.types import ParamSpec, walk_specs
from jaxinfer.weights import CheckpointError, load_params
from jaxinfer.weights.native.leaves import Leaf, chunk_of, leaves_of
from jaxinfer.weights.native.manifest import MANIFEST, UNFINISHED, StoredArray, array_folder, array_name, read_manifest
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.native.writer import save_params, unfinished
from jaxinfer.weights.open import ConvertedFiles
from tests.weights.files import refused

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
SPECS: dict[str, Any] = {
    "embed": {"table": ParamSpec((6, 8), ("vocab", "embed"))},
    "layers_0": {
        "qkv": ParamSpec((8, 2, 6, 4), ("embed", "kv_heads", "group", "head_dim")),
        "codes": ParamSpec((2, 6), ("mlp", None), dtype="int4"),
        "odd": ParamSpec((2, 3), ("mlp", None), dtype="uint4"),
        "scale": ParamSpec((), (), dtype="float32"),
        "kept": ParamSpec((3,), (None,), dtype="float32"),
    },
    "bias": ParamSpec((8,), (None,), init="zeros"),
}


def random_params(dtype: str = "bfloat16") -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def one(spec: ParamSpec) -> jax.Array:
        kind = spec.dtype or dtype
        if kind in ("int4", "uint4"):
            low = -8 if kind == "int4" else 0
            return jnp.asarray(rng.integers(low, low + 16, spec.shape), kind)
        return jnp.asarray(rng.standard_normal(spec.shape), kind) * (spec.init != "zeros")

    return jax.tree.map(one, SPECS, is_leaf=lambda x: isinstance(x, ParamSpec))


def restored(folder: pathlib.Path, specs: Any = SPECS, dtype: str = "auto", **settings: Any) -> dict[str, Any]:
    return load_params(ConvertedCheckpoint(folder, read_manifest(folder)), specs, dtype, **settings)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("converted") / "model"
    save_params(folder, random_params(), SPECS, CONFIG)
    return folder


@pytest.fixture
def folder(original: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the folder, for tests that damage it."""
    return pathlib.Path(shutil.copytree(original, tmp_path / "model"))


def file_of(folder: pathlib.Path, name: str, chunk: int = 0) -> pathlib.Path:
    array = read_manifest(folder).arrays[name]
    return folder / array_folder(name) / list(array.chunks())[chunk]


def test_every_bit_comes_back(original: pathlib.Path) -> None:
    assert_same(restored(original), random_params())
    assert not (original / UNFINISHED).exists()


def test_orbax_restores_it(original: pathlib.Path) -> None:
    params, checkpointer = random_params(), ocp.PyTreeCheckpointer()
    tree = checkpointer.restore(original / "params" / "layers_0")
    assert_same(tree["qkv"], np.asarray(params["layers_0"]["qkv"]))
    assert_same(checkpointer.restore(original / "params" / "bias")["value"], np.asarray(params["bias"]))
    composite = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    both = composite.restore(original / "params", args=ocp.args.Composite(embed=ocp.args.PyTreeRestore()))
    assert_same(both["embed"]["table"], np.asarray(params["embed"]["table"]))


def test_another_dtype_is_rounded_to_nearest(original: pathlib.Path, tmp_path: pathlib.Path) -> None:
    wide = restored(original, dtype="float32")
    assert_same(wide["layers_0"]["qkv"], random_params()["layers_0"]["qkv"].astype("float32"))
    save_params(tmp_path / "wide", random_params("float32"), SPECS, CONFIG)
    assert_same(restored(tmp_path / "wide", dtype="bfloat16"), random_params())


def test_a_value_too_large_is_refused(tmp_path: pathlib.Path) -> None:
    specs = {"a": ParamSpec((2,), (None,))}
    save_params(tmp_path / "a", {"a": jnp.asarray([1.0, 1e6])}, specs, CONFIG)
    with refused("array 'a' of .* holds values too large for float16"):
        restored(tmp_path / "a", specs, "float16")


def test_nan_is_looked_for_on_request(tmp_path: pathlib.Path) -> None:
    specs = {"a": ParamSpec((2,), (None,))}
    save_params(tmp_path / "a", {"a": jnp.asarray([1.0, jnp.nan])}, specs, CONFIG)
    assert np.isnan(restored(tmp_path / "a", specs)["a"][1])
    with refused("array 'a' of .* holds NaN or infinite values as float32"):
        restored(tmp_path / "a", specs, check_finite=True)


@pytest.mark.parametrize(
    "index", [(), (slice(0, 1), slice(None)), (slice(None), slice(1, 4)), (slice(1, 2), slice(3, 6))]
)
def test_parts_of_paired_values(original: pathlib.Path, index: Any) -> None:
    found: dict[tuple[str, ...], Any] = {}
    restored(original, place=lambda path, spec, fill: found.update({path: fill(index if path[-1] == "codes" else ())}))
    whole = np.asarray(random_params()["layers_0"]["codes"])
    assert_same(found["layers_0", "codes"], whole[index])


def test_progress_reaches_the_end(original: pathlib.Path) -> None:
    told: list[tuple[int, int, str]] = []
    restored(original, progress=lambda *each: told.append(each))
    assert sorted(name for _, _, name in told) == sorted(array_name(path) for path, _ in walk_specs(SPECS))
    assert told[-1][0] == told[-1][1] == read_manifest(original).nbytes


# ---- chunks and slices


@pytest.mark.parametrize(
    ("shape", "axes", "want"),
    [
        ((4096, 1024), ("mlp", None), (512, 1024)),  # 8 MB of bfloat16: 8 chunks
        ((4096, 1024), (None, "mlp"), (4096, 128)),
        ((1000, 8192), ("vocab", None), (125, 8192)),  # the largest count that divides it
        ((1024, 1024), ("mlp", None), (512, 1024)),  # 2 MB: no chunk below 1 MB
        ((4096, 4096), (None, None), (4096, 4096)),
        ((8, 2, 1024, 512), ("expert", None, "expert_mlp", None), (2, 2, 256, 512)),
        ((), (), ()),
    ],
)
def test_chunks_go_along_the_borders_of_devices(shape: Any, axes: Any, want: Any) -> None:
    assert chunk_of(shape, axes, 2) == want


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("devices", [1, 2])
def test_parts_with_copies(copies: int, devices: int) -> None:
    plain = ParamSpec((3, 2, 4 + 2, 2), ("embed", "kv_heads", "group", "head_dim"))
    value = np.arange(np.prod(plain.shape), dtype=np.float32).reshape(plain.shape)
    spec: Any = with_copies({"a": plain}, copies)["a"]
    want, heads = np.asarray(copied(jnp.asarray(value), plain, copies)), spec.shape[1] // devices
    for device in range(devices):
        index = (slice(None), slice(device * heads, (device + 1) * heads), slice(None), slice(None))
        got = np.full((3, heads, *spec.shape[2:]), -1, np.float32)
        for where, part in parts_of_copies(spec, plain.shape, index) or []:
            got[where] = value[part]
        np.testing.assert_array_equal(got, want[index])


def test_what_is_no_copy_is_none() -> None:
    spec = ParamSpec((8, 6, 4), ("kv_heads", "group", "head_dim"))
    assert parts_of_copies(spec, (3, 6, 4), ()) is None
    assert parts_of_copies(spec, (4, 6, 4), ()) is None
    assert parts_of_copies(ParamSpec((8,), (None,)), (4,), ()) is None


def test_only_the_chunks_that_are_asked_for_are_read(folder: pathlib.Path) -> None:
    """A missing chunk does not matter to readers of other chunks."""
    specs = {"a": ParamSpec((2048, 1024), ("mlp", None))}
    target = folder.with_name("chunked")
    save_params(target, {"a": jnp.ones((2048, 1024), "bfloat16")}, specs, CONFIG)
    checkpoint = ConvertedCheckpoint(target, read_manifest(target))
    assert checkpoint.manifest.arrays["a"].grid == (4, 1)
    file_of(target, "a", 2).unlink()
    half = load_params(checkpoint, specs, "auto", lambda path, spec, fill: fill((slice(0, 1024), slice(None))))
    assert half["a"].shape == (1024, 1024)
    with refused("array 'a' of .* cannot be read"):
        load_params(checkpoint, specs, "auto", lambda path, spec, fill: fill((slice(1024, 2048), slice(None))))


# ---- damage


def flip(path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(folder: pathlib.Path, change: Callable[[Any], object]) -> None:
    plain = json.loads((folder / MANIFEST).read_text())
    change(plain)
    (folder / MANIFEST).write_text(json.dumps(plain))


@pytest.mark.parametrize("at", [0, 5, -5])
def test_any_damaged_byte_is_found(folder: pathlib.Path, at: int) -> None:
    flip(file_of(folder, "embed/table"), at)
    with refused("embed/table/c/0/0 is damaged: it does not have the checksum"):
        restored(folder)


def test_a_chunk_of_another_array_is_found(folder: pathlib.Path) -> None:
    """The checksum of the file's own contents is right."""
    other = folder.with_name("other")
    save_params(other, jax.tree.map(lambda x: x * 2, random_params()), SPECS, CONFIG)
    shutil.copy(file_of(other, "embed/table"), file_of(folder, "embed/table"))
    with refused("is damaged: it does not have the checksum that the manifest has"):
        restored(folder)


def test_a_file_cut_short_is_found_before_anything_is_read(folder: pathlib.Path) -> None:
    path = file_of(folder, "layers_0/qkv")
    path.write_bytes(path.read_bytes()[:-1])
    with refused("has 771 bytes and should have 772: is the copy complete"):
        read_manifest(folder)
    path.unlink()
    with refused("is missing: is the copy complete"):
        read_manifest(folder)
    path.mkdir()
    with refused("is missing"):
        read_manifest(folder)


HUGE = 2**62
BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "format": (lambda m: m.update(format="zip"), "not of the form that this version reads"),
    "version": (lambda m: m.update(version=2), "not of the form that this version reads"),
    "dtype": (lambda m: m.update(dtype="int8"), "names the dtype 'int8'"),
    "dtype of another kind": (lambda m: m.update(dtype=[]), "does not name"),
    "no arrays": (lambda m: m.update(arrays={}), "does not name"),
    "arrays as a list": (lambda m: m.update(arrays=[1]), "does not name"),
    "architecture": (lambda m: m.update(architecture=None), "does not name"),
    "bytes": (lambda m: m.update(bytes=1), "says '1' bytes"),
    "storages": (lambda m: m.update(storages=3), "does not say which weights are quantised"),
    "a path that leads out": (
        lambda m: m["arrays"].update({"../../etc/passwd": m["arrays"]["bias"]}),
        "describes the array '../../etc/passwd' in a form",
    ),
    "an empty name": (lambda m: m["arrays"].update({"": m["arrays"]["bias"]}), "describes the array ''"),
    "a huge shape": (lambda m: m["arrays"]["bias"].update(shape=[HUGE], chunk=[HUGE]), "'bias' in a form"),
    "a shape whose product is huge": (
        lambda m: m["arrays"]["bias"].update(shape=[2**30] * 4, chunk=[2**30] * 4),
        "'bias' in a form",
    ),
    "many chunks": (
        lambda m: m["arrays"]["bias"].update(shape=[2**30], chunk=[1], crc32=["00000000"]),
        "'bias' in a form",
    ),
    "a negative shape": (lambda m: m["arrays"]["bias"].update(shape=[-8]), "'bias' in a form"),
    "a shape of text": (lambda m: m["arrays"]["bias"].update(shape="8"), "'bias' in a form"),
    "a shape of truth": (lambda m: m["arrays"]["bias"].update(shape=[True], chunk=[True]), "'bias' in a form"),
    "many dimensions": (lambda m: m["arrays"]["bias"].update(shape=[1] * 99, chunk=[1] * 99), "'bias' in a form"),
    "a chunk that does not divide": (lambda m: m["arrays"]["bias"].update(chunk=[3]), "'bias' in a form"),
    "a chunk of nothing": (lambda m: m["arrays"]["bias"].update(chunk=[0]), "'bias' in a form"),
    "another dtype": (lambda m: m["arrays"]["bias"].update(dtype="object"), "'bias' in a form"),
    "a dtype as a list": (lambda m: m["arrays"]["bias"].update(dtype=["int8"]), "'bias' in a form"),
    "fewer checksums": (lambda m: m["arrays"]["bias"].update(crc32=[]), "'bias' in a form"),
    "a checksum of another form": (lambda m: m["arrays"]["bias"].update(crc32=["xyz"]), "'bias' in a form"),
    "an array as a number": (lambda m: m["arrays"].update(bias=3), "'bias' in a form"),
    "an array more": (lambda m: m["arrays"].update(more=m["arrays"]["bias"]), "says .* bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_manifest_that_cannot_be(folder: pathlib.Path, name: str) -> None:
    change, sentence = BROKEN[name]
    edit(folder, change)
    with refused(sentence):
        read_manifest(folder)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_manifests_cut_and_mutated_are_refused_or_read(folder: pathlib.Path, count: int) -> None:
    """No other error, and no long runtime."""
    text, rng = (folder / MANIFEST).read_bytes(), np.random.default_rng(0)
    for data in [*cut(text), *(mutated(text, rng) for _ in range(count))]:
        (folder / MANIFEST).write_bytes(data)
        with contextlib.suppress(CheckpointError):
            restored(folder)


def cut(text: bytes) -> list[bytes]:
    return [text[: 1 << power] for power in range(len(text).bit_length())]


def mutated(text: bytes, rng: np.random.Generator) -> bytes:
    """Return text with three bytes replaced, by any byte or by one with a meaning in JSON."""
    data = bytearray(text)
    for at in rng.integers(0, len(text), 3):
        data[at] = rng.integers(0, 256) if rng.random() < 0.5 else ord(rng.choice(list('0123456789-"[]{}:,e')))
    return bytes(data)


def test_a_model_of_another_shape_is_refused(original: pathlib.Path) -> None:
    def changed(**changes: ParamSpec) -> Any:
        return {**SPECS, **changes}

    with refused("'bias' of .* has shape \\[8\\] where the model on these devices asks \\[9\\]"):
        restored(original, changed(bias=ParamSpec((9,), (None,))))
    with refused("holds arrays that the model in config.json has no place for: 'bias'"):
        restored(original, {key: value for key, value in SPECS.items() if key != "bias"})
    with refused("lacks arrays that config.json asks for: 'more'"):
        restored(original, changed(more=ParamSpec((8,), (None,))))
    with refused("'bias' of .* is stored as bfloat16 and cannot be read as int8"):
        restored(original, changed(bias=ParamSpec((8,), (None,), dtype="int8")))


def test_config_and_manifest_of_two_models(folder: pathlib.Path) -> None:
    assert ConvertedFiles.open(folder).config_json["dtype"] == "bfloat16"
    (folder / "config.json").write_text('{"architectures": ["GemmaForCausalLM"]}')
    with refused("was converted as 'LlamaForCausalLM', config.json has another"):
        ConvertedFiles.open(folder)


def test_what_lies_in_zarr_json_is_not_believed(folder: pathlib.Path) -> None:
    for path in folder.rglob("zarr.json"):
        path.write_text('{"shape": [4611686018427387904], "codecs": [{"name": "gzip"}]}')
    assert_same(restored(folder), random_params())


# ---- writing


def test_a_run_goes_on_where_another_was_interrupted(tmp_path: pathlib.Path) -> None:
    target, params = tmp_path / "model", random_params()
    leaves, read = leaves_of(SPECS, params), []

    def failing(name: str, leaf: Leaf) -> Leaf:
        def value() -> Any:
            read.append(name)
            if name == "bias" and len(read) < 8:
                raise KeyboardInterrupt
            return leaf.read()

        return Leaf(leaf.shape, leaf.dtype, leaf.axes, value)

    failing_leaves = {name: failing(name, leaf) for name, leaf in leaves.items()}
    with pytest.raises(KeyboardInterrupt), unfinished(target, {"of": 1}) as started:
        started.write(failing_leaves)
    first, unnamed = list(read), target.with_name("model.unfinished")
    assert not target.exists()
    with (unnamed / UNFINISHED).open("a") as journal:
        journal.write('{"arrays": {"bi')  # as after a power cut
    (unnamed / "params" / "bias.orbax-checkpoint-tmp-1").mkdir()
    with unfinished(target, {"of": 1}) as started:
        started.write(failing_leaves)
        started.finish("LlamaForCausalLM", "bfloat16", {})
    assert read[len(first) :] == ["bias"]
    assert not unnamed.exists()
    assert_same(restored(target), params)
    assert sorted(path.name for path in (target / "params").iterdir()) == ["bias", "embed", "layers_0"]


def test_what_another_run_has_left_is_removed(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "model"
    with unfinished(target, {"of": 1}) as started:
        started.write(leaves_of(SPECS, random_params()))
    with unfinished(target, {"of": 2}) as started:
        assert started.arrays == {}
        assert sorted(path.name for path in started.folder.rglob("*")) == [UNFINISHED]


def test_what_was_noted_of_a_run_is_found_by_the_next(tmp_path: pathlib.Path) -> None:
    for known in ({}, {"a": {"kind": "array"}}):
        with unfinished(tmp_path / "model", {"of": 1}) as started:
            assert started.storages == known
            started.describe({"a": {"kind": "array"}})
            for name in ("kept", "forgotten"):
                (started.folder / name).touch()
            started.keep("kept")
    with unfinished(tmp_path / "model", {"of": 1}) as started:
        assert sorted(path.name for path in started.folder.iterdir()) == [UNFINISHED, "kept"]


def test_a_run_that_was_interrupted_at_its_very_end_is_done_again(tmp_path: pathlib.Path) -> None:
    save_params(tmp_path / "a", random_params(), SPECS, CONFIG)
    (tmp_path / "a").rename(tmp_path / "a.unfinished")
    save_params(tmp_path / "a", random_params(), SPECS, CONFIG)
    assert_same(restored(tmp_path / "a"), random_params())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_nothing_is_written_over(original: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with refused("exists already, and is not written over"):
        save_params(original, random_params(), SPECS, CONFIG)
    (tmp_path / "a.unfinished").mkdir()
    (tmp_path / "a.unfinished" / "thesis.txt").write_text("mine")
    with refused("is in the way: it was not made by an interrupted conversion"):
        save_params(tmp_path / "a", random_params(), SPECS, CONFIG)
    assert (tmp_path / "a.unfinished" / "thesis.txt").exists()


def test_two_at_once_are_refused(tmp_path: pathlib.Path) -> None:
    with unfinished(tmp_path / "a", {}) as started:
        with (started.folder / UNFINISHED).open("a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with refused("is being written by somebody else"), unfinished(tmp_path / "a", {}):
            pass


def test_saving_goes_on_while_the_parameters_change(tmp_path: pathlib.Path) -> None:
    params, want = random_params(), random_params()
    saving = save_params(tmp_path / "a", params, SPECS, CONFIG, wait=False)
    step = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0, x), donate_argnums=0)
    jax.block_until_ready(step(params))
    saving.wait()
    assert saving.done
    assert_same(restored(tmp_path / "a"), want)


def test_what_cannot_be_saved_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="the parameters lack bias"):
        save_params(tmp_path / "a", {**random_params(), "bias": None}, SPECS, CONFIG)
    with pytest.raises(ValueError, match="bias has shape \\(7,\\) where its spec says \\(8,\\)"):
        save_params(tmp_path / "a", {**random_params(), "bias": jnp.ones(7)}, SPECS, CONFIG)
    with pytest.raises(ValueError, match=r"the parameters are of bfloat16, float32"):
        save_params(tmp_path / "a", {**random_params(), "bias": jnp.ones(8)}, SPECS, CONFIG)
    with pytest.raises(ValueError, match="cannot be stored"):
        array_name(("a", "../b"))


def test_paired_values_take_half_a_byte() -> None:
    assert StoredArray((2, 6), "int4", (2, 3)).nbytes == 6
    assert StoredArray((2, 3), "uint4", (2, 3)).nbytes == 6
    assert np.dtype(ml_dtypes.int4).itemsize == 1
