"""Programs of the peers, the Python that runs them, and the files that they load."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.peers.checkpoint import read_config
from benchmarks.peers.worker import REPO

PEERS = ("jaxinfer", "transformers", "llama.cpp")
_OWN_VENV = ".venv-oracle"
_REQUIREMENTS = "benchmarks/peers/requirements.txt"


class CannotRun(RuntimeError):
    """Error: a requirement of a peer is missing. The message names it."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """Commands that start the peers, and the command that writes a GGUF (folder, file and dtype are appended to it)."""

    peers: Mapping[str, Sequence[str]]
    write_gguf: Sequence[str]

    @classmethod
    def of(cls, oracle_python: str) -> Programs:
        start = dict.fromkeys(PEERS, oracle_python) | {"jaxinfer": sys.executable}
        modules = {name: name.replace(".", "") + "_peer" for name in PEERS}
        peers = {name: (start[name], "-m", f"benchmarks.peers.{modules[name]}") for name in PEERS}
        return cls(peers, (oracle_python, "-m", "benchmarks.peers.gguf_llama"))


def run(command: Sequence[str]) -> None:
    """Run a program from the root of the source tree.

    Raises:
        CannotRun: it failed; the message is the last line of its output.
    """
    try:
        done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as cause:
        raise CannotRun(f"{command[0]}: {cause.strerror}") from cause
    if done.returncode != 0:
        lines = [line for line in done.stdout.split("\n") if line.strip()]
        raise CannotRun((lines or [f"{' '.join(command)}: exit status {done.returncode}"])[-1].strip()[:300])


def make_oracle(peers: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Create the oracle's environment, with llama-cpp-python if requested and buildable; both only where missing.

    Returns:
        the path of its Python, and for each peer that cannot run in it the reason.
    """
    python = str(REPO / _OWN_VENV / "bin" / "python")
    guests = [peer for peer in peers if peer != "jaxinfer"]
    if not guests:
        return python, {}
    try:
        run(("tools/oracle/make_venv.sh", _OWN_VENV))
    except CannotRun as cause:
        return python, {peer: str(cause) for peer in guests}
    try:
        if "llama.cpp" in guests:
            _install_llama_cpp(python)
    except CannotRun as cause:
        return python, {"llama.cpp": f"llama-cpp-python did not build: {cause}"}
    return python, {}


def _install_llama_cpp(python: str) -> None:
    try:
        run((python, "-c", "import llama_cpp, gguf"))
    except CannotRun:
        print("building llama-cpp-python, once: some minutes", file=sys.stderr)
        run((python, "-m", "pip", "install", "--disable-pip-version-check", "-r", _REQUIREMENTS))


def random_folder(work: pathlib.Path) -> pathlib.Path:
    """Return the folder of the random 125M Llama; write it if it is missing."""
    folder = work / "random-125m"
    if not (folder / "config.json").exists():
        print(f"writing {folder}", file=sys.stderr)
        run((sys.executable, "-m", "benchmarks.peers.random_model", str(folder)))
    return folder


def gguf_file(folder: pathlib.Path, dtype: str, work: pathlib.Path, programs: Programs) -> pathlib.Path:
    """Return the folder's weights as GGUF; write the file if it is missing or the folder has changed.

    Raises:
        CannotRun: llama.cpp or the writer does not support this model.
    """
    facts = [str(folder.resolve()), str(sorted(read_config(folder).items()))]
    facts += [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in folder.glob("*.safetensors")]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    file = work / f"{folder.name}-{digest}-{dtype}.gguf"
    if not file.exists():
        run((*programs.write_gguf, str(folder), str(file), dtype))
    return file
