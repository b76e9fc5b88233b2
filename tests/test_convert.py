"""`python -m jaxinfer.convert` as used from a terminal."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxinfer.convert import main, size
from jaxinfer.generate import main as generate
from jaxinfer.loading import load_model
from jaxinfer.opening import model_folder
from jaxinfer.text import load_template
from jaxinfer.weights import CheckpointError, save_params
from jaxinfer.weights.native.manifest import MANIFEST
from tests.fakes import llama_json, random_model

COMPLETE = "layers_*[0-9]/_METADATA"  # path of a completed parameter group: it has its final name
FAST = ["--prompt", "ROMEO:", "--max-model-len", "128", "--temperature", "0", "--max-tokens", "12"]


def text(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> str:
    assert generate(["--model", model, *FAST, *options]) == 0
    return capsys.readouterr().out


def assert_same_model(got: str, want: str, dtype: str = "auto") -> None:
    mine, theirs = (load_model(name, dtype, show_progress=False) for name in (got, want))
    for one, other in zip(jax.tree.leaves(mine.params), jax.tree.leaves(theirs.params), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert mine.generation_config == theirs.generation_config
    assert mine.tokenizer.encode("Thou art") == theirs.tokenizer.encode("Thou art")
    assert (mine.chat_template is None) == (theirs.chat_template is None)


def test_the_converted_folder_is_the_same_model(tmp_path: pathlib.Path, capsys) -> None:
    target = str(tmp_path / "draft")
    assert main(["demo-draft", target]) == 0
    assert capsys.readouterr().out == f"wrote {target}: weights of 1.25 MB before, 1.25 MB now (100%)\n"
    assert_same_model(target, "demo-draft")
    assert text(capsys, target) == text(capsys, "demo-draft")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_templates_in_a_folder_of_their_own_are_copied(tmp_path: pathlib.Path) -> None:
    source, target = shutil.copytree(model_folder("demo-draft"), tmp_path / "source"), tmp_path / "target"
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert main([str(source), str(target)]) == 0
    assert load_template(target).render([], tools=[]) == "tools"


@pytest.mark.parametrize(("count", "words"), [(999, "999 B"), (1_250_000, "1.25 MB"), (16_060_522_496, "16.1 GB")])
def test_sizes_are_read_by_people(count: int, words: str) -> None:
    assert size(count) == words


def test_dtype_and_back_to_safetensors(tmp_path: pathlib.Path) -> None:
    wide, back = str(tmp_path / "wide"), str(tmp_path / "back")
    assert main(["demo-draft", wide, "--dtype", "float32"]) == 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert_same_model(wide, "demo-draft", "float32")
    assert main([wide, back, "--output-format", "safetensors", "--dtype", "bfloat16"]) == 0
    assert (tmp_path / "back" / "model.safetensors").exists()
    assert not list((tmp_path / "back").glob("jaxinfer*"))
    assert_same_model(back, "demo-draft")


def test_what_cannot_be_is_one_sentence_and_exit_code_2(tmp_path: pathlib.Path, capsys) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    for source, target, words in [
        ("demo-draft", "there", "exists already, and is not written over"),
        (str(tmp_path / "nothing"), "new", "no folder"),
        ("demo-draft", "file/new", "cannot be written"),
    ]:
        assert main([source, str(tmp_path / target)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert words in captured.err
    assert not (tmp_path / "new").exists()


def test_nan_is_refused_on_request(tmp_path: pathlib.Path, capsys) -> None:
    source = pathlib.Path(shutil.copytree(model_folder("demo-draft"), tmp_path / "source"))
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2:] = b"\xc0\x7f"  # NaN, in bfloat16
    file.write_bytes(data)
    assert main([str(source), str(tmp_path / "new"), "--check-finite"]) == 2
    assert "holds NaN or infinite values as bfloat16" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main([str(source), str(tmp_path / "new")]) == 0


DEEP = {"num_hidden_layers": 20, "vocab_size": 2048}


def deep_source(folder: pathlib.Path) -> pathlib.Path:
    model = random_model(**DEEP)
    save_params(folder, model.params, model.specs, llama_json(**DEEP))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("demo-draft") / file, folder)
    return folder


def killed(arguments: list[str], unfinished: pathlib.Path) -> dict[pathlib.Path, int]:
    """Kill a conversion midway; return the parameter groups that it completed, with their modification times."""
    running = subprocess.Popen([sys.executable, "-m", "jaxinfer.convert", *arguments])
    deadline = time.monotonic() + 120
    while len(list((unfinished / "params").glob(COMPLETE))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in (unfinished / "params").glob(COMPLETE)}
    assert 2 <= len(kept) < DEEP["num_hidden_layers"]
    return kept


def assert_kept(kept: dict[pathlib.Path, int], unfinished: pathlib.Path, target: pathlib.Path) -> None:
    done = {path: (target / path.relative_to(unfinished)).stat().st_mtime_ns for path in kept}
    assert sum(done[path] == before for path, before in kept.items()) >= len(kept) - 1  # one may not be recorded yet


def test_an_unfinished_folder_is_no_model(tmp_path: pathlib.Path, capsys) -> None:
    """A conversion killed midway leaves no folder of the final name; the same command completes it."""
    source, target, unfinished = deep_source(tmp_path / "source"), tmp_path / "new", tmp_path / "new.unfinished"
    kept = killed([str(source), str(target)], unfinished)
    assert not target.exists()
    assert generate(["--model", str(unfinished), *FAST]) == 2
    assert "is an unfinished conversion: run jaxinfer convert again" in capsys.readouterr().err
    assert main([str(source), str(target)]) == 0
    assert_kept(kept, unfinished, target)
    assert_same_model(str(target), str(source))
    assert (target / MANIFEST).exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8", "fp8", "smoothquant", "int4", "gptq", "awq", "nf4", "fp4", "mxfp4"])
def test_a_quantized_folder_writes_the_same_in_both_formats(method: str, tmp_path: pathlib.Path, capsys) -> None:
    flags = ["--quantize", method, "--samples", "4", "--sequence-length", "64"]
    written = []
    for form in ("orbax", "safetensors"):
        target = str(tmp_path / form)
        assert main(["demo-draft", target, *flags, "--output-format", form]) == 0
        capsys.readouterr()
        written.append(text(capsys, target))
    assert written[0] == written[1]
    assert_same_model(str(tmp_path / "orbax"), str(tmp_path / "safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8", "gptq"])
def test_a_killed_quantization_goes_on(method: str, tmp_path: pathlib.Path, capsys) -> None:
    """A killed quantisation resumes after its completed layers; the result is bitwise that of an uninterrupted run."""
    source, target, unfinished = deep_source(tmp_path / "source"), tmp_path / "new", tmp_path / "new.unfinished"
    flags = ["--quantize", method, "--group-size", "-1", "--samples", "4", "--sequence-length", "64"]
    kept = killed([str(source), str(target), *flags], unfinished)
    assert not target.exists()
    assert generate(["--model", str(unfinished), *FAST]) == 2
    assert "is an unfinished conversion" in capsys.readouterr().err
    assert main([str(source), str(target), *flags]) == 0
    assert_kept(kept, unfinished, target)
    assert main([str(source), str(tmp_path / "whole"), *flags]) == 0
    assert_same_model(str(target), str(tmp_path / "whole"))


_PEAK = """
import pathlib, re, sys
from jaxinfer.convert import main

