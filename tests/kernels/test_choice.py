"""Path choice depends on the target that a program is lowered for."""

import jax
import pytest

from pallas_kernels.choice import Choice, Target, choose, lowering_target

HOPPER = Target("gpu", (9, 0))


class Hopper(jax.sharding.AbstractDevice):
    compute_capability = "9.0"


def test_without_an_abstract_device_the_default_one_counts():
    assert lowering_target() == Target("cpu", device_kind="cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        assert lowering_target() == Target("cpu", device_kind="cpu")
    with jax.default_device("cpu"):
        assert lowering_target() == Target("cpu")


def test_an_abstract_device_is_what_is_lowered_for_also_while_tracing():
    seen = []
    device = Hopper(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        jax.eval_shape(jax.jit(lambda x: (seen.append(lowering_target()), x)[1]), 1)
    assert seen == [Target("gpu", (9, 0), "NVIDIA H100")]


def test_a_gpu_of_unknown_capability_takes_xla():
    device = jax.sharding.AbstractDevice(device_kind="another GPU", num_cores=100, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert choose("op", "auto", None).path == "xla"


@pytest.mark.parametrize(
    ("target", "refusal", "path", "why"),
    [
        (Target("cpu"), None, "xla", "platform cpu"),
        (Target("gpu", (8, 0)), None, "xla", "is 8.0"),
        (Target("gpu", (10, 0)), None, "xla", "is 10.0"),
        (Target("gpu"), None, "xla", "unknown"),
        (HOPPER, "head_dim 7: no.", "xla", "head_dim 7: no."),
        (HOPPER, None, "mosaic", "9.0"),
    ],
)
def test_auto(target, refusal, path, why):
    chosen = choose("op", "auto", refusal, target=target)
    assert chosen.path == path
    assert why in chosen.why


def test_a_path_can_be_forced_on_every_platform():
    assert choose("op", "mosaic", None, target=Target("cpu")).path == "mosaic"
    assert choose("op", "xla", None, target=HOPPER) == Choice("xla", "The XLA path was asked for.")
    with pytest.raises(ValueError, match="no page"):
        choose("op", "mosaic", "no page", target=HOPPER)
