"""Oracle of config fields: whether another value of a field changes shapes or logits in transformers.

``python -m tools.oracle.config_fields OUT`` writes, for a tiny model of each type, its config.json and, by field, the
other value and its effect: "refused" (by transformers), or logits of some tokens after a prompt, and the
changed shapes of tensors (null: the tensor is absent).
"""

from __future__ import annotations

import gzip
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from tools.oracle.cases import ARCHITECTURES, CASES, Case
from tools.oracle.config_defaults import LABELS
from tools.oracle.golden import make_tensors
from tools.oracle.run import build, checkpoint_shapes, config_json, make_prompt, read_checkpoint, read_config

SEED, LENGTH, TOLD = 5, 40, 16
_FAULTS = (
    ValueError,
    TypeError,
    NameError,
    AttributeError,
    LookupError,
    RuntimeError,
    ArithmeticError,
    StrictDataclassError,
)
_OTHERS = {"silu": "gelu", "swish": "gelu", "gelu": "silu", "gelu_new": "silu", "gelu_pytorch_tanh": "silu"}
_OTHERS |= {"relu2": "silu", "xielu": "silu", "softmax": "sigmoid", "sigmoid": "softmax", "greedy": "noaux_tc"}
_KINDS = ("full_attention", "sliding_attention")
# Fields of the tokenizer, of training, of execution, or of tensor tying.
_OF_NOTHING = ("_token_id", "_token_index", "_token_ids", "initializer_range", "tie_word_embeddings", "vocab_size")


def others(name: str, value: Any) -> Iterator[Any]:
    """Yield another value of a field, if one is known."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield 2 * value if name == "head_dim" else value + 1
    elif isinstance(value, float):
        yield value * 1.5 + 0.125
    elif isinstance(value, str) and value in _OTHERS:
        yield _OTHERS[value]
    elif isinstance(value, list) and value and value[0] in _KINDS:
        yield [next(kind for kind in _KINDS if kind != value[0]), *value[1:]]
    elif isinstance(value, dict) and "rope_theta" in value:
        yield {**value, "rope_theta": value["rope_theta"] * 2}


def edits(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name not in LABELS and not name.endswith(_OF_NOTHING):
            for other in others(name, value):
                yield name, other
    if "head_dim" not in config and "hidden_size" in config:
        yield "head_dim", 2 * config["hidden_size"] // config["num_attention_heads"]


def answers(case: Case) -> dict[str, Any]:
    """Return the effect of each field on a model of this case."""
    config = json.loads(read_config(config_json(case)).to_json_string(use_diff=False))
    config["architectures"] = [ARCHITECTURES[case.model_type]]
    prompt = make_prompt(SEED, LENGTH, config["vocab_size"])
    shapes, base = asked(case, config, prompt)
    fields = {}
    for name, value in edits(config):
        try:
            found, logits = asked(case, {**config, name: value}, prompt)
        except _FAULTS:
            fields[name] = [value, "refused", {}]
            continue
        changed = {key: shape for key, shape in found.items() if shapes.get(key) != shape}
        fields[name] = [value, logits, changed | dict.fromkeys(shapes.keys() - found.keys())]
    sizes = {"norm_centre": case.norm_centre, "query_share": case.query_share}
    return {"config": config, "shapes": shapes, **sizes, "prompt": prompt, "logits": base, "fields": fields}


@torch.no_grad()
def asked(case: Case, config: Mapping[str, Any], prompt: list[int]) -> tuple[dict[str, tuple[int, ...]], list[float]]:
    """Return the shapes of a model's checkpoint, and the logits of the first tokens after the prompt."""
    model = build(config, torch.float32)
    shapes = checkpoint_shapes(model, case.tables)
    tensors = make_tensors(SEED, shapes, case.norm_centre, case.query_share)
    model.load_state_dict(read_checkpoint(config, tensors))
    logits: list[float] = model(input_ids=torch.tensor([prompt])).logits[0, -1, :TOLD].tolist()
    return shapes, logits


def main(out: pathlib.Path) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    found = {}
    for kind in sorted(ARCHITECTURES):
        case = next(case for case in CASES if case.model_type == kind and case.tables == ("embed",))
        if not ARCHITECTURES[kind].endswith("ForConditionalGeneration"):
            found[ARCHITECTURES[kind]] = answers(case)
            print(kind, flush=True)
    out.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
