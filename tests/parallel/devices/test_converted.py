"""A converted folder loads onto any mesh, bitwise identical to its source folder."""

import pathlib

import jax
import numpy as np
import pytest

from jaxinfer.convert import Conversion, convert
from jaxinfer.loading import load_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.types import ParamSpec
from jaxinfer.weights import load_params, on_devices
from jaxinfer.weights.native.manifest import array_folder, read_manifest
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.native.writer import save_params


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    target = tmp_path_factory.mktemp("converted") / "demo"
    convert(Conversion("demo", target))
    return target


MESHES = {
    "one device": {},
    "TP 2": {"tensor": 2},
    "TP 8, more than KV heads": {"tensor": 8},
    "stages": {"tensor": 2, "stage": 2},
    "replicas": {"tensor": 2, "data": 2},
}


@pytest.mark.parametrize("name", MESHES)
def test_the_same_parts_on_the_same_devices(folder: pathlib.Path, name: str) -> None:
    mesh = make_mesh(**MESHES[name])
    want = load_model("demo", mesh=mesh, show_progress=False).params
    got = load_model(str(folder), mesh=mesh, show_progress=False).params
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.sharding == theirs.sharding
        for own, other in zip(mine.addressable_shards, theirs.addressable_shards, strict=True):
            assert own.device == other.device
            np.testing.assert_array_equal(np.asarray(own.data), np.asarray(other.data))


def test_a_device_s_part_needs_no_chunk_of_another_s(tmp_path: pathlib.Path) -> None:
    """Devices with the second half read no chunk of the first half, whose files are deleted."""
    specs, mesh = {"a": ParamSpec((4096, 512), ("mlp", None))}, make_mesh(8)
    value = np.arange(4096 * 512, dtype=np.int32).reshape(4096, 512).astype(np.float32)
    save_params(tmp_path / "a", {"a": value}, specs, {"architectures": ["A"]})
    checkpoint = ConvertedCheckpoint(tmp_path / "a", read_manifest(tmp_path / "a"))
    files = list(checkpoint.manifest.arrays["a"].chunks())
    assert len(files) == 8
    for file in files[:4]:
        (tmp_path / "a" / array_folder("a") / file).unlink()
    second = jax.sharding.NamedSharding(
        jax.sharding.Mesh(mesh.devices.reshape(8)[4:], ("x",)), jax.sharding.PartitionSpec("x")
    )

    def place(path: tuple[str, ...], spec: ParamSpec, fill: object) -> jax.Array:
        def own(index: tuple[slice, ...]) -> np.ndarray:
            low = 2048 + (index[0].start or 0)
            return fill((slice(low, low + 512), slice(None)))  # type: ignore[operator]

        half = ParamSpec((2048, 512), spec.axes)
        return on_devices(second, half, own)

    got = load_params(checkpoint, specs, "float32", place)["a"]
    np.testing.assert_array_equal(np.asarray(got), value[2048:])
