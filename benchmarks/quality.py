"""What quantisation costs in quality: perplexity on text that nobody was calibrated on, and bits a weight.

    python benchmarks/quality.py                    the demo model and stories260K, every kind that can be had
    python benchmarks/quality.py --models demo --only gptq --json /tmp/quality.json

Each kind is made by `jaxinfer.quantise`, written, loaded again as a server would, and run in float32; GGUF files are
those of llama.cpp's own tool. See docs/quantisation.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import machine
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.quantise import Calibration, Recipe, quantise
from jaxinfer.types import SamplingParams
from jaxinfer.weights.checkpoint import open_checkpoint, read_json_object
from jaxinfer.weights.formats import quantised_weights
from jaxinfer.weights.gguf import open_gguf

REPO = pathlib.Path(__file__).resolve().parent.parent
GROUPS = (128, 64, 32)
PACKED = "compressed-tensors"  # all integers of 4 bits in one format: at one group size they take the same bytes


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and its text: the last ``held_out`` of it is what perplexity is measured on."""

    name: str
    source: str
    text: str
    held_out: float
    length: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A kind's figures.

    Attributes:
        bits: that a linear weight takes in its file with its scales.
        perplexity: of the held-out text.
        ratio: to that of float32.
        divergence: Kullback and Leibler's, of the float32 model's next tokens from this one's, in nats a token; None
            where only the text's own tokens are told. It has no luck: perplexity may get better by chance.
    """

    model: str
    kind: str
    bits: float
    perplexity: float
    ratio: float
    divergence: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(arguments)
    rows = []
    for subject in subjects(options):
        for row in measured(subject, options):
            rows.append(row)
            print(shown(row), flush=True)
    record = {
        "machine": machine.describe(len(machine.usable_cores())),
        "samples": options.samples,
        "windows": options.windows,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path = options.json or default_path()
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=pathlib.Path, default=REPO.parent / "shared" / "data", help="folder of models and texts")
    add("--models", nargs="+", default=["demo", "stories260K"], choices=["demo", "stories260K"])
    add("--only", default="", help="kinds whose name contains this, beside float32 (default: all)")
    add("--samples", type=int, default=128, help="of the calibration (default 128)")
    add("--windows", type=int, default=64, help="of the held-out text at most (default 64)")
    add("--json", type=pathlib.Path, help="where the figures go (default: benchmarks/results/)")
    return parser.parse_args(arguments)


def default_path() -> pathlib.Path:
    name = f"quality-{machine.slug(machine.cpu_name())}-{datetime.date.today()}.json"
    return REPO / "benchmarks" / "results" / name


def shown(row: Row) -> str:
    divergence = "" if row.divergence is None else f"{row.divergence:.5f}"
    cells = (
        row.model,
        row.kind,
        f"{row.bits:.2f}",
        f"{row.perplexity:.3f}",
        f"{100 * (row.ratio - 1):+.2f} %",
        divergence,
    )
    return f"| {' | '.join(cells)} |"


def subjects(options: argparse.Namespace) -> list[Subject]:
    shakespeare = (options.data / "text/tinyshakespeare/input.txt").read_text(encoding="utf-8")
    stories = json.loads((options.data / "text/tinystories/tinystories_100.json").read_text(encoding="utf-8"))
    told = "\n".join(story if isinstance(story, str) else story["story"] for story in stories)
    known = [
        Subject("demo", "demo", shakespeare, 0.05, 512),  # its own split: docs/demo_model.md
        Subject("stories260K", str(options.data / "models/stories260K/hf"), told, 0.5, 256),
    ]
    return [subject for subject in known if subject.name in options.models]


def recipes() -> dict[str, Recipe]:
    """All kinds of one model's weights, by the names in the table."""
    kinds = {
        "int8": Recipe("int8"),
        "fp8": Recipe("fp8"),
        "W8A8 fp8": Recipe("fp8", activations=True),
        "W8A8 int8": Recipe("int8", activations=True),
        "W8A8 int8, SmoothQuant": Recipe("smoothquant"),
        "NF4": Recipe("nf4", nested=False),
        "NF4, double quantisation": Recipe("nf4"),
        "FP4": Recipe("fp4", nested=False),
        "MXFP4": Recipe("mxfp4"),
    }
    methods = {"RTN": ("int4", {}), "GPTQ": ("gptq", {"act_order": True, "static_groups": True}), "AWQ": ("awq", {})}
    for group in GROUPS:
        for zeros in (False, True):
            for name, (method, more) in methods.items():
                settings: dict[str, Any] = {"group_size": group, "symmetric": not zeros, "short_groups": True, **more}
                label = f"int4 {group}{', zeros' if zeros else ''}: {name}"
                kinds[label] = Recipe(method, weight_format=PACKED, **settings)
    return kinds


def measured(subject: Subject, options: argparse.Namespace) -> Iterator[Row]:
    base = load_model(subject.source, "float32", show_progress=False)
    calibration, windows = split(subject, base, options)
    exact = perplexity(base, windows)
    for kind, figures in kinds(subject, base, calibration, windows, options):
        bits, (found, divergence) = figures()
        yield Row(subject.name, kind, bits, found, found / exact, divergence)


