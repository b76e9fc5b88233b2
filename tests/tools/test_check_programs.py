"""The check of compiled programs: parsing of HLO and launches, and its rules."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest

from tools.check_programs.hlo import read_launches, read_module, read_waits
from tools.check_programs.moves import of_moves
from tools.check_programs.programs import plan
from tools.check_programs.rules import (
    OF_STATES,
    Step,
    findings,
    kernels_per_layer,
    moved_arrays,
    multiplied,
    of_assembler,
    of_partitioner,
    of_stage,
    plain_bytes,
    stored_sizes,
    weight_gemms,
)
from tools.check_programs.topologies import TOPOLOGIES, broken, header, lines
from tools.check_programs.work import GPUS, MODELS, Finding, Part, Program, Work

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
  %w0 = bf16[4,8]{{1,0}} parameter(0), metadata={{op_name="params['w0']"}}
  %w1 = bf16[4,8]{{1,0}} parameter(1), metadata={{op_name="params['w1']"}}
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
        "pool": 128,
        "tokens": 2,
        "widest": 8,
        "logits": 0,
        "layers": (1, 1),
        "tail": 1,
        "donated": 256,
        "aliased": 256,
        "temporaries": 10,
        "arguments": 1000,
        "planned": 1000,
    }
    return Step(**{**fields, **changes})


def with_line(line, calls=""):
    """Return the program with one more instruction in its entry, and one more computation."""
    return read_module(calls + HLO.replace("  ROOT %out", f"  {line}\n  ROOT %out"))


def test_gemms_are_those_that_read_a_weight():
    assert [one.name for one in weight_gemms(make_step())] == ["gemm_a", "gemm_b"]


PADDED = """\
%padding (p0: bf16[4,8]) -> bf16[6,8] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  ROOT %padded = bf16[6,8]{1,0} pad(%p0, %zero), padding=0_2x0_0
}

