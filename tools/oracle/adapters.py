"""Asks PEFT: it writes adapters of tiny models, and their logits in float64 and in float32.

``python -m tools.oracle.adapters {make,check} FOLDER`` in the oracle's environment, from the repository root.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
import peft
import torch
import transformers

from tools.oracle.adapters_golden import AdapterGolden, load_adapter_golden
from tools.oracle.cases import Case
from tools.oracle.cases.adapters import ADAPTERS, AdapterCase
from tools.oracle.golden import digest, make_tensors, uniform
from tools.oracle.run import AllDouble, NoFloat32, build, checkpoint_shapes, config_json, make_prompt, read_checkpoint

SEED, TOKENS = 1, 16
MIN_EFFECT = 0.05  # of the adapter on a logit; float32 errors are ten thousand times smaller
REPRODUCED = 1e-10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
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
        saved = (pathlib.Path(again) / "adapter_model.safetensors").read_bytes()
    wrong = [] if saved == (folder / "adapter_model.safetensors").read_bytes() else [f"{case.name}: other tensors"]
    off = float(np.abs(stored.logits - fresh.logits).max())
    return wrong + ([f"{case.name}: logits are off by {off:.1e}"] if off > REPRODUCED else [])


def ask(case: AdapterCase, folder: pathlib.Path) -> AdapterGolden:
    """Has PEFT write the adapter to ``folder``, and answer.

    Raises:
        ValueError: the adapter changes next to nothing.
    """
    config = config_json(Case(case.name, case.config))
    shapes = checkpoint_shapes(build(config, torch.float32))
    tensors = make_tensors(SEED, shapes, case.norm_centre)
    state, tokens = read_checkpoint(config, tensors), make_prompt(SEED, TOKENS, case.config["vocab_size"])
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
        config=config,
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


def _adapted(case: AdapterCase, config: dict, state: dict, dtype: torch.dtype) -> peft.PeftModel:
    model = build(config, dtype)
    model.load_state_dict(state)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **case.lora)).eval()


@torch.no_grad()
def _randomised(model: peft.PeftModel) -> peft.PeftModel:
    """Gives every number that PEFT trains a value of its own; DoRA's magnitudes stay near the norms."""
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
