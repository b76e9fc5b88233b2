"""Tests of README and the serving docs: programs and commands run, and tables match the code."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from jaxinfer.bench import commands as bench
from jaxinfer.cli import serve as door
from jaxinfer.cli.flags import attribute_docs
from jaxinfer.serve import keys
from jaxinfer.serve.api.auth import SCOPES
from jaxinfer.serve.api.errors import Kind
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.grpc import auth
from jaxinfer.serve.http.app import ENDPOINTS, Endpoint
from jaxinfer.serve.settings import ServeConfig
from tests.serve.fake_weights import write_fake_weights
from tests.serve.live import Live, live_fake

PAGES = (
    "README.md",
    "docs/serving.md",
    "docs/http_api.md",
    "docs/client.md",
    "docs/load_testing.md",
    "docs/deploying.md",
)
NESTED = ("limits", "engine")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Yield a server over the fake engine with the name of the demo model, and with weights to change to."""
    root = tmp_path_factory.mktemp("weights")
    write_fake_weights(root / "step-100", "new")
    with live_fake(tmp_path_factory.mktemp("model"), "demo", control_port=0, weights_root=str(root)) as found:
        yield found


@pytest.fixture(scope="module")
def pages(repo: pathlib.Path) -> dict[str, str]:
    return {name: (repo / name).read_text(encoding="utf-8") for name in PAGES}


@pytest.fixture(scope="module")
def page(pages: dict[str, str]) -> str:
    return pages["docs/serving.md"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def here(text: str, server: Live) -> str:
    """Return the text with the ports of ``server``."""
    ports = {"50051": server.server.grpc_port, "50052": server.server.control_port, "8000": server.server.http_port}
    return re.sub(r"localhost:(\d+)", lambda found: f"127.0.0.1:{ports[found[1]]}", text)


def commands(pages: dict[str, str], module: str) -> list[list[str]]:
    """Return the arguments of each ``python -m module`` or ``jaxinfer`` command in the pages."""
    ways = rf"python -m {re.escape(module)}|jaxinfer {module.rpartition('.')[2]}"
    pattern = re.compile(rf"(?:^|`|\.venv/bin/)(?:{ways}) ([^`\n]+)", re.MULTILINE)
    lines = [line for text in pages.values() for line in pattern.findall(text)]
    return [shlex.split(line, comments=True) for line in lines]


# ---- programs and commands


@pytest.mark.parametrize(
    ("name", "count"), [("README.md", 1), ("docs/serving.md", 4), ("docs/client.md", 4), ("docs/http_api.md", 1)]
)
def test_programs_run(name: str, count: int, pages: dict, server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    programs = [block for block in blocks(pages[name], "python") if "localhost" in block]
    assert len(programs) == count
    for program in programs:
        exec(compile(here(program, server), name, "exec"), {})
        assert capsys.readouterr().out.strip()


def test_the_client_of_the_readme_has_ten_lines(pages: dict[str, str]) -> None:
    (program,) = [block for block in blocks(pages["README.md"], "python") if "jaxinfer.client" in block]
    assert sum(bool(line) for line in program.splitlines()) <= 10


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_commands_run(page: str, server: Live) -> None:
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines() if line]
    assert len(lines) == 5
    for line in lines:
        command = [*shlex.split(here(line, server)), "--fail", "--silent", "--show-error"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        if "/ready" not in line:
            assert answer.endswith("data: [DONE]\n\n") if '"stream": true' in line else json.loads(answer)


def test_servers_of_the_pages_could_be_started(
    pages: dict, repo: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo)
    found = commands(pages, "jaxinfer.serve")
    assert len(found) >= 5
    for arguments in found:
        here = [word.replace("/etc/jaxinfer/", "configs/deployments/") for word in arguments]
        here = [word.replace("/checkpoints", "configs") for word in here]
        assert door.parse(here).configuration.model


def test_other_commands_of_the_pages_are_understood(pages: dict, capsys: pytest.CaptureFixture[str]) -> None:
    loads = [arguments for arguments in commands(pages, "jaxinfer.bench") if arguments != ["serve"]]
    making = commands(pages, "jaxinfer.serve.keys")
    assert len(loads) >= 6
    assert making
    for arguments in loads:
        given = bench.parse(arguments)
        if hasattr(given, "target"):
            assert given.self_test or given.target in ("grpc://localhost:50051", "http://localhost:8000")
        else:  # without a server
            assert given.model
    for arguments in making:
        assert keys.main(arguments) == 0
    assert "sha256: " in capsys.readouterr().out


# ---- tables


def cells(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the table whose header begins with ``heading``."""
    found = re.search(rf"^\| {re.escape(heading)}.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert found is not None, heading
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[1].splitlines()]


@pytest.mark.parametrize("kind", [ServeConfig, ServeLimits])
def test_every_setting_stands_in_its_table(kind: type, page: str) -> None:
    told = attribute_docs(kind)
    for field in dataclasses.fields(kind):
        if field.name not in NESTED:
            plain = (
                ""
                if field.default == () or field.default is None or field.default is dataclasses.MISSING
                else str(field.default)
            )
            shown = plain.lower() if isinstance(field.default, bool) else plain
            assert f"\n| `{field.name}` | {shown} | {told[field.name]} |\n" in page


def test_no_other_setting_stands_there(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| [^|]* \|$", page.partition("## Errors")[0], re.MULTILINE)
    known = [field.name for kind in (ServeConfig, ServeLimits) for field in dataclasses.fields(kind)]
    assert rows == [name for name in known if name not in NESTED]


def test_the_table_of_errors_has_every_kind(page: str) -> None:
    told = [(kind.strip("`"), grpc, int(http)) for kind, grpc, http, _ in cells(page, "kind |")]
    assert told == [(kind.name.lower(), kind.code.name, kind.http) for kind in Kind]


def test_the_table_of_scopes_has_every_scope_and_what_is_free(page: str) -> None:
    told = {scope.strip("`"): what for scope, what in cells(page, "scope |")}
    assert tuple(told) == (*SCOPES, "none")
    free = [name.rpartition("/")[2] for name, scope in auth.SCOPES.items() if scope is None and "Health" not in name]
    for name in [*free, *(each.path for each in ENDPOINTS if each.scope is None)]:
        assert f"`{name}`" in told["none"]
    for name in [name.rpartition(".")[2] for name, scope in auth.SCOPES.items() if scope == "observe"]:
        assert f"`{name}`" in told["observe"]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_the_page_names_every_endpoint(page: str, endpoint: Endpoint) -> None:
    path = endpoint.path.partition("{")[0].rstrip("/")
    assert re.search(rf"{re.escape(path)}(?![\w/])", page)