"""


def test_a_weight_that_is_filled_up_with_zeros_is_read_all_the_same():
    """XLA pads to split a sum into equal parts; another rule reports a copy of a large weight."""
    lines = "%filled = bf16[6,8]{1,0} fusion(%w1), kind=kLoop, calls=%padding\n"
    lines += f"  %gemm_c = f32[2,8]{{1,0}} fusion(%filled, %x), kind=kCustom, calls=%gemm_body, {GEMM}"
    step = make_step(module=with_line(lines, PADDED))
    assert [one.name for one in weight_gemms(step)] == ["gemm_a", "gemm_b", "gemm_c"]
    other = make_step(module=with_line(lines.replace("(%w1)", "(%w1, %x)"), PADDED))
    assert [one.name for one in weight_gemms(other)] == ["gemm_a", "gemm_b"]
    for tokens in (1, 64):  # the weight is larger than an activation, or smaller
        assert [one.name for one in moved_arrays(make_step(tokens=tokens, module=step.module))] == ["filled"]


def test_a_gemm_of_two_weights_counts_for_both():
    both = f"%gemm_c = f32[2,16]{{1,0}} fusion(%w0, %w1, %x), kind=kCustom, calls=%gemm_body, {GEMM}"
    step = make_step(module=with_line(both))
    assert list(multiplied(step)) == [1, 1, 2]
    assert list(multiplied(dataclasses.replace(step, widest=32))) == [1, 1, 1]  # as small as a bias
    parts = HLO.replace("params['w0']", "params['w'].arrays['codes']")
    parts = parts.replace("params['w1']", "params['w'].arrays['scales']")
    stored = make_step(module=read_module(parts.replace("  ROOT %out", f"  {both}\n  ROOT %out")))
    assert list(multiplied(stored)) == [1, 1, 1]  # codes and scales are one weight


CODES = HLO.replace("w1: bf16[4,8]", "w1: s4[4,8]").replace("%w1 = bf16[4,8]", "%w1 = s4[4,8]")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%made = bf16[4,8]{1,0} fusion(%w1), kind=kLoop, calls=%gemm_body", 64),
        ("%view.2 = s4[32]{0} bitcast(%w1)\n  %made = f32[2,8]{1,0} fusion(%view.2), kind=kLoop, calls=%gemm_body", 64),
        ("%other.2 = s8[4,8]{1,0} convert(%w1)", 0),
        ("%other.2 = bf16[4,8]{1,0} convert(%w0)", 0),
    ],
)
def test_plain_numbers_of_codes_are_found(line, found):
    module = read_module(CODES.replace("  ROOT %out", f"  {line}\n  ROOT %out"))
    step = make_step(module=module)
    assert stored_sizes(step) == {32}
    assert plain_bytes(step, {32}) == found
    assert rule(step, "plain numbers").broken == (found > 0)
    assert not rule(dataclasses.replace(step, dequantized=True), "plain numbers").broken  # in slices


def test_in_a_loop_plain_numbers_are_found_too():
    given = "%codes = s4[4,8]{1,0} get-tuple-element(%p0), index=1"
    piece = "%made = bf16[2,8]{1,0} fusion(%codes), kind=kLoop, calls=%gemm_body"
    body = "\n  ".join(["%step (p0: f32[2,8]) -> f32[2,8] {", "%p0 = f32[2,8]{1,0} parameter(0)", given, piece])
    module = read_module(f"{body}\n}}\n\n{CODES.replace('  ROOT %out', f'  {LOOP}' + chr(10) + '  ROOT %out')}")
    assert plain_bytes(make_step(module=module), {32}) == 32


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


def test_an_activation_of_a_weights_size_may_be_moved():
    large = make_step(tokens=4, module=with_line("%good = bf16[8,4]{1,0} transpose(%gemm_a), dimensions={1,0}"))
    assert moved_arrays(large) == []
    read = make_step(tokens=4, module=with_line("%bad = bf16[8,4]{1,0} transpose(%view.1), dimensions={1,0}"))
    assert [one.name for one in moved_arrays(read)] == ["bad"]
    part = "%part = f32[4,8]{1,0} get-tuple-element(%gemm_a), index=0"
    scaled = "%good = f32[2,64]{1,0} pad(%gemm_a, %w0)"
    assert moved_arrays(make_step(tokens=16, module=with_line(scaled))) == []
    made = make_step(tokens=4, module=with_line(f"{part}\n  %good = f32[2,4,4]{{2,1,0}} pad(%part, %zero)"))
    assert moved_arrays(made) == []


def test_launches_know_their_command_buffer():
    launches = read_launches(THUNKS)
    assert [launch.buffer for launch in launches] == [0, 0, 0, 0, None, 1]
    assert [launch.is_gemm for launch in launches] == [True, False, False, True, False, True]


def test_the_host_reads_what_no_command_buffer_holds():
    assert read_waits(THUNKS) == ["kWhile 152"]  # and not the branch within the first command buffer
    within = """\
116: kConditional   [source       | next=152 (1)]
  branch_computations:
    000: kCommandBuffer [source       | sink        ]
        007: kWhile [source | sink] kWhile
    075: kWhile         [prev=000 (1) | sink        ]
"""
    assert read_waits(within) == ["kConditional 116", "kWhile 075"]


def test_kernels_of_a_layer_are_counted_from_gemm_to_gemm():
    assert kernels_per_layer(make_step()) == 3


METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "mpmd_map.7"
    thunk_id: 97
  }
  thunk_kind: "kCustomCall"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "fusion.3"
    thunk_id: 1
  }
}
"""


def test_products_of_our_own_kernels_are_gemms_among_launches():
    """Custom calls are unnamed in the launch list; their metadata has the name."""
    call = '%mpmd_map.7 = f32[2,8]{1,0} custom-call(%x, %w1), custom_call_target="mosaic_gpu_v2", '
    call += 'metadata={op_name="jit(decode)/mosaic_gpu/quant_matmul/call"}'
    thunks = THUNKS.replace(
        "    097: kConditional  [prev=075 (1) | next=098 (1)]", "    097: kCustomCall [source | sink] kCustomCall"
    )
    launches = read_launches(thunks, METADATA)
    assert [launch.name for launch in launches[:3]] == ["gemm_fusion_dot_4", "kCustomCall", "mpmd_map.7"]
    step = make_step(module=with_line(call), launches=launches)
    assert kernels_per_layer(step) == 2
    assert kernels_per_layer(dataclasses.replace(step, launches=read_launches(thunks))) == 4


