"""Oracle of adapters: PEFT writes adapters of tiny models, and computes their logits in float64 and in float32.

bitsandbytes quantises the bases in int8 and NF4; PEFT runs over the dequantised weights, and computes in their
dtype: bitsandbytes' own products on a CPU are of bfloat16.

``python -m tools.oracle.adapters {make,check} FOLDER`` in the oracle's environment, from the repository root.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import save_file

from tools.oracle.adapters_golden import STORED_FILE, AdapterGolden, load_adapter_golden
from tools.oracle.cases import Case
from tools.oracle.cases.adapters import ADAPTERS, AdapterCase
from tools.oracle.golden import digest, make_tensors, uniform
from tools.oracle.run import AllDouble, NoFloat32, build, checkpoint_shapes, config_json, make_prompt, read_checkpoint

SEED, TOKENS = 1, 16
MIN_EFFECT = 0.05  # smallest change of a logit by the adapter; float32 errors are ten thousand times smaller
REPRODUCED = 1e-10
STORAGES: Mapping[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
}
ADAPTER_FILE = "adapter_model.safetensors"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.oracle.adapters", description=__doc__)
    parser.add_argument("command", choices=("make", "check"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--case", action="append", default=[], help="name of a case; repeat it; all by default")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = [case for case in ADAPTERS if not options.case or case.name in options.case]
    if options.command == "make":
        for case in cases:
            golden = ask(case, options.folder / case.name)
            golden.save(options.folder / case.name)
            print(f"{case.name:24} float32 error {golden.error:.1e}  effect {golden.effect:.2f}", flush=True)
        return 0
    wrong = [line for case in cases for line in _differences(case, options.folder / case.name)]
    print("\n".join(wrong) or f"{len(cases)} adapters reproduced")
    return 1 if wrong else 0


def _differences(case: AdapterCase, folder: pathlib.Path) -> list[str]:
    with tempfile.TemporaryDirectory() as again:
        stored, fresh = load_adapter_golden(folder), ask(case, pathlib.Path(again))
        files = [name for name in (ADAPTER_FILE, STORED_FILE) if (folder / name).exists()]
        same = all((pathlib.Path(again) / name).read_bytes() == (folder / name).read_bytes() for name in files)
    wrong = [] if same else [f"{case.name}: other tensors"]
    off = float(np.abs(stored.logits - fresh.logits).max())
    return wrong + ([f"{case.name}: logits are off by {off:.1e}"] if off > REPRODUCED else [])


def ask(case: AdapterCase, folder: pathlib.Path) -> AdapterGolden:
    """Have PEFT write the adapter to ``folder``, with the base if that is quantised; return its logits.

    Raises:
        ValueError: the adapter changes the logits too little.
    """
    config = config_json(Case(case.name, case.config))
    shapes = checkpoint_shapes(build(config, torch.float32))
    tensors = make_tensors(SEED, shapes, case.norm_centre)
    state, tokens = read_checkpoint(config, tensors), make_prompt(SEED, TOKENS, case.config["vocab_size"])
    stored = config if case.storage is None else _stored(case.storage, config, tensors, folder)
    if case.storage is not None:
        state = _dequantised(stored, folder)
    single = _randomised(_adapted(case, config, state, torch.float32))
    with AllDouble():
        double = _like(single, _adapted(case, config, state, torch.float64))
    single.peft_config["default"].base_model_name_or_path = ""
    single.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    with AllDouble(), NoFloat32():
        logits = _logits(double, tokens)
        with double.disable_adapter():
            effect = float(np.abs(_logits(double, tokens) - logits).max())
    if effect < MIN_EFFECT:
        raise ValueError(f"{case.name}: the adapter changes logits by {effect:.1e} only")
    return AdapterGolden(
        name=case.name,
        config=stored,
        seed=SEED,
        norm_centre=case.norm_centre,
        shapes=shapes,
        weights_sha256=digest(tensors),
        tokens=tokens,
        logits=logits,
        error=float(np.abs(_logits(single, tokens) - logits).max()),
        effect=effect,
        versions={module.__name__: module.__version__ for module in (torch, transformers, peft, np)},
    )


def _stored(storage: str, config: dict, tensors: Mapping[str, np.ndarray], folder: pathlib.Path) -> dict:
    """Have bitsandbytes quantise the base, and write it next to the adapter; return its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = transformers.BitsAndBytesConfig(**STORAGES[storage])
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as made:
        _write_folder(pathlib.Path(plain), config)
        save_file(dict(tensors), f"{plain}/model.safetensors", metadata={"format": "pt"})
        _loaded(plain, quantization_config=wanted).save_pretrained(made)
        shutil.copy(f"{made}/model.safetensors", folder / STORED_FILE)
        described = json.loads((pathlib.Path(made) / "config.json").read_text())
    return config | {"quantization_config": described["quantization_config"]}


def _dequantised(config: dict, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the weights that transformers dequantises from the quantised base."""
    with tempfile.TemporaryDirectory() as base:
        _write_folder(pathlib.Path(base), config)
        shutil.copy(folder / STORED_FILE, f"{base}/model.safetensors")
        return _loaded(base).dequantize(dtype=torch.float32).state_dict()


def _write_folder(folder: pathlib.Path, config: dict) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def _loaded(folder: str, **options: Any) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **options)


def _adapted(case: AdapterCase, config: dict, state: dict, dtype: torch.dtype) -> peft.PeftModel:
    model = build(config, dtype)
    model.load_state_dict(state)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **case.lora)).eval()


@torch.no_grad()
def _randomised(model: peft.PeftModel) -> peft.PeftModel:
    """Randomise every parameter that PEFT trains; DoRA's magnitudes stay near the norms."""
    for name, values in model.named_parameters():
        if values.requires_grad:
            drawn = torch.from_numpy(uniform(SEED, f"adapter/{name}", tuple(values.shape)))
            values.copy_(values * (1.0 + 0.3 * drawn) if "magnitude" in name else 0.3 * drawn)
    return model


@torch.no_grad()
def _like(given: peft.PeftModel, model: peft.PeftModel) -> peft.PeftModel:
    trained = {name: values for name, values in given.named_parameters() if values.requires_grad}
    for name, values in model.named_parameters():
        if name in trained:
            values.copy_(trained[name])
    return model


@torch.no_grad()
def _logits(model: peft.PeftModel, tokens: list[int]) -> np.ndarray:
    return model(input_ids=torch.tensor([tokens])).logits[0].numpy().astype(np.float64)


if __name__ == "__main__":
    sys.exit(main())
