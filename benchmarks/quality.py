"""Quality cost of quantisation: perplexity on text outside the calibration data, and bits per weight.

    python benchmarks/quality.py                    the demo model and stories260K, every available kind
    python benchmarks/quality.py --models demo --only GPTQ --json quality.json
    python benchmarks/quality.py --oracle-python PYTHON    with llama_cpp and gguf: GGUF files of the demo model, too

`jaxinfer.quantize` makes each kind; it is written, loaded as a server would, and run in float32; llama.cpp's tool makes
the GGUF files. An interrupted run resumes after the last kind in its file. See docs/quantisation.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import machine
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.opening import model_folder, open_model
from jaxinfer.quantize import Calibration, Recipe
from jaxinfer.quantize.driver import quantize
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.gguf.checkpoint import open_gguf
from jaxinfer.weights.safetensors.checkpoint import open_checkpoint, read_json_object

REPO = pathlib.Path(__file__).resolve().parent.parent
GROUPS = (128, 64, 32)
GGUF = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_NL", "IQ4_XS")
PACKED = "compressed-tensors"  # all 4-bit integer kinds share this format: at one group size they take the same bytes


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and its text: perplexity is measured on the last share ``held_out`` of it."""

    name: str
    source: str
    text: str
    held_out: float
    length: int


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures of a quantisation kind.

    Attributes:
        bits: bits per linear weight in its file, scales included.
        perplexity: perplexity of the held-out text.
        ratio: perplexity relative to float32.
        divergence: KL divergence of the float32 model's next tokens from this one's, in nats a token; None where only
            the text's tokens have log probabilities. Unlike perplexity, it cannot improve by chance.
        losses: [windows], nats a token, so that any two kinds can be compared window by window.
    """

    model: str
    kind: str
    bits: float
    perplexity: float
    ratio: float
    divergence: float | None
    losses: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    path = options.json or default_path()
    record = begun(path, options)
    rows = {(row["model"], row["kind"]): Row(**{**row, "losses": tuple(row["losses"])}) for row in record["rows"]}
    for subject in subjects(options):
        for row in measured(subject, options, rows):
            rows[row.model, row.kind] = row
            record["rows"] = [dataclasses.asdict(row) for row in rows.values()]
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")
            print(table_row(row, rows), flush=True)
    print(f"wrote {path}")
    return 0


def begun(path: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record at ``path`` if it has the same text and samples; else one without rows."""
    settings = {"samples": options.samples, "windows": options.windows}
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {name: record.get(name) for name in settings} == settings:
            return record
    return {"machine": machine.describe(len(machine.usable_cores())), **settings, "rows": []}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=pathlib.Path, default=REPO.parent / "shared" / "data", help="folder of models and texts")
    add("--models", nargs="+", default=["demo", "stories260K"], choices=["demo", "stories260K"])
    add("--oracle-python", type=pathlib.Path, help="with llama_cpp and gguf (default: no GGUF of the demo model)")
    add("--only", default="", help="kinds whose name contains this, beside float32 (default: all)")
    add("--samples", type=int, default=128, help="of the calibration (default 128)")
    add("--windows", type=int, default=128, help="of the held-out text at most (default 128)")
    add("--json", type=pathlib.Path, help="where the figures go (default: benchmarks/results/)")
    return parser.parse_args(arguments)


def default_path() -> pathlib.Path:
    name = f"quality-{machine.slug(machine.cpu_name())}-{datetime.date.today()}.json"
    return REPO / "benchmarks" / "results" / name


def table_row(row: Row, rows: Mapping[tuple[str, str], Row]) -> str:
    """Format a line of the table; differences of perplexity with the standard error over the windows."""
    against = rows.get((row.model, row.kind.replace("GPTQ", "RTN").replace("AWQ", "RTN")), row)
    cells = (
        row.model,
        row.kind,
        f"{row.bits:.2f}",
        f"{row.perplexity:.3f}",
        difference(row, rows[row.model, "float32"]),
        "" if row.divergence is None else f"{row.divergence:.5f}",
        "" if against is row else difference(row, against),
    )
    return f"| {' | '.join(cells)} |"


