"""Tests of socket folders: only those of killed servers are removed."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from jaxinfer.serve.core.socket_dir import PREFIX, SocketFolder, sweep
from tests.serve.core.fake_core import REPO
from tests.serve.processes import fake_server

HOLD = """
import socket, sys, time
from jaxinfer.serve.core.socket_dir import SocketFolder
folder = SocketFolder.make()
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(folder.socket)
print(folder.path, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def place(monkeypatch, tmp_path) -> pathlib.Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(place: pathlib.Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_a_folder_is_locked_while_its_process_lives_and_swept_when_that_was_killed(place):
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(REPO)}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        path = pathlib.Path(other.stdout.readline().strip())
        assert path.parent == place
        assert (sweep(), names(path)) == (0, {"core"})
        other.send_signal(signal.SIGKILL)
    assert names(path) == {"core"}
    assert sweep() == 1
    assert names(place) == set()


def test_what_is_no_such_folder_stays(place):
    mine = SocketFolder.make()
    for name, mode in (("open", 0o755), ("full", 0o700), ("file", 0o700), ("empty", 0o700)):
        (place / f"{PREFIX}{name}").mkdir(mode)
    (place / f"{PREFIX}full" / "other").touch()
    (place / f"{PREFIX}file" / "core").write_text("precious")
    target = place / "target"
    target.mkdir(0o700)
    (place / f"{PREFIX}link").symlink_to(target)
    (place / f"{PREFIX}plain").touch()
    (place / "jaxinfer-data").mkdir(0o700)
    before = names(place)
    assert sweep() == 1
    assert before - names(place) == {f"{PREFIX}empty"}
    assert (place / f"{PREFIX}file" / "core").read_text() == "precious"
    mine.remove()
    assert not mine.path.exists()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(place, monkeypatch):
    make, swept = tempfile.mkdtemp, []

    def made(*args, **kwargs):
        path = make(*args, **kwargs)
        if not swept:
            swept.append(sweep())
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    folder = SocketFolder.make()
    assert swept == [1]
    assert folder.path.is_dir()
    assert sweep() == 0
    folder.remove()


def test_another_users_folder_stays(place, monkeypatch):
    (place / f"{PREFIX}theirs").mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sweep() == 0


@pytest.mark.slow
def test_a_server_removes_what_one_that_was_killed_has_left(tmp_path, monkeypatch):
    """A server removes the folder of a killed server and keeps that of a live one."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    with fake_server(folders[0]) as living, fake_server(folders[1]) as killed:
        assert len(names(place)) == 2
        killed.signal(signal.SIGKILL)
        killed.wait()
        with fake_server(folders[2]):
            assert len(names(place)) == 2
            assert living.process.poll() is None
            assert {name for path in place.iterdir() for name in names(path)} == {"core"}
