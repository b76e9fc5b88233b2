"""Convert the pickles of a folder to safetensors, in the oracle's environment: jaxinfer itself reads no pickle.

    .venv-oracle/bin/python -m tools.oracle.unpickle FOLDER

Draft heads are often published as pickles. Only tensors are loaded (``weights_only``): no code in the file is run.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

KINDS = (".bin", ".pt", ".pth")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="holds *.bin, *.pt or *.pth")
    folder = parser.parse_args(arguments).folder
    found = sorted(path for path in folder.iterdir() if path.suffix in KINDS)
    if not found:
        print(f"error: {folder} holds no {', '.join(KINDS)}", file=sys.stderr)
        return 2
    for path in found:
        print(convert(path))
    return 0


def convert(path: pathlib.Path) -> pathlib.Path:
    """Write the tensors of a pickle next to it, and return the path. Tensors that share memory are copied."""
    import torch
    from safetensors.torch import save_file

    tensors = torch.load(path, map_location="cpu", weights_only=True)
    target = path.with_suffix(".safetensors")
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target)
    return target


if __name__ == "__main__":
    sys.exit(main())
