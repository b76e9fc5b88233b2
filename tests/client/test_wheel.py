"""Tests of wheels in virtual environments with only grpcio and protobuf: the client works with a server."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.client.serving import SEED, expected, served

PROGRAM = """
import importlib.util, sys
import asyncio
from jaxinfer.client import AsyncClient, Client, DeadlineExceeded, InvalidRequest
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


async def main():
    async with AsyncClient(sys.argv[1], timeout=20) as client:
        await client.wait_ready()
        print((await client.generate("Hi", max_tokens=9, seed=int(sys.argv[2]))).text)
    async with AsyncClient("127.0.0.1:9") as client:
        try:
            await client.wait_ready(timeout=0.01)
        except DeadlineExceeded:
            print("not ready")


asyncio.run(main())
"""
OLDEST = "3.10"
_PROTOS = ("protos", "protos/internal", "protos/oip", "protos/v1")
PACKAGES = ("bench", "client", *_PROTOS, "serve", "serve/chat", "serve/grpc", "serve/http", "v1")


@pytest.fixture(scope="module")
def wheels(repo: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Return both wheels by distribution. They are built from a copy, as setuptools writes next to the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("jaxinfer", "pallas_kernels", "packaging"):
        shutil.copytree(repo / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo / name, folder / name)
    for source in (".", "./packaging/client"):
        _run(sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--quiet", "--wheel-dir", "dist", cwd=folder)
    return {path.name.partition("-")[0]: path for path in (folder / "dist").glob("*.whl")}


@pytest.mark.slow
def test_the_wheel_holds_what_is_served_and_its_types(wheels: dict[str, pathlib.Path], repo: pathlib.Path) -> None:
    names = set(zipfile.ZipFile(wheels["jaxinfer"]).namelist())
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
def test_the_clients_files_are_those_of_the_whole(wheels: dict[str, pathlib.Path]) -> None:
    """The client wheel's files and version equal the full wheel's; the order of installation does not matter."""
    whole, client = (zipfile.ZipFile(wheels[name]) for name in ("jaxinfer", "jaxinfer_client"))
    names = [name for name in client.namelist() if ".dist-info/" not in name and not name.endswith("LICENSE")]
    assert {"jaxinfer/__init__.py", "jaxinfer/client/sync.py", "jaxinfer/py.typed"} <= set(names)
    files = {"__init__.py", "py.typed", "version.py", "brief.py"}
    assert {name.split("/")[1] for name in names} == files | {"client", "protos", "v1"}
    assert [name for name in names if client.read(name) != whole.read(name)] == []
    assert wheels["jaxinfer"].name.split("-")[1] == wheels["jaxinfer_client"].name.split("-")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "python"), [("jaxinfer", ""), ("jaxinfer_client", ""), ("jaxinfer_client", OLDEST)]
)
def test_the_client_runs_with_grpcio_and_protobuf_alone(
    distribution: str, python: str, wheels: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    _run(_interpreter(python), "-m", "venv", str(tmp_path / "venv"))
    inside = str(tmp_path / "venv" / "bin" / "python")
    _run(inside, "-m", "pip", "install", "--quiet", "grpcio", "protobuf")
    _run(inside, "-m", "pip", "install", "--quiet", "--no-deps", str(wheels[distribution]))
    with served() as run:
        output = _run(inside, "-I", "-c", PROGRAM, run.target, str(SEED), cwd=tmp_path)
    assert output == f"{expected('Hi', 9)}\ntop_p\n{expected('Hi', 9)}\nnot ready\n"
    if distribution == "jaxinfer_client":
        program = "import jaxinfer\ntry:\n    jaxinfer.LLM\nexcept ImportError as error:\n    print(error)"
        assert "is not in jaxinfer-client: install jaxinfer" in _run(inside, "-I", "-c", program)


def _interpreter(version: str) -> str:
    """Return a Python interpreter of this version that can create virtual environments."""
    if not version:
        return sys.executable
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    known = [shutil.which(f"python{version}"), *map(str, root.glob(f"versions/{version}.*/bin/python"))]
    found = next((each for each in known if each and _can_make_venvs(each)), None)
    if found is None:
        pytest.skip(f"no Python {version} here")
    return found


def _can_make_venvs(python: str) -> bool:
    return not subprocess.run((python, "-c", "import ensurepip"), capture_output=True).returncode


def _run(*command: str, cwd: pathlib.Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
