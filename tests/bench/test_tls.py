"""Tests of load on TLS servers with a certificate of a private CA."""

import pathlib
import shutil
from collections.abc import Iterator

import pytest

from jaxinfer.bench.__main__ import main
from tests.serve.http.test_tls import certify
from tests.serve.live import live_fake

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")

LOAD = "--concurrency 2 --num-requests 4 --warmup 0 --input-len 4 --output-len 3 --max-lag 1e6 --max-lateness 1e6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def targets(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    cert, key = certify(folder, "server")
    with live_fake(folder / "model", tls_cert=str(cert), tls_key=str(key)) as server:
        yield {"grpcs": f"grpcs://{server.target}", "https": server.url.replace("http:", "https:")}


def run(target: str, *more: str) -> int:
    return main(["serve", "--target", target, *LOAD.split(), *more])


@pytest.mark.parametrize("scheme", ["grpcs", "https"])
def test_requests_are_answered_by_whom_the_file_trusts(
    scheme: str, targets: dict[str, str], folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(targets[scheme], "--ca-file", str(folder / "server.pem")) in (
        0,
        3,
    )  # 3: with so few requests, the generator may be the bottleneck
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["grpcs", "https"])
@pytest.mark.parametrize("trusted", ["the system's", "another's", "no certificate", "no text", "no file"])
def test_nobody_else_is_trusted(
    scheme: str, trusted: str, targets: dict[str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrusted certificate gives a one-line error and exit status 2."""
    file = tmp_path / "ca.pem"
    match trusted:
        case "another's":
            shutil.copy(certify(tmp_path, "other")[0], file)
        case "no certificate":
            file.write_text("no certificate\n")
        case "no text":
            file.write_bytes(b"\xff\xfe")
    more = [] if trusted == "the system's" else ["--ca-file", str(file)]
    assert run(targets[scheme], *more) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    assert (targets[scheme] if trusted in ("the system's", "another's") else "ca.pem") in said


@pytest.mark.parametrize(("told", "meant"), [("https", "grpcs"), ("grpcs", "https")])
def test_the_wrong_door_is_told(
    told: str, meant: str, targets: dict[str, str], folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = targets[meant].replace(meant, told)
    assert run(target, "--ca-file", str(folder / "server.pem")) == 2
    assert target in capsys.readouterr().err