Quality = tuple[float, float | None]  # perplexity and divergence


def kinds(
    subject: Subject, base: Model, calibration: Calibration, windows: np.ndarray, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], tuple[float, Quality]]]]:
    """Each kind's name, and what measures its bits a weight and its quality."""

    def loaded(source: str, dtype: str) -> Quality:
        return compared(load_model(source, dtype, show_progress=False), base, windows)

    def of_recipe(recipe: Recipe) -> tuple[float, Quality]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / "made"
            quantise(subject.source, folder, recipe, calibration)
            weights, _ = quantised_weights(open_checkpoint(folder), read_json_object(folder / "config.json"))
            return bits_of(weights, folder), loaded(str(folder), "float32")

    yield "float32", lambda: (32.0, (perplexity(base, windows), 0.0))
    wanted: dict[str, Callable[[], tuple[float, Quality]]] = {
        "bfloat16": lambda: (16.0, loaded(subject.source, "bfloat16"))
    }
    for name, recipe in recipes().items():
        wanted[name] = functools.partial(of_recipe, recipe)
    for kind in ("int8", "fp8"):
        wanted[f"KV cache {kind}"] = lambda kind=kind: (32.0, (of_engine(base, windows, kind), None))
    if subject.name == "stories260K":
        for folder in sorted((options.data / "models/quantised").glob("gguf-B-*")):
            path = folder / "model.gguf"
            wanted[f"GGUF {folder.name.removeprefix('gguf-B-')}"] = lambda path=path: (
                bits_of_gguf(path),
                loaded(str(path), "float32"),
            )
    yield from ((name, figures) for name, figures in wanted.items() if options.only in name)


def split(subject: Subject, model: Model, options: argparse.Namespace) -> tuple[Calibration, np.ndarray]:
    """Samples of the first part of the text, windows [windows, length] of the last."""
    assert model.tokenizer is not None
    border = int(len(subject.text) * (1 - subject.held_out))
    before, after = (
        np.asarray(model.tokenizer.encode(text), np.int32) for text in (subject.text[:border], subject.text[border:])
    )
    samples, windows = (
        ids[: len(ids) // subject.length * subject.length].reshape(-1, subject.length) for ids in (before, after)
    )
    spread = np.unique(np.linspace(0, len(samples) - 1, min(options.samples, len(samples))).astype(int))
    return Calibration(samples[spread]), windows[: options.windows]


def perplexity(model: Model, windows: np.ndarray) -> float:
    """exp of the mean negative log likelihood of each window's tokens but the first."""
    return compared(model, model, windows)[0]


def compared(model: Model, base: Model, windows: np.ndarray) -> tuple[float, float]:
    """Its perplexity, and the divergence of its next tokens from those of ``base``."""
    apply, exact = jax.jit(model.apply), jax.jit(base.apply)

    @jax.jit
    def totals(logits: jax.Array, wanted: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs, own = jax.nn.log_softmax(logits[:, :-1]), jax.nn.log_softmax(wanted[:, :-1])
        loss = -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).sum()
        return loss, (jnp.exp(own) * (own - logprobs)).sum()

    sums = np.zeros(2)
    for batch in np.array_split(windows, max(1, math.ceil(len(windows) / 8))):
        tokens = jnp.asarray(batch)
        sums += [float(x) for x in totals(apply(model.params, tokens), exact(base.params, tokens), tokens)]
    loss, divergence = sums / (windows.shape[0] * (windows.shape[1] - 1))
    return math.exp(loss), float(divergence)


def bits_of(weights: Any, folder: pathlib.Path) -> float:
    """Of all linear weights of the layers, those that stayed as they are among them."""
    values = sum(math.prod(weight.shape) for weight in weights.values())
    size = sum(weight.nbytes for weight in weights.values())
    for name, info in open_checkpoint(folder).tensors.items():
        if ".layers." in name and name.endswith("proj.weight") and name not in weights:
            values, size = values + math.prod(info.shape), size + info.nbytes
    return 8 * size / values


def bits_of_gguf(path: pathlib.Path) -> float:
    """The same of a GGUF file."""
    checkpoint = open_gguf(path)
    layers = [(weight.shape, weight.nbytes) for name, weight in checkpoint.weights.items() if ".layers." in name]
    for name, info in checkpoint.tensors.items():
        if ".layers." in name and len(info.shape) == 2 and name not in checkpoint.weights:
            layers.append((info.shape, info.nbytes))
    return 8 * sum(size for _, size in layers) / sum(math.prod(shape) for shape, _ in layers)


def of_engine(model: Model, windows: np.ndarray, cache: str) -> float:
    """Through the engine, whose cache holds other numbers."""
    length = windows.shape[1]
    llm = LLM(model, kv_cache_dtype=cache, max_num_seqs=4, max_model_len=2 * length, show_progress=False)
    found = llm.generate(windows.tolist(), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    losses = [
        -places[token].logprob
        for output, window in zip(found, windows.tolist(), strict=True)
        for places, token in zip((output.prompt_logprobs or [])[1:], window[1:], strict=True)
        if places is not None
    ]
    return math.exp(sum(losses) / len(losses))


if __name__ == "__main__":
    sys.exit(main())