def rule(step, name):
    return next(one for one in findings(step) if one.rule.startswith(name))


def test_rules_hold_or_are_broken():
    step = make_step()
    assert rule(step, "GEMMs").broken  # this program has one per layer
    assert not rule(step, "donated").broken
    assert rule(dataclasses.replace(step, aliased=128), "donated").broken
    assert not rule(step, "temporaries").broken
    assert rule(dataclasses.replace(step, temporaries=step.ceiling + 1), "temporaries").broken
    assert not rule(step, "kernels").broken
    assert not rule(step, "waits").broken
    assert rule(dataclasses.replace(step, waits=("kWhile 152",)), "waits").found == "kWhile 152"
    assert rule(dataclasses.replace(step, waits=("kWhile 152",)), "waits").broken


def test_adapters_may_have_kernels_and_rows_of_their_own():
    many = "".join(
        f"    {number:03}: kCustomKernel [a] fusion_{number} grid: [1, 1, 1]\n" for number in range(200, 214)
    )
    launches = read_launches(THUNKS.replace("    002:", many + "    002:"))
    assert kernels_per_layer(make_step(launches=launches)) == 17
    assert rule(make_step(launches=launches), "kernels").broken
    adapted = make_step(launches=launches, adapters=5)
    assert not rule(adapted, "kernels").broken
    assert adapted.largest == (2 + 5 * 32) * 8
    assert make_step(logits=1000, adapters=5).largest == 2 * 1024  # buffers of the sampler, in lanes
    assert make_step(experts=True).largest == 8 * 8  # two rows of an expert, padded


ONE_BUFFER = THUNKS[: THUNKS.index("152:")]


def test_recurrences_may_have_kernels_of_their_own():
    most, found = (int(rule(make_step(states=kept), "kernels a layer").limit) for kept in (False, True))
    assert found == most + OF_STATES


def test_kernels_of_a_layer_are_limited_by_what_it_has():
    limits = {
        name: int(rule(make_step(**{name: True} if name else {}), "kernels a layer").limit)
        for name in ("", "head_norms", "out_norms", "rounded", "by_kernel")
    }
    assert limits == {"": 16, "head_norms": 21, "out_norms": 17, "rounded": 19, "by_kernel": 9}
    assert int(rule(make_step(rounded=True, by_kernel=True), "kernels a layer").limit) == 10
    beside = make_step(states=True, both=True, convolutions=2, layers=(8, 8))
    assert int(rule(beside, "kernels a layer").limit) == 16 + OF_STATES + 6 + 5 + 4
    assert int(rule(make_step(streams=True, layers=(5,)), "kernels a layer").limit) == 16 + 10 + 1
    assert int(rule(make_step(experts=True, layers=(9,)), "kernels a layer").limit) == 16 + 24
    assert int(rule(make_step(experts=True, tokens=4096), "kernels a layer").limit) == 16 + 24 + 5


def test_all_launches_are_in_one_command_buffer():
    assert not rule(make_step(launches=read_launches(ONE_BUFFER)), "command buffers").broken
    cut = rule(make_step(), "command buffers")
    assert (cut.found, cut.broken) == ("2, 1 launches outside", True)
    beside = ONE_BUFFER + "153: kCopy [prev=000 (1) | sink] kCopy\n"
    assert rule(make_step(launches=read_launches(beside)), "command buffers").broken
    none = "000: kGemm [source | sink] kGemm\n001: kGemm [source | sink] kGemm\n"
    assert rule(make_step(launches=read_launches(none)), "command buffers").broken
    assert not rule(make_step(devices=2), "command buffers").broken  # collectives split the command buffer