def difference(row: Row, other: Row) -> str:
    """Format the difference of two perplexities in percent, with the standard error of the windows' mean difference."""
    if row is other:
        return ""
    apart = np.subtract(row.losses, other.losses)
    error = apart.std(ddof=1) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
    return f"{100 * math.expm1(apart.mean()):+.2f} % ± {100 * error:.2f}"


def subjects(options: argparse.Namespace) -> list[Subject]:
    shakespeare = (options.data / "text/tinyshakespeare/input.txt").read_text(encoding="utf-8")
    stories = json.loads((options.data / "text/tinystories/tinystories_100.json").read_text(encoding="utf-8"))
    tales = "\n".join(story if isinstance(story, str) else story["story"] for story in stories)
    known = [
        Subject("demo", "demo", shakespeare, 0.1, 512),  # train/test split of the demo model: docs/demo_model.md
        Subject("stories260K", str(options.data / "models/stories260K/hf"), tales, 0.5, 256),
    ]
    return [subject for subject in known if subject.name in options.models]


def recipes() -> dict[str, Recipe]:
    """Return all quantisation kinds of one model's weights, by the names in the table."""
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


def measured(subject: Subject, options: argparse.Namespace, known: Mapping[tuple[str, str], Row]) -> Iterator[Row]:
    """Measure the rows of ``subject`` that are not ``known``."""
    base = load_model(subject.source, "float32", show_progress=False)
    calibration, windows = split(subject, base, options)
    exact = Exact(base, windows)
    for kind, figures in kinds(subject, exact, calibration, options):
        if (subject.name, kind) not in known:
            bits, (losses, divergence) = figures()
            found = math.exp(losses.mean())
            ratio = found / math.exp(exact.losses.mean())
            yield Row(subject.name, kind, bits, found, ratio, divergence, tuple(losses.round(6).tolist()))


class Exact:
    """Log probabilities of the windows in the float32 model, for all comparisons.

    Attributes:
        losses: [windows], nats a token.
    """

    def __init__(self, model: Model, windows: np.ndarray):
        self.model, self.windows = model, windows
        self.losses, self._logprobs = said(model, windows)

    def compared(self, model: Model) -> tuple[np.ndarray, float]:
        """Return the losses of another model, and the divergence of its next tokens from the float32 model's."""
        losses, logprobs = said(model, self.windows)
        apart = [
            (np.exp(exact) * (exact - other)).sum(axis=-1).mean()
            for exact, other in zip(self._logprobs, logprobs, strict=True)
        ]
        return losses, float(np.mean(apart))


