"""`python -m jaxinfer.convert`: a model's folder in the form in which it loads fastest, or as safetensors."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxinfer.loading import DTYPES, LOADING_ERRORS, open_model, write_companions
from jaxinfer.models.model import Model
from jaxinfer.quantize import RecipeError, command
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.load import Progress
from jaxinfer.weights.native.leaves import leaves_of
from jaxinfer.weights.native.writer import Unfinished, unfinished, write_folder
from jaxinfer.weights.progress import counting_bar, loading_bar
from jaxinfer.weights.safetensors.save import save_params

FORMATS = ("orbax", "safetensors")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion that is asked for.

    Attributes:
        source: "demo", a folder or a hub id, as ``--model`` takes them.
        destination: a folder that does not exist.
        dtype: of the parameters; "auto": the source's own.
        output_format: "orbax" or "safetensors".
        check_finite: refuse NaN and infinite weights.
    """

    source: str
    destination: pathlib.Path
    dtype: str = "auto"
    output_format: str = "orbax"
    check_finite: bool = False


def convert(job: Conversion, progress: Progress | None = None) -> None:
    """Writes the folder. One parameter at a time is in memory.

    It is written under another name, ``<destination>.unfinished``, and named when it is complete. What an interrupted
    run has left is completed by the next one of the same source and settings, and removed by any other.

    Args:
        progress: called with bytes done, bytes in all, and a name.

    Raises:
        CheckpointError, ConfigError: one sentence that says what is wrong.
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
            write_folder(started, model.specs, leaves, files.config_json, None, progress)
        else:
            _write_safetensors(started, files, model)


def _write_safetensors(started: Unfinished, files: ModelFiles, model: Model) -> None:
    """Write one file, which is begun again after an interruption."""
    if files.quantized:
        raise CheckpointError("quantised weights are not written as safetensors: leave --output-format away")
    save_params(started.folder, model.params, model.specs, files.config_json, str(model.dtype))
    write_companions(files.path, started.folder)
    started.publish()


def _identity(job: Conversion, files: ModelFiles) -> dict[str, Any]:
    """Identify a run: what must be the same for one to go on where another was interrupted."""
    return {
        "source": str(files.path.resolve()),
        "files": files.state,
        "dtype": job.dtype,
        "format": job.output_format,
        "check_finite": job.check_finite,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence on stderr for what cannot be done as asked."""
    args = _parser().parse_args(argv)
    job = Conversion(args.source, args.destination, args.dtype, args.output_format, args.check_finite)
    try:
        recipe = command.recipe_of(args)
        if recipe is not None:
            with counting_bar("quantising layers") as progress:
                command.run(args, recipe, progress)
        else:
            with loading_bar("converting") as progress:
                convert(job, progress)
    except (*LOADING_ERRORS, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {job.destination} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    print(f"wrote {job.destination}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxinfer.convert", description=__doc__)
    parser.add_argument("source", metavar="SRC", help='"demo", a model\'s folder, or a hub id')
    parser.add_argument("destination", metavar="DST", type=pathlib.Path, help="a folder that does not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the parameters (default: SRC's own)")
    parser.add_argument("--output-format", choices=FORMATS, default="orbax", help="(default: %(default)s)")
    parser.add_argument("--check-finite", action="store_true", help="refuse weights with NaN or infinity")
    command.add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
