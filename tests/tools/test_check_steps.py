"""The engine's own steps, compiled for a GPU without one: they keep the rules of the check."""

import json
import re

import pytest

from pallas_kernels.check.plugins import default_folder
from tests.gpu_plugins import needs_plugins
from tools.check_programs import __main__ as door
from tools.check_programs.work import Work


def _kinds(part):
    """Return the names of programs without the row counts of smaller decode programs."""
    return {re.sub(r"_\d+", "", name) for name in part.programs}


@pytest.mark.slow
@needs_plugins
def test_the_engines_steps_keep_the_rules():
    """Four layers of Llama-3.1-8B's shape, compiled for an H100."""
    (part,) = door.run(Work("Llama-3.1-8B", door.PAGES, layers=door.QUICK_LAYERS, steps=8), default_folder())
    assert _kinds(part) == {"decode", "decode_many", "prefill", "prefill_logprobs"}
    assert {"decode_2", "decode_8", "decode_16", "decode_32", "decode"} < set(part.programs)
    assert part.broken == []
    unasked = {(name, one.rule) for name, program in part.programs.items() for one in program.findings if not one.asked}
    assert unasked == {("decode_many", "GEMMs with a weight")}


@pytest.mark.slow
@needs_plugins
def test_a_training_step_adds_up_in_the_order_of_the_engine():
    """`Model.logprobs` with a loss and its gradient: chunks and decode steps are the engine's kernels."""
    (part,) = door.run(Work("Llama-3.1-8B", door.PAGES, layers=3, training=True), default_folder())
    assert set(part.programs) == {"decode", "prefill", "prefill_logprobs", "training"}
    assert part.broken == []
    products = {one.rule: one.found for one in part.programs["training"].findings}["GEMMs in loops"]
    assert int(products) == (3 * 4 + 1) + (2 * 4 + 1)  # of a chunk's last layer keys and values alone


STORED = [("Llama-3.1-8B", kind) for kind in ("int4", "nf4", "fp8-activations")] + [("gpt-oss-20b", "mxfp4")]


@pytest.mark.slow
@needs_plugins
@pytest.mark.parametrize(("model", "kind"), STORED)
def test_the_steps_of_stored_weights_keep_the_rules(model, kind):
    """Kernel matmuls, those of experts, and weights dequantised in slices are all in one command buffer."""
    (part,) = door.run(Work(model, door.PAGES, layers=2, weights=kind), default_folder())
    assert part.broken == []
    asked = {one.rule for one in part.programs["prefill"].findings if one.asked}
    assert {"waits of the host", "command buffers", "plain numbers of stored weights"} <= asked


@pytest.mark.slow
@needs_plugins
def test_the_steps_of_sums_that_do_not_divide_keep_the_rules():
    """XLA would pad the first layer's down projection, of 10944 inputs, in each decode step."""
    (part,) = door.run(Work("DeepSeek-V2-Lite", door.PAGES, layers=2, gemm="xla"), default_folder())
    assert part.broken == []


def _keeps_the_rules_of_drafts(work: Work) -> None:
    (part,) = door.run(work, default_folder())
    assert {"decode", "draft"} < set(part.programs)
    assert part.broken == []
    asked = {one.rule for one in part.programs["draft"].findings if one.asked}
    assert {"waits of the host", "command buffers", "sorts", "kernels a layer"} <= asked


@pytest.mark.slow
@needs_plugins
def test_the_steps_of_a_draft_model_keep_the_rules():
    """The host waits for nothing between drafting and the step that verifies."""
    work = Work("Llama-3.1-8B", door.PAGES, layers=door.QUICK_LAYERS, drafts=True, draft_layers=2)
    _keeps_the_rules_of_drafts(work)


@pytest.mark.slow
@needs_plugins
def test_the_steps_of_a_draft_head_keep_the_rules():
    """The step keeps the features that the head reads, and the head drafts, without the host."""
    work = Work("Llama-3.1-8B", door.PAGES, layers=door.QUICK_LAYERS, drafts=True, head="eagle3")
    _keeps_the_rules_of_drafts(work)


@pytest.mark.slow
@needs_plugins
def test_the_steps_of_adapters_keep_the_rules():
    """Kernels multiply every adapted weight, in one command buffer, and no bank is moved."""
    (part,) = door.run(Work("Llama-3.1-8B", door.PAGES, layers=door.QUICK_LAYERS, adapters=5), default_folder())
    plain = {"decode", "prefill", "prefill_logprobs"}
    assert _kinds(part) == plain | {f"{name}_adapted" for name in plain}
    assert part.broken == []
    asked = {one.rule for one in part.programs["decode_adapted"].findings if one.asked}
    assert {"waits of the host", "command buffers", "sorts", "kernels a layer"} <= asked


@pytest.mark.slow
@needs_plugins
def test_steps_of_a_model_with_states(tmp_path):
    """A layer of each kind of Qwen3-Next: states are donated and planned for, and the host does not wait."""
    two = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    config = Work("Qwen3-Next-80B-A3B", door.PAGES).config() | two
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (part,) = door.run(Work(str(tmp_path), door.PAGES), default_folder())
    assert part.broken == []
    assert all(program.kernels > 0 for program in part.programs.values())
