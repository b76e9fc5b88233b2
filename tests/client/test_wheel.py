"""The wheel in an environment of its own with grpcio and protobuf alone: its client talks to a server."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from tests.client.serving import SEED, expected, served

PROGRAM = """
import importlib.util, sys
from jaxinfer.client import Client, InvalidRequest
import jaxinfer.v1.inference_pb2, jaxinfer.protos.v1
assert jaxinfer.v1.inference_pb2 is jaxinfer.protos.v1.inference_pb2
assert importlib.util.find_spec("jax") is None and importlib.util.find_spec("numpy") is None
with Client(sys.argv[1], timeout=20) as client:
    client.wait_ready()
    print(client.generate("Hi", max_tokens=9, seed=int(sys.argv[2])).text)
    try:
        client.generate("Hi", top_p=2)
    except InvalidRequest as error:
        print(error.field)
"""
_PROTOS = ("protos", "protos/internal", "protos/oip", "protos/v1")
PACKAGES = ("bench", "client", *_PROTOS, "serve", "serve/grpc", "serve/http", "v1")


@pytest.fixture(scope="module")
def wheel(repo: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy: setuptools leaves its build folder where the sources are."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("jaxinfer", "pallas_kernels"):
        shutil.copytree(repo / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo / name, folder / name)
    _run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--quiet", "--wheel-dir", "dist", cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_what_is_served_and_its_types(wheel: pathlib.Path, repo: pathlib.Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"jaxinfer/py.typed", "jaxinfer/quant/codebooks.npz"} <= names
    missing = [
        path
        for package in PACKAGES
        for path in (str(p.relative_to(repo)) for p in (repo / "jaxinfer" / package).glob("*.py*") if p.is_file())
        if path not in names
    ]
    assert not missing
    assert any(name.endswith("inference_pb2.pyi") for name in names)


@pytest.mark.slow
def test_the_client_runs_with_grpcio_and_protobuf_alone(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    _run(python, "-m", "pip", "install", "--quiet", "grpcio", "protobuf")
    with served() as run:
        output = _run(python, "-I", "-c", PROGRAM, run.target, str(SEED), cwd=tmp_path)
    assert output == f"{expected('Hi', 9)}\ntop_p\n"


def _run(*command: str, cwd: pathlib.Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
