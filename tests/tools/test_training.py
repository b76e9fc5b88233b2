"""The check of a trainer's compiled step: sums in its loops are those of the engine's programs, by any names."""

import pytest

from tools.check_programs.hlo import read_module
from tools.check_programs.training import findings

KERNEL = 'backend_config={"fusion_backend_config":{"kind":"__triton","sizes":["1","8"]}}'
GEMM = 'custom_call_target="mosaic_gpu_v2", operand_layout_constraints={bf16[2,4]{1,0}, bf16[4,8]{1,0}}'
MATMUL = 'metadata={op_name="jit(decode)/mlp/matmul/mpmd_map"}'
ATTENTION = 'metadata={op_name="jit(decode)/paged_decode/mpmd_map"}'
POOL = 'custom_call_target="mosaic_gpu_v2", operand_layout_constraints={bf16[2,4]{1,0}, bf16[9,2,8,64,128]{4,3,2,1,0}}'


def program(name, reduced="f32[2,8]", config=KERNEL, pages=9, loop=True):
    """Return a module with a norm, a product and attention, in the entry or in a loop."""
    body = f"""\
  %x.{name} = bf16[2,4]{{1,0}} parameter(0)
  %norm.{name} = f32[2]{{0}} fusion(%x.{name}), kind=kCustom, calls=%sum.{name}, metadata={{op_name="{name}"}}, {config}
  %product.{name} = bf16[2,8]{{1,0}} custom-call(%x.{name}, %w), {GEMM}, {MATMUL}
  ROOT %seen.{name} = bf16[2,4]{{1,0}} custom-call(%x.{name}, %p), {POOL}, {ATTENTION}
""".replace("[9,2,", f"[{pages},2,")
    fused = f"""\
%sum.{name} (p.{name}: {reduced}) -> f32[2] {{
  %p.{name} = {reduced}{{1,0}} parameter(0)
  ROOT %r.{name} = f32[2]{{0}} reduce(%p.{name}, %zero), dimensions={{1}}, to_apply=%add
}}

"""
    if not loop:
        return f"HloModule jit_{name}\n\n{fused}ENTRY %main (x: bf16[2,4]) -> bf16[2,4] {{\n{body}}}\n"
    entry = """\
ENTRY %main (x: bf16[2,4]) -> bf16[2,4] {
  %x = bf16[2,4]{1,0} parameter(0)
  %ours = f32[16]{0} reduce(%x, %zero), dimensions={1}, to_apply=%add
  ROOT %loop = bf16[2,4]{1,0} while(%x), condition=%more, body=%step
}
"""
    return f"HloModule jit_{name}\n\n{fused}%step (x.{name}: bf16[2,4]) -> bf16[2,4] {{\n{body}}}\n\n{entry}"


def broken(trainer):
    engine = read_module(program("decode", loop=False))
    return {one.rule: one.found for one in findings(read_module(trainer), [engine]) if one.broken}


def test_equal_sums_have_any_names_and_a_pool_of_any_size():
    assert broken(program("loss", pages=3)) == {}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"reduced": "f32[8,2]"}, "norm.loss"),
        ({"config": KERNEL.replace('"1"', '"2"')}, "norm.loss"),
    ],
)
def test_a_sum_of_another_shape_or_in_other_tiles_is_found(change, found):
    assert broken(program("loss", **change)) == {"sums of loops beside the engine's": found}


def test_a_product_of_another_shape_or_by_xla_is_found():
    wider = broken(program("loss").replace("bf16[2,8]{1,0} custom-call", "bf16[4,8]{1,0} custom-call"))
    assert wider == {"sums of loops beside the engine's": "product.loss"}
    other = program("loss").replace(f"custom-call(%x.loss, %w), {GEMM}, {MATMUL}", "dot(%x.loss, %w)")
    assert broken(other) == {"sums of loops beside the engine's": "product.loss", "GEMMs in loops": "0"}
