"""Weights of the fake engine: the states of `jaxinfer.served.ServedModel`, with a text as their only parameter."""

import dataclasses
import hashlib
import json
import pathlib
import threading

from jaxinfer.engine.core import Pace
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.core.operate import operate

TAGS = ("kv_cache", "weights")


@dataclasses.dataclass(frozen=True)
class FakeUpdate:
    version: int
    bytes: int
    seconds: float = 0.5


class FakeWeights:
    """Weights and memory of a `tests.serve.fake_engine.FakeEngine`.

    Attributes:
        text: the served parameter.
        may_stage: `stage` ends when it is set.
        staging: number of calls of `stage` that have begun.
        discarded: what was staged and not served.
    """

    def __init__(self, engine) -> None:
        self.text, self._engine = "start", engine
        self.may_stage, self.staging, self.discarded = threading.Event(), 0, []
        self.may_stage.set()
        self._asleep: set[str] = set()
        self._resumes = False

    @property
    def asleep(self) -> list[str]:
        return sorted(self._asleep)

    def stage(self, weights, **options):
        self.staging += 1
        if not self.may_stage.wait(10):
            raise AssertionError("the test let nothing be staged")
        if not isinstance(weights, str):
            raise RequestError("params", "is no text")
        return weights

    def commit(self, staged, version=None):
        number = self.require_version(version)
        self._engine.swap([staged], number)
        self.text = staged
        return FakeUpdate(number, len(staged))

    def discard(self, staged):
        self.discarded.append(staged)

    def require_version(self, version):
        served = self._engine.weight_version
        if "weights" in self._asleep:
            raise RequestError("params", "cannot be updated while the weights are asleep")
        if version is not None and version <= served:
            raise RequestError("version", f"={version!r} must be an integer greater than {served}")
        return served + 1 if version is None else version

    def sleep(self, level=1, tags=TAGS):
        if level not in (1, 2):
            raise RequestError("level", f"={level!r} must be 1 or 2")
        if not set(tags) <= set(TAGS):
            raise RequestError("tags", f": {tags} are not all of {TAGS}")
        if self._engine.pace is not Pace.PAUSED:
            self._resumes = True
            self._engine.pause("keep")
        self._engine.doze()
        self._asleep |= set(tags)

    def wake_up(self, tags=TAGS):
        self._asleep -= set(tags)
        if self._resumes and not self._asleep:
            self._resumes = False
            self._engine.resume()

    def resume(self):
        if self._asleep:
            raise RequestError("engine", f"is asleep ({', '.join(self.asleep)}): wake_up() first")
        self._engine.resume()

    def checksums(self):
        return {"text": digest_of(self.text)}


class Operable:
    """An `AsyncEngine` in this process for `jaxinfer.serve.frontend.operations.Operations`."""

    def __init__(self, engine) -> None:
        self._engine = engine

    async def operate(self, operation):
        return await operate(self._engine, operation, read_fake)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_fake(*paths: str) -> str:
    """Read the texts in folders of `write_fake_weights`, joined."""
    try:
        return "".join(json.loads((pathlib.Path(path) / "model.safetensors").read_text()) for path in paths)
    except (OSError, ValueError) as error:
        raise RequestError("path", f"={paths[0]!r} holds no weights") from error


def write_fake_weights(folder: pathlib.Path, text: str) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(json.dumps(text))
    return folder
