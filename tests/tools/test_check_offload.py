"""The check of copies from host memory, and the programs of an H100: the copies overlap computation."""

import dataclasses
import re

import pytest

from pallas_kernels.check.plugins import default_folder
from tests.gpu_plugins import needs_plugins
from tools.check_programs.__main__ import run
from tools.check_programs.offload import _findings, copies
from tools.check_programs.work import Work

HLO = """\
HloModule jit_decode, is_scheduled=true

ENTRY %main (w0: bf16[4,8], w1: bf16[4,8], x: bf16[2,4]) -> bf16[2,8] {
  %w0 = bf16[4,8]{1,0:S(5)} parameter(0)
  %w1 = bf16[4,8]{1,0:S(5)} parameter(1)
  %x = bf16[2,4]{1,0} parameter(2)
  %copy-start.0 = (bf16[4,8]{1,0}, bf16[4,8]{1,0:S(5)}, u32[]) copy-start(%w0)
  %copy-done.0 = bf16[4,8]{1,0} copy-done(%copy-start.0)
  %copy-start.1 = (bf16[4,8]{1,0}, bf16[4,8]{1,0:S(5)}, u32[]) copy-start(%w1)
  %view = bf16[32]{0} bitcast(%copy-done.0)
  %y = bf16[2,8]{1,0} custom-call(%x, %view), custom_call_target="mosaic_gpu_v2"
  %copy-start.2 = (bf16[2,8]{1,0:S(5)}, bf16[2,8]{1,0}, u32[]) copy-start(%y)
  %copy-done.1 = bf16[4,8]{1,0} copy-done(%copy-start.1)
  %copy-done.2 = bf16[2,8]{1,0:S(5)} copy-done(%copy-start.2)
  ROOT %z = bf16[2,8]{1,0} custom-call(%y, %copy-done.1), custom_call_target="mosaic_gpu_v2"
}
"""


def test_kernels_during_a_copy_are_counted():
    assert dict(copies(HLO)) == {"copy-start.0": 0, "copy-start.1": 1}


def test_arguments_in_host_memory_that_are_not_copied_are_found():
    named = re.sub(r"parameter\((\d)\)", r"""parameter(\1), metadata={op_name="params['w\1']"}""", HLO)
    held = {one.rule: one.holds for one in _findings(named)}
    assert held == {"copies beside the program": True, "copies that nothing overlaps": False}
    alone = re.sub(r"  %copy-(start|done).1 .*\n", "", named).replace("%copy-done.1", "%w1")
    assert not {one.rule: one.holds for one in _findings(alone)}["copies beside the program"]


def test_work_with_weights_in_host_memory_says_so():
    work = Work("Llama-3.1-8B", 64, layers=4, offload=0.5)
    assert "0.5 GiB in host memory" in str(work)
    assert "host" not in str(dataclasses.replace(work, offload=0.0))


@pytest.mark.slow
@needs_plugins
@pytest.mark.parametrize(
    "work",
    [
        Work("Llama-3.1-8B", 64, layers=4, offload=100.0),
        Work("Llama-3.1-8B", 64, layers=6, offload=1.0),
        Work("Llama-3.1-8B", 64, layers=4, offload=100.0, weights="int8"),
        Work("Llama-3.1-8B", 64, layers=4, offload=100.0, tensor=2),
        Work("Mixtral-8x7B", 64, layers=3, offload=1.0),
    ],
    ids=str,
)
def test_copies_overlap_the_computation_on_a_gpu(work: Work):
    (part,) = run(work, default_folder())
    assert {"decode", "prefill_logprobs"} < set(part.programs)
    assert part.broken == []
