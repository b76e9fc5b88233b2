"""`python -m jaxinfer.convert --quantize`: flags become a recipe; invalid ones give one sentence."""

import pathlib
import re

import pytest

from jaxinfer import convert
from jaxinfer.cli.convert import make_parser
from jaxinfer.opening import model_folder
from jaxinfer.quantize import BUILT_IN, Recipe, read_calibration
from jaxinfer.quantize.command import recipe_of
from jaxinfer.text import load_tokenizer
from jaxinfer.weights.open import open_model_files
from jaxinfer.weights.safetensors.checkpoint import read_json_object
from tests.quantize.models import folder_of


def test_flags_are_a_recipe():
    flags = "a b --quantize gptq --bits 3 --group-size 64 --no-symmetric --act-order --damp 0.05"
    asked = Recipe("gptq", bits=3, group_size=64, symmetric=False, act_order=True, damp=0.05)
    assert recipe_of(make_parser().parse_args(flags.split())) == asked
    flags = "a b --quantize awq --no-clip --weight-format compressed-tensors --short-groups"
    asked = Recipe("awq", clip=False, weight_format="compressed-tensors", short_groups=True)
    assert recipe_of(make_parser().parse_args(flags.split())) == asked
    flags = "a b --quantize nf4 --no-nested"
    assert recipe_of(make_parser().parse_args(flags.split())) == Recipe("nf4", nested=False)
    assert recipe_of(make_parser().parse_args(["a", "b"])) is None


def test_the_format_is_orbax_unless_another_is_asked_for(tmp_path: pathlib.Path):
    for flags, wanted in [("", "ConvertedFiles"), ("--output-format safetensors", "ModelFiles")]:
        made = tmp_path / wanted
        assert convert.main(["demo-draft", str(made), "--quantize", "int8", *flags.split()]) == 0
        assert type(open_model_files(made)).__name__ == wanted


@pytest.mark.slow
def test_there_is_a_built_in_text(tmp_path: pathlib.Path):
    source = folder_of("qwen2-bias", tmp_path / "source")
    flags = "--quantize smoothquant --samples 4 --sequence-length 50 --calibration-data built-in"
    assert convert.main([str(source), str(tmp_path / "made"), *flags.split()]) == 0


def test_the_built_in_text_is_some_samples_of_a_real_tokenizer():
    read = read_calibration(BUILT_IN, load_tokenizer(model_folder("demo")), length=256)
    assert read.tokens.shape[0] > 16
    assert len(set(read.tokens.reshape(-1).tolist())) > 500


def test_a_folder_is_quantized(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    source, text = folder_of("qwen2-bias", tmp_path / "source"), tmp_path / "text.txt"
    text.write_text(" ".join(f"w{index * 7 % 61}" for index in range(400)))
    flags = "--quantize gptq --group-size 128 --samples 4 --sequence-length 50 --weight-format compressed-tensors"
    arguments = [str(source), str(tmp_path / "made"), *flags.split(), "--calibration", str(text)]
    assert convert.main(arguments) == 0
    told = capsys.readouterr()
    assert "2 of 64 x 64: groups of 128 do not divide its 64 inputs" in told.out
    assert re.search(r"mlp\.down_proj +2 of 64 x 128: relative error \d+(\.\d+)? %", told.out)
    assert "to quantise these, too: --group-size 64 or --short-groups\n" in told.out
    assert f"wrote {tmp_path / 'made'}: weights of " in told.out.splitlines()[-1]
    config = read_json_object(tmp_path / "made" / "config.json")["quantization_config"]
    assert "model.layers.1.self_attn.q_proj" in config["ignore"]
    assert "model.layers.1.mlp.down_proj" not in config["ignore"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--bits 3", "flags of quantisation need --quantize"),
        ("--quantize gptq --bits 7", "--bits 7 of gptq must be one of (2, 3, 4, 8)"),
        ("--quantize gptq --calibration absent.txt", "absent.txt cannot be read"),
        ("--quantize gptq", "gptq needs a text, --calibration FILE, of 512 samples of 512 tokens"),
        (
            "--quantize awq --calibration built-in --sequence-length 99999",
            "tokens, less than one sample of 99999: use a longer text",
        ),
        ("--quantize gptq --calibration absent.txt --samples 0", "--samples must be at least 1"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    flags: str, sentence: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    assert convert.main(["demo", str(tmp_path / "made"), *flags.split()]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert sentence in told
    assert told.count("\n") == 1
    assert not (tmp_path / "made").exists()


def test_a_gguf_file_is_quantized_with_its_tokenizer(test_data: pathlib.Path, tmp_path: pathlib.Path):
    source, text = test_data / "models" / "quantised" / "gguf-B-F16" / "model.gguf", tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. " * 20)
    flags = "--quantize gptq --group-size -1 --samples 2 --sequence-length 32"
    assert convert.main([str(source), str(tmp_path / "made"), *flags.split(), "--calibration", str(text)]) == 0
    story = "Lily went to the park."
    assert load_tokenizer(tmp_path / "made").encode(story) == load_tokenizer(source).encode(story)
