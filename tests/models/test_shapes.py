"""Published config.json files, without allocating weights: parameters and bytes are the published ones."""

import functools
import json
import pathlib

import jax
import pytest

from jaxinfer.models.model import Model, abstract

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs" / "models"

# Parameter counts from model cards and checkpoint index files.
PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "gpt2": 124_439_808,
    "gpt-j-6b": 6_050_882_784,
    "phi-2": 2_779_683_840,
    "falcon-rw-1b": 1_311_625_216,
    "falcon-7b": 6_921_720_704,  # tied head; the hub's files store it a second time
    "falcon-40b": 41_303_293_952,
    "Gemma-2B": 2_506_172_416,
    "Gemma-7B": 8_537_680_896,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-2-27B": 27_227_128_320,
    "Gemma-3-1B": 999_885_952,
    # Text only; without unused keys and values of layers that read other layers', which the hub's files store.
    "Gemma-3n-E2B": 4_435_182_688,
    "Gemma-3n-E4B": 6_835_235_568,
    "Gemma-4-E2B": 4_628_569_379,
    "Gemma-4-E4B": 7_463_013_418,
    "Gemma-4-26B-A4B": 25_233_141_790,
    "Gemma-4-31B": 30_697_345_340,
    "Phi-3-mini-4k": 3_821_079_552,
    "Phi-3-mini-128k": 3_821_079_552,
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_620_634_112,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V3": 671_026_419_200,  # without the MTP layer, as in the next two
    "DeepSeek-V3.2": 671_877_944_064,
    "GLM-5": 743_911_218_432,
    "Kimi-K2": 1_026_408_232_448,
    "GLM-4.5-Air": 106_852_251_264,  # without the MTP layer
    "GLM-4.6": 352_797_829_024,  # 356,785,898,816 with it
    "MiniMax-M2": 228_689_764_864,
    "Qwen3-Next-80B-A3B": 79_674_391_296,  # without MTP, as in the next one
    "Qwen2.5-VL-7B": 7_615_616_512,  # the text models of 8,292,166,656, 73,410,777,344 and 31,070,754,032
    "Qwen2.5-VL-72B": 72_706_203_648,
    "Qwen3-VL-30B-A3B": 30_532_122_624,
    "Qwen3.5-9B": 8_953_803_264,  # the text model
    "Llama-4-Scout": 107_769_861_120,  # the text model of 108,641,793,536
    "ERNIE-4.5-21B-A3B": 21_825_437_888,
    "OLMoE-1B-7B": 6_919_161_856,
    "Phi-3.5-MoE": 41_873_153_344,
    "Seed-OSS-36B": 36_151_104_512,
    "OLMo-2-32B": 32_234_279_936,
    "OLMo-3-7B": 7_298_011_136,
    "SmolLM3-3B": 3_075_098_624,
    "Granite-3.3-8B": 8_170_864_640,
    "Command-R": 34_980_831_232,
    "Command-R7B": 8_028_033_024,
    "Command-A": 111_057_580_032,
    "EXAONE-4.0-32B": 32_003_216_384,
    "ERNIE-4.5-0.3B": 360_748_032,
    "Hunyuan-7B": 7_504_568_320,
    "Pythia-6.9B": 6_857_302_016,
    "StarCoder2-3B": 3_030_371_328,
    "StableLM-3B-4E1T": 2_795_443_200,
    "GLM-4-9B-chat": 9_399_951_360,
    "GLM-4-9B-0414": 9_400_279_040,
    "Mistral-Small-24B": 23_572_403_200,
    "granite-4.0-h-tiny": 6_939_037_248,
    "Nemotron-3-Nano-30B-A3B": 31_577_940_288,
    "Falcon-H1-0.5B": 521_411_104,
    "Gemma-3-27B": 27_009_346_304,  # the text model of 27,432,406,640
    "LFM2-1.2B": 1_170_340_608,
    "LFM2-8B-A1B": 8_339_929_856 + 22 * 32,  # with the expert selection biases
}

# Parameters that stay float32: expert selection biases, weights of indexer heads, decay parameters.
IN_FLOAT32 = {
    "DeepSeek-V3": 58 * 256,
    "DeepSeek-V3.2": 58 * 256 + 61 * 7168 * 64,
    "GLM-5": 75 * 256 + 78 * 6144 * 32,
    "Kimi-K2": 60 * 384,
    "GLM-4.5-Air": 45 * 128,
    "GLM-4.6": 89 * 160,
    "MiniMax-M2": 62 * 256,
    "ERNIE-4.5-21B-A3B": 27 * 64,
    "Qwen3-Next-80B-A3B": 36 * 2 * 32,
    "Qwen3.5-9B": 24 * 2 * 32,
    "granite-4.0-h-tiny": 36 * 3 * 48,
    "Nemotron-3-Nano-30B-A3B": 23 * (3 * 64 + 128),
    "Falcon-H1-0.5B": 36 * 3 * 24,
    "LFM2-8B-A1B": 22 * 32,
}


@functools.cache
def model(name: str) -> Model:
    return abstract(json.loads((CONFIGS / f"{name}.json").read_text()), "bfloat16", name)


def test_every_config_has_its_published_size():
    assert {path.stem for path in CONFIGS.glob("*.json")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str):
    leaves = jax.tree.leaves(model(name).params)
    assert sum(leaf.size for leaf in leaves) == PUBLISHED[name]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == 2 * PUBLISHED[name] + IN_FLOAT32.get(name, 0) * 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_forward_pass_takes_them(name: str):
    described = model(name)
    tokens = jax.ShapeDtypeStruct((1, 16), "int32")
    logits = jax.eval_shape(described.apply, described.params, tokens)
    assert logits.shape == (1, 16, described.config.vocab_size)
