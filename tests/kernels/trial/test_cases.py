"""Operands for kernel trials: every op has some, and the XLA path passes when compared with itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launches import exclude, excluded, note, readmit, recording
from pallas_kernels.specs import op_folders
from pallas_kernels.trial.cases import case_of
from pallas_kernels.trial.program import checking
from tests.kernels.trial.launches import LAUNCHES, of


def test_every_op_with_a_kernel_can_be_tried():
    assert {LAUNCHES[name]().op.split(".")[0] for name in LAUNCHES} == {folder.name for folder in op_folders()}


@pytest.mark.parametrize("name", LAUNCHES)
def test_operands_are_those_of_the_launch(name):
    """Operands have the dtypes and ranks of the launch (pools, states and experts may be smaller) and finite values."""
    launch = LAUNCHES[name]()
    given, drawn = jax.tree.leaves(launch.operands), jax.tree.leaves(jax.jit(lambda: case_of(launch, 0).operands)())
    assert [(x.dtype, len(x.shape)) for x in given] == [(x.dtype, x.ndim) for x in drawn]
    floats = [x for x in drawn if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(np.isfinite(np.asarray(x, np.float32)).all() and np.asarray(x, np.float32).any() for x in floats)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_right_and_a_wrong_kernel_are_told_apart(name):
    """The XLA path passes in place of the kernel, and fails with one vector of a result changed."""
    launch = LAUNCHES[name]()
    assert jax.jit(checking(launch._replace(kernel=launch.plain)))(0) <= 0.5

    def wrong(*operands, **options):
        first, *rest = jax.tree.leaves(result := launch.plain(*operands, **options))
        at = (0,) * (first.ndim - 1)
        changed = first.at[at].set((first[at].astype(jnp.float32) * 0.8 + 3).astype(first.dtype))
        return jax.tree.unflatten(jax.tree.structure(result), [changed, *rest])

    assert jax.jit(checking(launch._replace(kernel=wrong)))(0) > 1


def test_launches_are_noted_once_by_what_they_do():
    one, other = LAUNCHES["decode"](), LAUNCHES["decode, every option"]()
    assert one.key == LAUNCHES["decode"]().key != other.key
    with recording() as found:
        for _ in range(2):
            note("op", abs, abs, of(2), flag=True)
    note("op", abs, abs, of(3))
    ((launch,)) = found.values()
    assert (launch.operands, launch.options) == ((of(2),), {"flag": True})


@pytest.fixture
def nothing_excluded():
    yield
    readmit()


@pytest.mark.usefixtures("nothing_excluded")
def test_an_op_that_was_excluded_is_xlas():
    """Excluded ops use XLA; forcing the kernel path is rejected with the reason."""
    exclude("paged_attention.decode", "it hung")
    assert excluded("paged_attention.decode") == "it hung"
    with pytest.raises(ValueError, match="it hung"):
        LAUNCHES["decode"]()
    assert LAUNCHES["prefill"]()
