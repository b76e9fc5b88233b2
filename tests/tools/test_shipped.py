"""The shipped configurations in the check of compiled programs: shortened layers, and cached arrays of each."""

import dataclasses

import jax
import pytest

from jaxinfer.types import VISION
from pallas_kernels.check.plugins import default_folder
from tests.gpu_plugins import needs_plugins
from tests.tools.test_check_programs import part_of
from tools.check_programs import __main__ as door
from tools.check_programs.expected import expected_tower
from tools.check_programs.programs import model_of, plan
from tools.check_programs.rules import FITS
from tools.check_programs.shipped import broken, fewest_layers, header, lines, shipped
from tools.check_programs.work import MODELS, Finding, Work, shortened


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Llama-3.1-8B", 3),
        ("DeepSeek-V3", 5),  # dense ones, then experts
        ("Gemma-4-E2B", 11),  # two kinds, of which the last read the first ones' keys
        ("Gemma-4-31B", 7),  # the last layer has full attention at any depth
        ("granite-4.0-h-tiny", 7),  # rejected with layers of one kind
        ("Nemotron-3-Nano-30B-A3B", 7),
    ],
)
def test_each_kind_of_layer_is_before_the_last(name: str, layers: int):
    assert fewest_layers(name) == layers


def test_all_are_shipped_unless_some_are_named():
    assert [work.model for work in shipped(["gpt2"])] == ["gpt2"]
    assert next(shipped([])).model == min(path.stem for path in MODELS.glob("*.json"))


def test_half_of_the_layers_read_the_others_keys():
    config = {"num_hidden_layers": 8, "num_kv_shared_layers": 6, "hybrid_override_pattern": "MEM*MEM*", "kinds": "of"}
    short = shortened(config, 3)
    assert short == {**config, "num_hidden_layers": 3, "num_kv_shared_layers": 1, "hybrid_override_pattern": "MEM"}


@pytest.mark.parametrize(
    ("name", "layers", "whole", "tail"),
    [
        ("Llama-3.1-8B", 2, 1, 1),  # only keys and values of the last layer
        ("Gemma-4-E2B", 10, 4, 2),  # nothing of the five that read other layers'; a projection before all of them
        ("GLM-5", 2, 1, 2),  # a latent and an index key
        ("Falcon-H1-0.5B", 2, 1, 4),  # one of attention, three of a recurrence
        ("Nemotron-3-Nano-30B-A3B", 9, 7, 3),  # the experts after the last layer with a cache are left out
    ],
)
def test_a_chunk_needs_what_the_cache_keeps(name: str, layers: int, whole: int, tail: int):
    should = plan(Work(name, 64, layers=layers), 0, jax.devices()[:1]).should
    assert should.gemms("prefill") == (should.layers[:whole], tail)
    assert should.gemms("decode") == (should.layers, 1 + (name == "Gemma-4-E2B"))


def test_experts_without_a_gate_are_a_matrix_all_the_same():
    should = plan(Work("Nemotron-3-Nano-30B-A3B", 64, layers=6), 0, jax.devices()[:1]).should
    assert should.layers[:2] == (4, 5)  # a recurrence; router, two of the experts, two of the shared experts


@pytest.mark.parametrize(
    ("name", "published", "layer", "tail", "widest"),
    [
        ("Qwen2.5-VL-7B", 8_292_166_656, 4, 3, 2 * 3420),  # patches, and two of the merger
        ("Qwen2.5-VL-72B", 73_410_777_344, 4, 3, 2 * 3456),
        ("Qwen3-VL-30B-A3B", 31_070_754_032, 4, 9, 4304),  # three further mergers
    ],
)
def test_a_vision_model_has_its_published_tower(name: str, published: int, layer: int, tail: int, widest: int):
    model = model_of(Work(name, 64))
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == published
    should = expected_tower(model.specs[VISION], 2)
    assert set(should.layers) == {layer}
    assert len(should.layers) == model.vision.config.depth
    assert (should.tail, should.widest) == (tail, widest)
    assert should.weights == sum(2 * leaf.size for leaf in jax.tree.leaves(model.params[VISION]))


