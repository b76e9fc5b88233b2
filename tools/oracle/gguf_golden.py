"""Oracle of GGUF conversion: runs llama.cpp's converter, imported from a named checkout, on tiny checkpoints.

.venv-oracle/bin/python -m tools.oracle.gguf_golden --llama-cpp CHECKOUT --out tests/goldens/gguf
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from safetensors.numpy import save_file

from tools.oracle.gguf_cases import CASES, PER_LAYER, Converted, checkpoint_of

GOLDENS = pathlib.Path("tests/goldens/models")
# transformers' name of an architecture, where the converter knows the hub's.
_HUB = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}


def convert(case: Converted, checkout: pathlib.Path, path: pathlib.Path) -> None:
    """Write the GGUF file of a checkpoint, in float32 and without a tokenizer."""
    for place in (checkout, checkout / "gguf-py"):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    conversion, gguf = (importlib.import_module(name) for name in ("conversion", "gguf"))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(case.config))
        save_file(case.checkpoint(), folder / "model.safetensors", metadata={"format": "pt"})
        # Gemma's embeddings are cut to the size of the vocabulary
        vocabulary = {str(index): index for index in range(case.config["vocab_size"])}
        tokens = {"model": {"vocab": vocabulary}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokens))
        architecture = case.config["architectures"][0]
        kind = conversion.get_model_class(_HUB.get(architecture, architecture))
        for each in (kind, *(inner for inner in vars(kind).values() if isinstance(inner, type))):
            each.set_vocab = lambda self: None
        # GPT-NeoX' fields under the names that transformers no longer has
        fields = {**case.config, **conversion.ModelBase.load_hparams(folder, False)}
        kind(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=fields).write()


def answer(case: Converted, path: pathlib.Path) -> Converted:
    """Return the case with the contents of the file."""
    reader = importlib.import_module("gguf").GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    metadata = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name == "general.architecture" or name.startswith(f"{arch}.")
    }
    tensors = {
        tensor.name: (
            tensor.tensor_type.name,
            [int(size) for size in reversed(tensor.shape)],
            hashlib.sha256(tensor.data.tobytes()).hexdigest()[:16],
        )
        for tensor in reader.tensors
    }
    return dataclasses.replace(case, metadata=metadata, tensors=tensors)


def save(case: Converted, out: pathlib.Path) -> None:
    """Write a line for each field, tensor and key."""
    fields: Mapping[str, Any] = dataclasses.asdict(case)
    blocks = []
    for name in ("config", "shapes", "metadata", "tensors"):
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in fields[name].items()]
        blocks.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{case.name}.json").write_text("{" + f'"seed": {case.seed},\n' + ",\n".join(blocks) + "}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.oracle.gguf_golden", description=__doc__)
    parser.add_argument("--llama-cpp", type=pathlib.Path, required=True, help="a checkout of ggml-org/llama.cpp")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder; one JSON file a case")
    parser.add_argument("--case", action="append", default=[], help="name of a case; repeat it; all by default")
    parser.add_argument("--files", type=pathlib.Path, help="folder in which the GGUF files are kept")
    options = parser.parse_args()
    for name in options.case or (*CASES, *PER_LAYER):
        case = checkpoint_of(GOLDENS, name)
        with tempfile.TemporaryDirectory() as scratch:
            path = (options.files or pathlib.Path(scratch)) / f"{name}.gguf"
            convert(case, options.llama_cpp, path)
            save(answer(case, path), options.out)
        print(name, flush=True)


if __name__ == "__main__":
    main()