def said(model: Model, windows: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the mean negative log likelihood of each window's tokens except the first [windows], and the log
    probabilities of all next tokens, [length - 1, vocabulary] for each window."""

    @jax.jit
    def of(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(model.apply(params, tokens)[:, :-1])
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean(axis=(1, 2)), logprobs

    losses: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    for batch in np.array_split(windows, max(1, math.ceil(len(windows) / 8))):
        loss, logprobs = of(model.params, jnp.asarray(batch))
        losses.append(np.asarray(loss, np.float64))
        rows.extend(np.asarray(logprobs))
    return np.concatenate(losses), rows


Quality = tuple[np.ndarray, float | None]  # losses [windows], and the divergence


def kinds(
    subject: Subject, exact: Exact, calibration: Calibration, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], tuple[float, Quality]]]]:
    """Yield each kind's name, and a function that measures its bits per weight and its quality."""

    def loaded(source: str, dtype: str) -> Quality:
        return exact.compared(load_model(source, dtype, show_progress=False))

    def of_recipe(recipe: Recipe) -> tuple[float, Quality]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / "made"
            quantize(subject.source, folder, recipe, calibration)
            weights, _ = quantized_weights(open_checkpoint(folder), read_json_object(folder / "config.json"))
            return bits_of(weights, folder), loaded(str(folder), "float32")

    def of_file(path: pathlib.Path) -> tuple[float, Quality]:
        _, model = open_model(str(path), "float32")  # llama.cpp's files of these models have no tokenizer
        return bits_of_gguf(path), exact.compared(model.replace(params=jax.tree.map(jnp.asarray, model.params)))

    def of_llamacpp(kind: str) -> tuple[float, Quality]:
        with tempfile.TemporaryDirectory() as scratch:
            return of_file(gguf_of(subject.source, kind, pathlib.Path(scratch), options.oracle_python))

    def of_cache(kind: str) -> tuple[float, Quality]:
        return 32.0, (of_engine(exact.model, exact.windows, kind), None)

    yield "float32", lambda: (32.0, (exact.losses, 0.0))
    wanted: dict[str, Callable[[], tuple[float, Quality]]] = {
        "bfloat16": lambda: (16.0, loaded(subject.source, "bfloat16"))
    }
    for name, recipe in recipes().items():
        wanted[name] = functools.partial(of_recipe, recipe)
    for kind in ("int8", "fp8"):
        wanted[f"KV cache {kind}"] = functools.partial(of_cache, kind)
    if subject.name == "stories260K":
        for folder in sorted((options.data / "models/quantised").glob("gguf-B-*")):
            wanted[f"GGUF {folder.name.removeprefix('gguf-B-')}"] = functools.partial(of_file, folder / "model.gguf")
    elif options.oracle_python:
        for kind in GGUF:
            wanted[f"GGUF {kind}"] = functools.partial(of_llamacpp, kind)
    yield from ((name, figures) for name, figures in wanted.items() if options.only in name)


def gguf_of(source: str, kind: str, scratch: pathlib.Path, python: pathlib.Path) -> pathlib.Path:
    """Quantise a model with llama.cpp; return the GGUF file of that kind."""
    plain, target = scratch / "plain.gguf", scratch / "model.gguf"
    for command in (
        ("benchmarks.peers.gguf_llama", model_folder(source), plain, "bfloat16"),
        ("benchmarks.peers.gguf_quantise", plain, target, kind),
    ):
        subprocess.run((python.absolute(), "-m", *map(str, command)), cwd=REPO, check=True, capture_output=True)
    return target


def split(subject: Subject, model: Model, options: argparse.Namespace) -> tuple[Calibration, np.ndarray]:
    """Return calibration samples of the first part of the text, and windows [windows, length] of the last part."""
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


def bits_of(weights: Any, folder: pathlib.Path) -> float:
    """Return bits per weight over all linear weights of the layers, unquantized ones included."""
    values = sum(math.prod(weight.shape) for weight in weights.values())
    size = sum(weight.nbytes for weight in weights.values())
    for name, info in open_checkpoint(folder).tensors.items():
        if ".layers." in name and name.endswith("proj.weight") and name not in weights:
            values, size = values + math.prod(info.shape), size + info.nbytes
    return 8 * size / values


def bits_of_gguf(path: pathlib.Path) -> float:
    """Return bits per weight over all linear weights of the layers of a GGUF file."""
    checkpoint = open_gguf(path)
    layers = [(weight.shape, weight.nbytes) for name, weight in checkpoint.weights.items() if ".layers." in name]
    for name, info in checkpoint.tensors.items():
        if ".layers." in name and len(info.shape) == 2 and name not in checkpoint.weights:
            layers.append((info.shape, info.nbytes))
    return 8 * sum(size for _, size in layers) / sum(math.prod(shape) for shape, _ in layers)


def of_engine(model: Model, windows: np.ndarray, cache: str) -> np.ndarray:
    """Return losses [windows] through the engine with a KV cache of dtype ``cache``."""
    length = windows.shape[1]
    llm = LLM(model, kv_cache_dtype=cache, max_num_seqs=4, max_model_len=2 * length, show_progress=False)
    found = llm.generate(windows.tolist(), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    losses = []
    for output, window in zip(found, windows.tolist(), strict=True):
        rows = [places or {} for places in output.prompt_logprobs or ()]
        losses.append(np.mean([-places[token].logprob for places, token in zip(rows[1:], window[1:], strict=True)]))
    return np.array(losses)


if __name__ == "__main__":
    sys.exit(main())
