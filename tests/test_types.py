"""Records shared between packages: cache specs."""

from jaxinfer.types import CacheSpec, LayerSpec


def test_a_part_of_the_layers_keeps_the_groups_of_all():
    """A pipeline stage reads the block tables of the whole model: the second group keeps its index even where it is
    the only one."""
    layers = tuple(LayerSpec(window) for window in (None, 8, None, 8))
    spec = CacheSpec(layers, kv_heads=2, head_dim=4)
    part = spec.part(slice(3, 4))
    assert (part.layers, part.windows, part.group(layers[3])) == (layers[3:], (None, 8), 1)
    assert spec.part(slice(0, 2)).bytes_per_page(16, 2) == spec.bytes_per_page(16, 2, stages=2)
    assert CacheSpec(layers[:3], 2, 4).bytes_per_page(16, 2, stages=2) == spec.bytes_per_page(16, 2) // 2


def test_layers_of_unlike_sizes_have_pools_and_bytes_of_their_own():
    layers = (LayerSpec(8), LayerSpec(kv_heads=1, head_dim=16), LayerSpec(8), LayerSpec(8))
    spec = CacheSpec(layers, kv_heads=2, head_dim=4)
    assert [spec.pool_shape(3, 16, layer=layer) for layer in layers[:2]] == [(3, 2, 2, 16, 4), (3, 2, 1, 16, 16)]
    assert spec.stored_as("int8").scales_shape(3, 16, layer=layers[1]) == (3, 2, 1, 16)
    assert spec.bytes_per_page(16, 2) == 2 * 2 * 16 * (3 * 8 + 16)
    assert spec.bytes_per_page(16, 2, stages=2) == 2 * 2 * 16 * (8 + 16), "the stage that has most"
    assert spec.stored_as("int8").bytes_per_page(16, 2) == 2 * 16 * (3 * (8 + 2 * 4) + 16 + 4)
    assert (spec.exact_per_token, spec.stored_as("int8").exact_per_token) == (2 * (3 * 8 + 16), 2 * (3 * 2 + 1))
    spread = CacheSpec((LayerSpec(kv_heads=4, head_dim=2), LayerSpec()), kv_heads=2, head_dim=4).on_each(2)
    assert [spread.sizes(layer) for layer in spread.layers] == [(2, 2), (1, 4)]
