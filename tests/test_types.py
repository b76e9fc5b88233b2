"""Records that cross the rooms: what a cache is."""

from jaxinfer.types import CacheSpec, LayerSpec


def test_a_part_of_the_layers_keeps_the_groups_of_all():
    """A pipeline stage reads the block tables of the whole model: the second group is the second, also where it is
    the only one."""
    layers = tuple(LayerSpec(window) for window in (None, 8, None, 8))
    spec = CacheSpec(layers, kv_heads=2, head_dim=4)
    part = spec.part(slice(3, 4))
    assert (part.layers, part.windows, part.group(layers[3])) == (layers[3:], (None, 8), 1)
    assert spec.part(slice(0, 2)).bytes_per_page(16, 2) == spec.bytes_per_page(16, 2, stages=2)
    assert CacheSpec(layers[:3], 2, 4).bytes_per_page(16, 2, stages=2) == spec.bytes_per_page(16, 2) // 2
