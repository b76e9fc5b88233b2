"""Multi-process setup of an engine core: shared settings, the group key, and the devices of all processes."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import threading
from collections.abc import Callable
from typing import Any

from jaxinfer.parallel.group import Group, GroupError, Membership, join, lead
from jaxinfer.parallel.processes import join_processes
from jaxinfer.serve.core.process import leave_group
from jaxinfer.serve.core.settings import CoreSettings

_LEAST_KEY = 16
_MOST_KEY = 4096
_BEGINNING = 1 << 20

# Engine settings that may differ: only process 0 draws seeds.
_OWN = ("seed",)


def enter_group(settings: CoreSettings, folder: pathlib.Path, waiting: Callable[[], None]) -> Group | None:
    """Wait until all processes have joined, and make their devices JAX's; return None for a single process.

    Args:
        folder: folder of the model.
        waiting: called periodically until all processes have joined.

    Raises:
        GroupError: there is no key, the address is not available, or process 0 rejects this process.
    """
    if settings.num_processes == 1:
        return None
    assert settings.coordinator_address is not None
    membership = Membership(
        num_processes=settings.num_processes,
        process_id=settings.process_id,
        address=settings.coordinator_address,
        key=_key(settings.group_key_file),
        timeout=settings.group_timeout,
        settings=_shared(settings, folder),
    )
    meet = lead if settings.process_id == 0 else join
    group = meet(membership, leave_group, waiting)
    join_processes(group.coordinator, membership.num_processes, membership.process_id)
    return group


def run_follower(group: Group, **loops: Callable[[], None]) -> None:
    """Run each loop that follows process 0 in a thread of its name until this process ends."""

    def run(loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # noqa: BLE001 - any fault: the other processes must not wait for this one
            group.over(f"process {group.membership.process_id} ended by a fault: {error!r}")

    for name, loop in loops.items():
        threading.Thread(target=run, args=(loop,), name=f"jaxinfer-{name}", daemon=True).start()


def _key(path: str | None) -> bytes:
    assert path is not None
    try:
        with pathlib.Path(path).open("rb") as file:
            key = file.read(_MOST_KEY).strip()
    except OSError as error:
        raise GroupError(f"group_key_file = {path!r} cannot be read: {error}") from error
    if len(key) < _LEAST_KEY:
        raise GroupError(f"group_key_file = {path!r} holds {len(key)} bytes, and must hold {_LEAST_KEY} at least")
    return key


def _config(path: pathlib.Path) -> bytes:
    """Return the bytes that identify a model: config.json, or the first 1 MiB of a GGUF file."""
    if path.is_dir():
        return (path / "config.json").read_bytes()
    with path.open("rb") as file:
        return file.read(_BEGINNING)


def _shared(settings: CoreSettings, folder: pathlib.Path) -> dict[str, Any]:
    """Return the settings that determine the programs. The model has a digest: its path may differ between hosts."""
    engine = {name: value for name, value in dataclasses.asdict(settings.engine).items() if name not in _OWN}
    versions = {f"the version of {name}": importlib.metadata.version(name) for name in ("jaxinfer", "jax", "jaxlib")}
    digest = hashlib.sha256(_config(folder)).hexdigest()
    shared = {
        **engine,
        **versions,
        "num_processes": settings.num_processes,
        "dtype": settings.dtype,
        "check_finite": settings.check_finite,
        "whether weights_root is set": settings.weights_root is not None,
        "the SHA-256 of config.json": digest,
    }
    plain: dict[str, Any] = json.loads(json.dumps(shared))
    return plain