@pytest.mark.parametrize(
    "line",
    [
        "%sorted = (f32[2,8]{1,0}, s32[2,8]{1,0}) sort(%gemm_a, %places), dimensions={1}, to_apply=%less",
        '%sorted = (f32[2,8]{1,0}, u8[64]{0}) custom-call(%gemm_a), custom_call_target="xla.gpu.ext.cub_sort_pairs"',
    ],
)
def test_a_sort_is_found_anywhere(line):
    assert not rule(make_step(), "sorts").broken
    assert rule(make_step(module=with_line(line)), "sorts").broken
    branch = f"%some (p0: f32[2,8]) -> f32[2,8] {{\n  %gemm_a = f32[2,8]{{1,0}} parameter(0)\n  {line}\n}}\n\n"
    assert rule(make_step(module=with_line("%other.1 = f32[2,8]{1,0} bitcast(%gemm_a)", branch)), "sorts").broken


def test_in_a_loop_what_it_was_given_may_not_be_moved():
    given = "%w0.1 = bf16[4,8]{1,0} get-tuple-element(%p0), index=1"
    activation = "%good = bf16[8,4]{1,0} transpose(%made), dimensions={1,0}"
    weight = "%bad = bf16[8,4]{1,0} transpose(%w0.1), dimensions={1,0}"
    step = make_step(tokens=4, module=with_line(LOOP, body_of_loop(given, activation, weight)), repeats=True)
    assert [one.name for one in moved_arrays(step)] == ["bad"]


LOOP = "%loop = (f32[2,8]{1,0}) while(%start), condition=%more, body=%step"


def body_of_loop(*lines):
    return "\n  ".join(["%step (p0: f32[2,8]) -> f32[2,8] {", "%p0 = f32[2,8]{1,0} parameter(0)", *lines]) + "\n}\n\n"


def test_of_several_steps_the_body_is_asked():
    """The multi-step loop must be inside a command buffer; a loop within it is attention's."""
    step = make_step(module=with_line(LOOP, body_of_loop()), repeats=True)
    assert rule(step, "waits").asked
    assert rule(dataclasses.replace(step, waits=("kWhile 152",)), "waits").broken
    assert not rule(step, "GEMMs").asked
    assert not rule(dataclasses.replace(step, repeats=False), "waits").asked
    within = make_step(module=with_line(LOOP, body_of_loop(LOOP)), repeats=True)
    assert not rule(within, "waits").asked


def test_exchanges_among_devices_are_counted():
    layer = "%sum = f32[2,8]{1,0} all-reduce-start(%gemm_a)\n  %end = f32[2,8]{1,0} all-reduce-done(%sum)"
    step = make_step(module=with_line(layer), arguments=1021)
    assert rule(step, "all-reduces").broken  # a single device needs none
    assert not rule(make_step(), "all-reduces").broken
    of_two = dataclasses.replace(step, devices=2, sums=1, gathers=1)
    assert not rule(of_two, "all-reduces").broken
    assert rule(of_two, "all-gathers").broken
    assert rule(step, "bytes").broken
    assert not rule(dataclasses.replace(step, arguments=1019), "bytes").broken


def test_logits_alone_may_be_gathered():
    gathering = with_line("%all = f32[2,16]{1,0} all-gather(%gemm_b), dimensions={1}")
    step = make_step(module=gathering, devices=2, gathers=1, logits=16)
    assert not rule(step, "all-gathers").broken
    assert not rule(step, "gathered").broken
    assert rule(dataclasses.replace(step, logits=8), "gathered").broken


def stage_rule(name, **changes):
    sizes = {"planned": 1000, "compiled": 1019, "weights": 7, "declared": 7, "target": "h100", **changes}
    return next(one for one in of_stage(**sizes) if one.rule == name)


def test_a_device_holds_what_was_planned_and_what_it_has_room_for():
    near, room = "bytes of a device, as planned", "bytes of a device"
    assert not stage_rule(near).broken
    assert stage_rule(near, compiled=1021).broken
    assert stage_rule(near, compiled=979).broken
    assert not stage_rule(room, compiled=72 * 10**9).broken
    assert stage_rule(room, compiled=72 * 10**9 + 1).broken
    assert not stage_rule(room, compiled=126 * 10**9, target="h200").broken
    assert stage_rule(room, compiled=127 * 10**9, target="h200").broken
    assert all(stage_rule(room, compiled=200 * 10**9, target=name).broken for name in GPUS)
    assert not stage_rule("weights, as declared").broken
    assert stage_rule("weights, as declared", weights=8).broken