def test_a_vision_model_of_few_layers_keeps_the_last_ones_of_its_tower():
    kept = Work("Qwen2.5-VL-7B", 64, layers=3).published()["vision_config"]
    assert (kept["depth"], kept["fullatt_block_indexes"]) == (3, [2])
    kept = Work("Qwen3-VL-30B-A3B", 64, layers=12).published()["vision_config"]
    assert (kept["depth"], kept["deepstack_visual_indexes"]) == (12, [1, 9])


def test_images_are_planned_for():
    planned = plan(Work("Qwen2.5-VL-7B", 64, layers=3), 0, jax.devices()[:1])
    assert planned.engine.encoder_sizes == (256, 512, 1024, 2048, 4096, 8192, 16384)
    assert planned.needs.images == 2 * planned.engine.encoder_cache_size * 3584
    assert planned.needs.weights == planned.should.weights
    assert planned.should.gemms("decode") == ((4,) * 3, 1)  # the tower is no part of it


def test_convolutions_are_no_gemms():
    assert plan(Work("Falcon-H1-0.5B", 64, layers=2), 0, jax.devices()[:1]).should.layers == (8, 8)


def test_a_router_that_is_asked_twice_is_two_products():
    should = plan(Work("Gemma-3n-E2B", 64, layers=10), 0, jax.devices()[:1]).should
    # Two of attention, two of the MLP, two low-rank, two of embeddings; of streams the router, twice, and two.
    assert should.layers == (12,) * 10
    assert should.gemms("prefill") == ((12,) * 4, 1 + 3 + 3)  # streams: made, and predicted by the fifth layer


def test_queries_of_latent_attention_are_the_widest():
    should = plan(Work("DeepSeek-V3", 64, layers=1), 0, jax.devices()[:1]).should
    assert should.widest == 128 * (512 + 64)


def test_a_configuration_is_a_line():
    line = lines(Work("gpt2", 1, layers=2), [part_of()])
    assert line == "| gpt2 | 2 | 14.2, 14.2 | 0 | 5 s |"
    assert header().splitlines()[1].count("|") == line.count("|")
    assert list(broken(Work("gpt2", 1, layers=2), [part_of("first")])) == ["gpt2, 2 layers, stage 2: first: 1 of 2"]


def test_whether_a_few_layers_fit_is_not_asked():
    too_large = Finding(FITS, "2", "1", False)
    part = dataclasses.replace(part_of("second"), findings=(too_large,))
    assert list(broken(Work("gpt2", 1, layers=2), [part])) == [
        f"gpt2, 2 layers, stage 2, {program}: second: 1 of 2" for program in ("decode", "prefill")
    ]


@pytest.mark.slow
@needs_plugins
def test_the_steps_for_an_a100_keep_the_rules():
    (part,) = door.run(Work("Llama-3.1-8B", door.PAGES, layers=2, target="a100"), default_folder())
    assert part.broken == []


@pytest.mark.slow
@needs_plugins
def test_a_vision_model_keeps_the_rules():
    (part,) = door.run(Work("Qwen2.5-VL-7B", door.PAGES, layers=3), default_folder())
    assert {"encode_256", "encode_1024", "encode_4096", "encode_16384"} < set(part.programs)
    assert part.broken == []
    asked = {one.rule for one in part.programs["encode_16384"].findings if one.asked}
    assert {"waits of the host", "command buffers", "sorts"} <= asked


@pytest.mark.slow
@needs_plugins
def test_a_configuration_of_many_experts_keeps_the_rules(capsys: pytest.CaptureFixture[str]):
    assert door.main(["--shipped", "Qwen3-Next-80B-A3B"]) == 0
    assert "| Qwen3-Next-80B-A3B | 5 |" in capsys.readouterr().out
