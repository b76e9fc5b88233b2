"""Mapping of logical axes to mesh axes by one table."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxinfer.config import EngineConfigError
from jaxinfer.models.registry import family_for
from jaxinfer.parallel.mesh import AXES, RULES, make_mesh, param_sharding, traced_for, traced_size
from jaxinfer.types import ParamSpec
from tests.fakes import llama_json


def test_there_is_always_a_mesh():
    mesh = make_mesh()
    assert mesh.axis_names == AXES
    assert mesh.devices.size == 1
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_heads_and_mlp_go_to_all_devices():
    mesh = make_mesh()
    spec = ParamSpec((32, 2, 48), ("embed", None, "mlp"))
    assert param_sharding(mesh, spec).spec == PartitionSpec(None, None, ("expert", "tensor"))


def test_every_logical_axis_of_a_family_is_known():
    config_json = llama_json(attention_bias=True, mlp_bias=True)
    family = family_for(config_json)
    tree = family.param_specs(family.config(config_json))
    specs = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ParamSpec))
    assert all(len(spec.axes) == len(spec.shape) for spec in specs)
    replicated = {"embed", "norm", "all_heads", "group", "head_dim", "router", None}
    assert {axis for spec in specs for axis in spec.axes} <= replicated | RULES.keys()


def test_more_devices_than_there_are_is_refused_with_what_to_do():
    with pytest.raises(EngineConfigError) as refused:
        make_mesh(8, jax.devices()[:1])
    assert str(refused.value) == (
        "tensor_parallel_size = 8 needs 8 devices, and there is 1 (cpu); to try it on a CPU, start with "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    )


def test_both_sizes_are_named():
    with pytest.raises(EngineConfigError, match="expert_parallel_size x tensor_parallel_size = 4 x 2 needs 8 devices"):
        make_mesh(2, jax.devices()[:1], expert=4)
    with pytest.raises(EngineConfigError, match="expert_parallel_size = 0 must be at least 1"):
        make_mesh(expert=0)


def test_programs_that_are_traced_for_no_mesh_have_one_device():
    assert traced_size("heads") == 1
    with traced_for(make_mesh()):
        assert traced_size("heads") == 1
    eight = jax.sharding.AbstractMesh((1, 1, 1, 2, 4), AXES, axis_types=(AxisType.Auto,) * 5)
    with jax.sharding.use_abstract_mesh(eight):
        sizes = {axis: traced_size(axis) for axis in ("heads", "expert", "expert_mlp", "norm")}
    assert sizes == {"heads": 8, "expert": 2, "expert_mlp": 4, "norm": 1}