def peak():  # of this process: what resource says includes the one that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

main(["demo-draft", sys.argv[2] + ".warm"])
before = peak()
assert main(sys.argv[1:]) == 0
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: pathlib.Path) -> None:
    """Converting 16 layers of 13 MB holds a few tensors and the mapped pages that were read, not the whole model."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    model = random_model(**shape)
    specs = model.specs
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    save_params(tmp_path / "source", model.params, specs, llama_json(**shape))
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "source"), str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown = int(done.stdout.split()[-1])
    assert nbytes > 150e6
    assert grown < 90e6, f"{grown / 1e6:.0f} MB more for a model of {nbytes / 1e6:.0f} MB"


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("output_format", ["orbax", "safetensors"])
def test_memory_of_quantizing_does_not_grow_with_the_number_of_layers(
    output_format: str, tmp_path: pathlib.Path
) -> None:
    """Quantising 40 layers of 13 MB needs no more memory than quantising 10."""
    grown = []
    for layers in (10, 40):
        shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers}
        model, source = random_model(**shape), tmp_path / f"source-{layers}"
        save_params(source, model.params, model.specs, llama_json(**shape))
        arguments = [str(source), str(tmp_path / f"new-{layers}"), "--quantize", "int8"]
        command = [sys.executable, "-c", _PEAK, *arguments, "--output-format", output_format]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        grown.append(int(done.stdout.split()[-1]))
    assert grown[1] < grown[0] + 40e6, f"{grown[0] / 1e6:.0f} MB, {grown[1] / 1e6:.0f} MB of four times the layers"


def test_nobody_who_only_loads_pays_for_orbax() -> None:
    program = "import sys, jaxinfer.loading; print({'orbax', 'tensorstore'} & {m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("field", "value"), [("temperature", "warm"), ("top_p", 0.0), ("top_k", [50])])
def test_a_recommendation_that_cannot_be_is_refused_with_its_file(
    tmp_path: pathlib.Path, field: str, value: object
) -> None:
    folder = shutil.copytree(model_folder("demo-draft"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {field}="):
        load_model(str(folder), show_progress=False)
