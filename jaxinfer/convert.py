"""`jaxinfer convert`: write a model folder in the format that loads fastest, or as safetensors."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxinfer.cli.app import run as run_command
from jaxinfer.cli.interrupts import INTERRUPTED
from jaxinfer.models.model import Model
from jaxinfer.opening import LOADING_ERRORS, described_by, model_folder, open_model, saved_specs, write_companions
from jaxinfer.quantize import RecipeError, command
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.load import Progress
from jaxinfer.weights.native.leaves import leaves_of
from jaxinfer.weights.native.writer import Unfinished, unfinished, write_folder
from jaxinfer.weights.open import open_model_files
from jaxinfer.weights.progress import counting_bar, loading_bar
from jaxinfer.weights.safetensors.save import save_params

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion job.

    Attributes:
        source: "demo", a folder or a hub id, as for ``--model``.
        destination: a folder that does not exist.
        dtype: dtype of the parameters; "auto": that of the source.
        output_format: "orbax" or "safetensors".
        check_finite: reject NaN and infinite weights.
    """

    source: str
    destination: pathlib.Path
    dtype: str = "auto"
    output_format: str = "orbax"
    check_finite: bool = False


def convert(job: Conversion, progress: Progress | None = None) -> None:
    """Write the destination folder, with one parameter at a time in memory.

    The folder is written as ``<destination>.unfinished`` and renamed when it is complete. The output of an interrupted
    run is resumed by the next run with the same source and settings, and removed by any other.

    Args:
        progress: called with bytes done, total bytes, and a name.

    Raises:
        CheckpointError, ConfigError: one sentence with the reason.
        OSError: the destination cannot be written.
    """
    arrays = job.output_format == "orbax"
    files, model = open_model(
        job.source, job.dtype, check_finite=job.check_finite, progress=None if arrays else progress
    )
    with unfinished(job.destination, _identity(job, files)) as started:
        if arrays:
            write_companions(files.path, started.folder)
            leaves = leaves_of(model.specs, model.params)
            write_folder(started, model.specs, leaves, described_by(files, model), None, progress)
        else:
            _write_safetensors(started, files, model)


def _write_safetensors(started: Unfinished, files: ModelFiles, model: Model) -> None:
    """Write one safetensors file; an interrupted run starts again from the beginning."""
    if files.quantized:
        raise CheckpointError("quantised weights are not written as safetensors: leave --output-format away")
    config = described_by(files, model)
    save_params(started.folder, model.params, saved_specs(model, config), config, str(model.dtype))
    write_companions(files.path, started.folder)
    started.publish()


def _identity(job: Conversion, files: ModelFiles) -> dict[str, Any]:
    """Return what identifies a run: a run resumes an interrupted one only if these values are equal."""
    return {
        "source": str(files.path.resolve()),
        "files": files.state,
        "dtype": job.dtype,
        "format": job.output_format,
        "check_finite": job.check_finite,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("convert", argv)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0, or 2 with one sentence on stderr for an error."""
    job = Conversion(args.source, args.destination, args.dtype, args.output_format, args.check_finite)
    try:
        report = _run(job, args)
    except (*LOADING_ERRORS, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {job.destination} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(report))
    return 0


def _run(job: Conversion, args: argparse.Namespace) -> list[str]:
    """Run the conversion and return the lines of its report."""
    recipe, lines = command.recipe_of(args), []
    if recipe is not None:
        with counting_bar("quantising layers") as progress:
            lines = list(command.run(args, recipe, progress).lines())
    else:
        with loading_bar("converting") as progress:
            convert(job, progress)
    return [*lines, f"wrote {job.destination}: {_sizes(model_folder(job.source), job.destination)}"]


def _sizes(source: pathlib.Path, destination: pathlib.Path) -> str:
    before, after = (open_model_files(path).nbytes for path in (source, destination))
    return f"weights of {size(before)} before, {size(after)} now ({after / before:.0%})"


def size(count: int) -> str:
    """Format a byte count in decimal units (kB, MB, GB)."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


if __name__ == "__main__":
    sys.exit(main())