OUT = """\
  %gathered = bf16[1,4]{1,0} fusion(%pool), kind=kLoop, calls=%body
  %copy-start.1 = (bf16[1,4]{1,0:S(5)}, bf16[1,4]{1,0}, u32[]) copy-start(%gathered)
  ROOT %copy-done.1 = bf16[1,4]{1,0:S(5)} copy-done(%copy-start.1)
"""


def moves_broken(text: str = OUT, name: str = "export_1", **changes: int) -> set[str]:
    """Return the broken rules of a program that moves a page of 8 bytes."""
    found = {"output": 0, "argument": 100, "alias": 0, "temp": 10, "host_output": 8, "host_argument": 0, **changes}
    memory = SimpleNamespace(**{f"{kind}_size_in_bytes": size for kind, size in found.items()})
    program = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory)
    rules = of_moves({name: program, "copy": None}, page=8, donated=100)
    return {one.rule for one in rules if one.broken}


def test_pages_move_beside_the_program_and_leave_the_pools_in_place():
    assert moves_broken() == set()
    assert moves_broken(name="restore_1", alias=100, output=100) == set()
    assert moves_broken(OUT.replace("S(5)", "S(0)")) == {"export_1: copies beside the program"}
    assert moves_broken(OUT + OUT) == {"export_1: copies beside the program"}
    assert moves_broken(host_output=16) == {"export_1: bytes on the host"}
    assert moves_broken(name="restore_1", alias=99, output=99) == {"restore_1: bytes in place"}
    assert moves_broken(temp=2 << 20) == {"export_1: temporaries"}
    exchanged = OUT + "  %all-gather.1 = bf16[1,4]{1,0} all-gather(%gathered)"
    assert moves_broken(exchanged) == {"export_1: exchanges"}
    two = {"export_2: copies beside the program", "export_2: bytes on the host"}
    assert moves_broken(name="export_2") == two


def test_what_the_partitioner_gives_up_is_found():
    said = "E1121 spmd_partitioner.cc:650] [spmd] Involuntary full rematerialization. The compiler was not able to go"
    assert of_partitioner(said).broken
    assert not of_partitioner("W1121 sort_rewriter.cc:798] Missing deviceless CUB scratch size data").broken


def test_a_kernel_that_spills_is_found():
    said = "ptxas warning : Registers are spilled to local memory in function '{}', {} bytes spill stores"
    for name, size, spills in (("decode", 8, True), ("fusion_97", 161, True), ("fusion_97", 148, False)):
        found = of_assembler(said.format(name, size))
        assert (found.found, found.broken) == (name if spills else "none", spills)
    assert not of_assembler("").broken


def test_a_transfer_to_the_host_is_found():
    assert not rule(make_step(), "transfers").broken
    assert rule(make_step(module=with_line("%out.1 = bf16[4,8]{1,0:S(5)} copy(%w0)")), "transfers").broken


def test_scores_of_a_vision_tower_are_activations():
    step, scores = make_step(), make_step(scores=1 << 20)
    assert (step.largest, scores.largest) == (16, 1 << 20)
    assert scores.ceiling == step.ceiling + (8 << 20)
    looping = make_step(scores=1, module=with_line(LOOP, body_of_loop()))
    assert rule(looping, "command buffers").asked
    assert not rule(looping, "kernels a layer").asked


