"""Generator of the Python code from protos/ that is checked in under jaxinfer/protos/.

    make protos          write it
    make protos-check    fail if the checked-in code is out of date

Both run in an environment of their own: the generator is an old one, so that clients need no new protobuf (its
output requires protobuf >= 5.29 and grpcio >= 1.71 and runs with every later version).
"""

from __future__ import annotations

import argparse
import importlib.resources
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
_INIT = '"""Generated from protos/ by make protos."""\n'
_SHARED_POOL, _OWN_POOL = "_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"
# The generator writes modules next to the .proto files. Their paths and the message packages are visible to peers: only
# the Python modules move to a package of their own.
_PACKAGE = "jaxinfer/protos"
_MOVED = {
    "from jaxinfer.": "from jaxinfer.protos.",
    "(DESCRIPTOR, 'jaxinfer.": "(DESCRIPTOR, 'jaxinfer.protos.",
    "generated code in jaxinfer/": "generated code in jaxinfer/protos/",
}
# Messages with names outside this project (`inference.*`): other packages define them, too, and one pool accepts each
# name once. With a separate pool, both can be in one process.
_FOREIGN = "oip"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of date")
    options = parser.parse_args(arguments)
    made = generate()
    stale = [name for name, text in made.items() if _present(name) != text]
    if options.check:
        for name in stale:
            print(f"{name} is not what protos/ makes: run make protos")
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(made[name], encoding="utf-8")
        print(f"wrote {name}")
    return 0


def generate() -> dict[str, str]:
    """Return the generated files by their paths below the root."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *outputs, *sources]):
            raise SystemExit("protoc failed")
        files = sorted(pathlib.Path(folder).rglob("*.py*"))
        made = {f"{_PACKAGE}/{path.parent.name}/{path.name}": _adapted(path) for path in files}
        packages = {_PACKAGE, *(name.rpartition("/")[0] for name in made)}
        return made | {f"{package}/__init__.py": _INIT for package in packages}


def _adapted(path: pathlib.Path) -> str:
    text = path.read_text(encoding="utf-8")
    for old, new in _MOVED.items():
        text = text.replace(old, new)
    return text.replace(_SHARED_POOL, _OWN_POOL) if path.parent.name == _FOREIGN else text


def _present(name: str) -> str | None:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
