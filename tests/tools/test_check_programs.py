"""The check of compiled programs: its reading of HLO and of what is launched, its rules, and the engine's own steps."""

import dataclasses

import pytest

from pallas_kernels.check.plugins import PluginsMissing, default_folder, require_plugins
from tools.check_programs import __main__ as door
from tools.check_programs.hlo import read_launches, read_module
from tools.check_programs.rules import Step, findings, kernels_per_layer, moved_arrays, weight_gemms

GEMM = 'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
# Two layers of one GEMM each, then the head's; a pool of 2 x 64 numbers, weights of 4 x 8; 2 tokens a step.
HLO = f"""\
HloModule jit_decode, is_scheduled=true

%gemm_body (p0: bf16[4,8], p1: f32[2,4]) -> f32[2,8] {{
  %p0 = bf16[4,8]{{1,0}} parameter(0)
  %converted = f32[4,8]{{1,0}} convert(%p0)
  ROOT %dot = f32[2,8]{{1,0}} dot(%p1, %converted)
}}

%scatter_body (p0: bf16[2,64]) -> bf16[2,64] {{
  %p0 = bf16[2,64]{{1,0}} parameter(0)
  %scattered = bf16[2,64]{{1,0}} scatter(%p0)
  ROOT %view = bf16[2,64]{{1,0}} bitcast(%scattered)
}}

ENTRY %main (w0: bf16[4,8], w1: bf16[4,8], pool: bf16[2,64]) -> (bf16[2,64]) {{
  %w0 = bf16[4,8]{{1,0}} parameter(0), metadata={{op_name="params"}}
  %w1 = bf16[4,8]{{1,0}} parameter(1)
  %pool = bf16[2,64]{{1,0}} parameter(2)
  %view.1 = bf16[32]{{0}} bitcast(%w0)
  %gemm_a = f32[2,8]{{1,0}} fusion(%view.1, %x), kind=kCustom, calls=%gemm_body, {GEMM}
  %written = bf16[2,64]{{1,0}} fusion(%pool), kind=kInput, calls=%scatter_body
  %attended = f32[2,8]{{1,0}} custom-call(%written), custom_call_target="mosaic_gpu_v2"
  %gemm_b = f32[2,8]{{1,0}} fusion(%w1, %attended), kind=kCustom, calls=%gemm_body, {GEMM}
  %other = f32[2,8]{{1,0}} fusion(%attended, %attended), kind=kCustom, calls=%gemm_body, {GEMM}
  ROOT %out = (bf16[2,64]{{1,0}}) tuple(%written)
}}
"""
THUNKS = """\
000: kCommandBuffer [source       | next=152 (1)]
    001: kCustomKernel [source       | next=002 (1)] gemm_fusion_dot_4 grid: [1, 1, 1]
    002: kCustomCall   [prev=001 (2) | sink        ] kCustomCall
    097: kConditional  [prev=075 (1) | next=098 (1)]
      true_branch:
        003: kCopy [source | sink] kCopy
    004: kCustomKernel [prev=009 (1) | next=011 (1)] gemm_fusion_dot_5 grid: [1, 1, 1]
152: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    005: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=111 (1)]
        006: kGemm [source       | sink        ] kGemm
"""


def make_step(**changes):
    fields = {
        "name": "decode",
        "module": read_module(HLO),
        "launches": read_launches(THUNKS),
        "weights": 2,
        "pool": 128,
        "tokens": 2,
        "widest": 8,
        "layers": 2,
        "head": 1,
        "donated": 256,
        "aliased": 256,
        "temporaries": 10,
        "ceiling": 10,
        "arguments": 1000,
        "planned": 1000,
    }
    return Step(**{**fields, **changes})


def with_line(line, calls=""):
    """The program with one more instruction in its entry, and one more computation."""
    return read_module(calls + HLO.replace("  ROOT %out", f"  {line}\n  ROOT %out"))


def test_gemms_are_those_that_read_a_weight():
    assert [one.name for one in weight_gemms(make_step())] == ["gemm_a", "gemm_b"]


def test_a_pool_may_be_scattered_into_and_a_weight_converted_within_a_kernel():
    assert moved_arrays(make_step()) == []