ENCODER = {"name": "encode_256", "scores": 1 << 20, "launches": read_launches(ONE_BUFFER)}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pools or weights", {"module": with_line("%filled = bf16[6,8]{1,0} fusion(%w1), calls=%padding", PADDED)}),
        ("transfers", {"module": with_line("%out.1 = bf16[4,8]{1,0:S(5)} copy(%w0)")}),
        ("waits", {"waits": ("kWhile 152",)}),
        ("waits", {"waits": ("kWhile 152",), "devices": 8, "module": with_line(LOOP, body_of_loop())}),
        ("sorts", {"module": with_line("%sorted = f32[2,8]{1,0} sort(%gemm_a), to_apply=%less")}),
        ("command buffers", {"launches": read_launches(THUNKS)}),
        ("GEMMs", {"tail": 2}),
        ("temporaries", {"temporaries": 1 << 30}),
    ],
)
def test_an_encoder_program_can_break_each_rule(name, changes):
    broken = {one.rule for one in findings(make_step(**ENCODER, layers=(1,))) if one.broken}
    assert broken == set()
    assert rule(make_step(**{**ENCODER, "layers": (1,), **changes}), name).broken


def test_hidden_states_may_be_gathered_where_they_are_spread():
    line = "%part = f32[1,8]{1,0} reduce-scatter(%gemm_a)\n  %all = f32[2,8]{1,0} all-gather(%part), dimensions={0}"
    step = make_step(module=with_line(line), devices=2, gathers=1, scatters=1, gathered=8)
    assert not any(rule(step, name).broken for name in ("all-gathers", "reduce-scatters", "other", "gathered"))
    assert rule(dataclasses.replace(step, gathered=0), "gathered").broken
    assert rule(dataclasses.replace(step, scatters=0), "reduce-scatters").broken


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_every_shipped_configuration_can_be_asked_for(name):
    planned = plan(Work(name, pages=64), 0, jax.devices()[:1])
    assert planned.engine.max_model_len == min(4096, planned.stage.model.config.max_position)
    assert len(planned.should.layers) == len(planned.stage.model.config.layers) > 1


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gpt2", "phi-2"])
def test_some_layers_may_be_asked_for(name):
    assert len(plan(Work(name, pages=64, layers=2), 0, jax.devices()[:1]).should.layers) == 2


def part_of(*broken):
    """Return a stage in which the named rules are broken."""
    rules = [Finding(name, "1", "2", name not in broken) for name in ("first", "second")]
    program = Program(1, 2, 3, 1, 14.2, (rules[1],))
    return Part(1, 10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9, 5.4, {"decode": program, "prefill": program}, (rules[0],))


def test_what_a_process_found_is_read_by_another():
    part = part_of("second")
    assert Part.read(json.loads(json.dumps(dataclasses.asdict(part)))) == part
    assert [one.rule for one in part.broken] == ["second", "second"]


def test_topologies_are_lines_of_a_table():
    work = Work("Llama-3.1-405B", pages=1, tensor=8, stages=2)
    assert list(broken(work, [part_of("first")])) == ["Llama-3.1-405B, TP8 x PP2, stage 2: first: 1 of 2"]
    line = "| Llama-3.1-405B, TP8 x PP2, stage 2 | 8 | 1.00 | 2.00 | 3.00 | 4.00 | 0.00 | 3, 1 | 14, 14 | 5 s |"
    assert lines(work, [part_of()]) == line
    assert header().splitlines()[1].count("|") == line.count("|")
    assert all(work.config()["architectures"] for work in TOPOLOGIES.values())
    assert str(dataclasses.replace(work, layers=4)) == "Llama-3.1-405B, TP8 x PP2, 4 layers"


def test_fields_of_each_layer_are_cut_with_the_layers():
    assert Work("MiniMax-M2", 1, layers=3).config()["attn_type_list"] == [1] * 3
    kinds = Work("OLMo-3-7B", 1, layers=5).config()["layer_types"]
    assert (len(kinds), kinds[3]) == (5, "full_attention")
    within = Work("Llama-4-Scout", 1, layers=2).config()
    assert (within["num_hidden_layers"], within["architectures"]) == (2, ["Llama4ForCausalLM"])


def test_kernels_are_not_counted_where_attention_loops():
    looping = make_step(module=with_line("%loop = (f32[2,8]) while(%w0), condition=%c, body=%b"))
    assert not rule(looping, "command buffers").broken
    assert not rule(looping, "command buffers").holds
