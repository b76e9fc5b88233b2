"""Selection of the test files that a change touches: ``.ci/run`` runs all of them."""

import pathlib
import subprocess
import sys

import pytest

from tests.affected import Suite, changed_files, default_base

FILES = {
    "jaxinfer/__init__.py": "",
    "jaxinfer/kv/__init__.py": "",
    "jaxinfer/kv/radix.py": "X = 1\n",
    "jaxinfer/kv/pool.py": "",
    "jaxinfer/kv/tiers/disk.py": "",
    "jaxinfer/version.py": "",
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/mla/__init__.py": "",
    "pallas_kernels/mla/tiles.py": "",
    "pallas_kernels/mla/launch.py": "",
    "protos/inference.proto": "",
    "tests/__init__.py": "",
    "tests/fakes.py": "from jaxinfer.kv import radix\n",
    "tests/test_version.py": "",
    "tests/kv/__init__.py": "",
    "tests/kv/conftest.py": "",
    "tests/kv/test_radix.py": "",
    "tests/kv/test_pool.py": "from jaxinfer.kv.pool import X\n",
    "tests/engine/test_core.py": "from tests.fakes import X\n",
    "tests/engine/test_alone.py": "",
    "tests/kernels/test_latents.py": "from pallas_kernels.mla.launch import attention\n",
    "tests/serve/test_wire.py": 'PROTO = "protos/inference.proto"\n',
    "tests/serve/test_command.py": 'ARGUMENTS = ["-m", "jaxinfer.version"]\n',
}


@pytest.fixture
def suite(tmp_path: pathlib.Path) -> Suite:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Suite(tmp_path)


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("jaxinfer/kv/radix.py", ["tests/engine/test_core.py", "tests/kv/test_pool.py", "tests/kv/test_radix.py"]),
        ("jaxinfer/kv/tiers/disk.py", ["tests/kv/test_pool.py", "tests/kv/test_radix.py"]),
        ("jaxinfer/version.py", ["tests/serve/test_command.py", "tests/test_version.py"]),
        ("pallas_kernels/mla/tiles.py", ["tests/kernels/test_latents.py"]),
        ("protos/inference.proto", ["tests/serve/test_wire.py"]),
        ("tests/fakes.py", ["tests/engine/test_core.py"]),
        ("tests/kv/conftest.py", ["tests/kv/test_pool.py", "tests/kv/test_radix.py"]),
        ("tests/kv/test_radix.py", ["tests/kv/test_radix.py"]),
        ("tests/conftest.py", []),
        ("docs/serving.md", []),
    ],
)
def test_a_change_touches_tests(suite: Suite, changed: str, touched: list[str]) -> None:
    assert suite.touched_by([changed]) == touched


def test_the_newest_change_comes_first(suite: Suite) -> None:
    assert suite.touched_by(["protos/inference.proto", "tests/fakes.py"]) == [
        "tests/serve/test_wire.py",
        "tests/engine/test_core.py",
    ]


def test_all_others_are_the_rest(suite: Suite) -> None:
    touched = suite.touched_by(["jaxinfer/kv/radix.py"])
    turns = [suite.rest(touched, turn) for turn in range(len(suite.tests))]
    assert all(sorted([*touched, *turn]) == suite.tests for turn in turns)
    assert len({turn[0] for turn in turns}) == len(suite.tests) - len(touched)


def _git(repo: pathlib.Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=repo, capture_output=True, text=True, check=True
    ).stdout.strip()


def _commit(repo: pathlib.Path, name: str, day: int) -> str:
    (repo / name).write_text(name)
    _git(repo, "add", name)
    environment = {"GIT_COMMITTER_DATE": f"2026-01-{day:02} 12:00 +0000"}
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", name],
        cwd=repo,
        check=True,
        env=environment,
    )
    return _git(repo, "rev-parse", "HEAD")


def test_a_change_is_the_branch_or_the_last_day(tmp_path: pathlib.Path) -> None:
    _git(tmp_path, "init", "-q", "-b", "main")
    old, _, new = _commit(tmp_path, "a", 1), _commit(tmp_path, "b", 3), _commit(tmp_path, "c", 3)
    (tmp_path / "d").write_text("not committed")
    assert default_base(tmp_path) == old
    assert changed_files(tmp_path, old) == ["d", "c", "b"]
    _git(tmp_path, "clone", "-q", ".", "clone")
    clone = tmp_path / "clone"
    assert default_base(clone) == old
    _git(clone, "checkout", "-q", "-b", "fault")
    _commit(clone, "e", 3)
    assert default_base(clone) == new


def test_no_test_begins_after_the_time(repo: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_types.py"]
    for workers in ("0", "2"):
        done = subprocess.run([*command, "-n", workers, "--until", "0"], cwd=repo, capture_output=True, text=True)
        assert done.returncode == 0
        assert "tests were not begun" in done.stdout
        assert " passed" not in done.stdout