@pytest.mark.parametrize(
    "line",
    [
        "%bad = bf16[2,64]{0,1} copy(%pool)",
        "%bad = f32[4,8]{1,0} convert(%w0)",
        "%bad = bf16[8,4]{1,0} transpose(%w1), dimensions={1,0}",
        "%bad = bf16[64]{0} dynamic-slice(%pool, %i), dynamic_slice_sizes={1,64}",
        '%bad = bf16[2,64]{1,0} custom-call(%pool), custom_call_target="mosaic_gpu_v2"',
    ],
)
def test_a_moved_pool_or_weight_is_found(line):
    assert [one.name for one in moved_arrays(make_step(module=with_line(line)))] == ["bad"]


def test_a_fusion_that_ends_in_a_copy_is_found():
    body = "%copy_body (p0: bf16[2,64]) -> bf16[2,64] {\n  %p0 = bf16[2,64]{1,0} parameter(0)\n"
    body += "  ROOT %copied = bf16[2,64]{0,1} copy(%p0)\n}\n\n"
    module = with_line("%bad = bf16[2,64]{0,1} fusion(%pool), kind=kLoop, calls=%copy_body", body)
    assert [one.name for one in moved_arrays(make_step(module=module))] == ["bad"]


def test_an_aliased_call_writes_in_place():
    line = (
        '%good = bf16[2,64]{1,0} custom-call(%pool), custom_call_target="x", output_to_operand_aliasing={{}: (0, {})}'
    )
    assert moved_arrays(make_step(module=with_line(line))) == []


def test_launches_know_their_command_buffer():
    launches = read_launches(THUNKS)
    assert [launch.buffer for launch in launches] == [0, 0, 0, 0, None, 1]
    assert [launch.is_gemm for launch in launches] == [True, False, False, True, False, True]


def test_kernels_of_a_layer_are_counted_from_gemm_to_gemm():
    assert kernels_per_layer(make_step()) == 3


def rule(step, name):
    return next(one for one in findings(step) if one.rule.startswith(name))


def test_rules_hold_or_are_broken():
    step = make_step()
    assert rule(step, "GEMMs").broken  # this program has one a layer
    assert not rule(step, "donated").broken
    assert rule(dataclasses.replace(step, aliased=128), "donated").broken
    assert not rule(step, "temporaries").broken
    assert rule(dataclasses.replace(step, temporaries=11), "temporaries").broken
    assert not rule(step, "kernels").broken
    assert rule(step, "command buffers").broken  # the last GEMM lies in a loop's


def test_exchanges_among_devices_are_counted():
    layer = "%sum = f32[2,8]{1,0} all-reduce-start(%gemm_a)\n  %end = f32[2,8]{1,0} all-reduce-done(%sum)"
    step = make_step(module=with_line(layer), arguments=1021)
    assert rule(step, "all-reduces").broken  # one device has nobody to ask
    assert not rule(make_step(), "all-reduces").broken
    of_two = dataclasses.replace(step, devices=2, layers=0)
    assert not rule(of_two, "all-reduces").broken
    assert rule(of_two, "all-gathers").broken
    assert rule(step, "bytes").broken
    assert not rule(dataclasses.replace(step, arguments=1019), "bytes").broken


def test_kernels_are_not_counted_where_attention_loops():
    looping = make_step(module=with_line("%loop = (f32[2,8]) while(%w0), condition=%c, body=%b"))
    assert not rule(looping, "command buffers").broken
    assert not rule(looping, "command buffers").holds


def _have_plugins():
    try:
        require_plugins(default_folder())
    except PluginsMissing:
        return False
    return True


@pytest.mark.skipif(not _have_plugins(), reason="needs JAX's CUDA plugin: make check-kernels installs it")
def test_the_engines_steps_keep_the_rules():
    """At the shape of Llama-3.1-8B, four of its layers, compiled for an H100."""
    found = door.run("llama-3.1-8b", door.QUICK_LAYERS, door.PAGES, "auto", default_folder())
    assert set(found) == {"decode", "prefill", "prefill_logprobs"}
    assert [one for some in found.values() for one in some if one.broken] == []
    assert all(one.asked for some in found.values() for one in some)


@pytest.mark.slow
@pytest.mark.skipif(not _have_plugins(), reason="needs JAX's CUDA plugin: make check-kernels installs it")
@pytest.mark.parametrize("devices", [4, 8])
def test_the_steps_of_several_gpus_keep_the_rules(devices):
    """At the shape of Llama-3.1-70B, compiled for H100s of one machine."""
    found = door.run("llama-3.1-70b", door.QUICK_LAYERS, door.PAGES, "auto", default_folder(), devices)
    assert set(found) == {"decode", "prefill", "prefill_logprobs"}
    assert [one for some in found.values() for one in some if one.broken] == []
