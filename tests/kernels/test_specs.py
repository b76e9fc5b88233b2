"""Specs of kernels: each op has its own, and check, tuner and trials find those of a new op by its folder."""

import dataclasses
import importlib
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import specs
from pallas_kernels.check import ops
from pallas_kernels.launches import Launch
from pallas_kernels.operands import MOST_SETS, Case, Draw, operand_sets, sets_beyond_cache
from pallas_kernels.specs import Spec, Tunable, shaped
from pallas_kernels.trial.cases import case_of
from pallas_kernels.tune import kernels


@pytest.mark.parametrize("folder", specs.op_folders(), ids=lambda folder: folder.name)
def test_every_op_declares_what_is_compiled_tried_and_tuned(folder):
    module = specs.specs_of(folder.name)
    assert all(isinstance(one, Spec) for one in module.SHIPPED)
    assert module.SHIPPED
    assert callable(module.trial_case)
    assert hasattr(module, "TUNED") == (folder / "tiles.json").exists()


def test_a_new_op_is_found_by_its_folder(tmp_path):
    for path in ("plain/xla.py", "one/mosaic.py", "two/hopper/decode.py", "two/arg_specs.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert [folder.name for folder in specs.op_folders(tmp_path)] == ["one", "two"]
    assert specs.forgotten(tmp_path) == ["one"]


def test_an_op_without_specs_can_neither_be_compiled_nor_tuned_nor_tried(monkeypatch):
    folders = [pathlib.Path("one")]
    monkeypatch.setattr(ops, "op_folders", lambda: folders)
    monkeypatch.setattr(specs, "op_folders", lambda: folders)
    launch = Launch("one.sum", jnp.sum, jnp.sum, (shaped(3, dtype="float32"),), {})
    for use in (ops.shipped, lambda: case_of(launch, 0), lambda: importlib.reload(kernels)):
        with pytest.raises(ModuleNotFoundError, match=r"pallas_kernels\.one"):
            use()


@dataclasses.dataclass(frozen=True)
class Sum(Spec):
    rows: int = 3
    op = "one.sum"
    name = "3"
    kernel = staticmethod(jnp.sum)

    def arguments(self):
        return (shaped(self.rows, dtype="float32"),)


def test_the_specs_of_a_new_op_are_compiled_tuned_and_tried(monkeypatch):
    tunable = Tunable("one.sum", frozenset(), (Sum(),), lambda *_: None)
    module = types.ModuleType("pallas_kernels.one.arg_specs")
    module.SHIPPED, module.TUNED = (Sum(),), (tunable,)
    module.trial_case = lambda draw, x: Case((draw.normal(x),))
    monkeypatch.setitem(sys.modules, "pallas_kernels.one", types.ModuleType("pallas_kernels.one"))
    monkeypatch.setitem(sys.modules, "pallas_kernels.one.arg_specs", module)
    folders = [*specs.op_folders(), pathlib.Path("one")]
    monkeypatch.setattr(ops, "op_folders", lambda: folders)
    assert Sum() in ops.shipped()
    assert case_of(Launch("one.sum", jnp.sum, jnp.sum, Sum().arguments(), {}), 0).operands[0].shape == (3,)
    with monkeypatch.context() as patched:
        patched.setattr(specs, "op_folders", lambda: folders)
        assert importlib.reload(kernels).TUNABLES[-1] is tunable
    importlib.reload(kernels)


def test_a_tuned_shape_is_parsed_from_its_numbers_and_names():
    tunable = Tunable("one.sum", frozenset(), (Sum(),), lambda *_: None)
    assert tunable.shape("rows=8") == Sum(8)
    with pytest.raises(ValueError, match="colour"):
        tunable.shape("colour=8")


def test_operand_sets_differ_in_one_array():
    like = shaped(64, dtype="bfloat16")
    first, second, third = operand_sets(lambda draw: (draw.normal(like), draw.normal(like), None), varied=1, count=3)
    assert first[0] is second[0] is third[0]
    assert len({each[1].tobytes() for each in map(jax.device_get, (first, second, third))}) == 3


@pytest.mark.parametrize(("size", "count"), [(1, MOST_SETS), (1 << 30, 2), (32 << 20, 4)])
def test_operand_sets_exceed_the_cache(size, count):
    assert sets_beyond_cache(size) == count


def test_distinct_numbers_are_distinct_and_scattered():
    found = Draw(0).distinct(shaped(4, 8, dtype="int32"), 40).ravel().tolist()
    assert len(set(found)) == 32
    assert all(0 <= one < 40 for one in found)
    assert found != sorted(found)
