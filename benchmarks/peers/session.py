"""Session that runs the peers in turn on the same prompts and records their results."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.environment import CannotRun, Programs, gguf_file
from benchmarks.peers.measure import Agreement, decode_rate, prefill_rate
from benchmarks.peers.protocol import Prompts, Reply
from benchmarks.peers.worker import PeerDied, Worker

_SETTLE_PROMPT, _SETTLE_TOKENS = 8, 4
_FIRST_ID = 3  # lower ids are special tokens in most vocabularies


@dataclasses.dataclass(frozen=True)
class Cell:
    """Configuration of one load: one model in one dtype for one batch size. ``default``: jaxinfer has the settings of
    `LLM(folder)`, not those for the batch."""

    model: str
    folder: pathlib.Path
    vocab: int
    dtype: str
    batch: int
    default: bool = False


@dataclasses.dataclass(frozen=True)
class Phase:
    """A kind of run: "prefill" has ``new_tokens`` 1."""

    name: str
    prompt_len: int
    new_tokens: int

    def rate(self, reply: Reply) -> float:
        return prefill_rate(reply, self.prompt_len) if self.name == "prefill" else decode_rate(reply)


@dataclasses.dataclass
class Samples:
    """Samples of one peer in one phase of one cell: a rate (tokens/s) and the seconds of the whole call for each
    round, and the tokens of the first round."""

    rates: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: list[list[int]] = dataclasses.field(default_factory=list)

    def add(self, rate: float, reply: Reply) -> None:
        self.rates.append(rate)
        self.seconds.append(reply["seconds"])
        self.tokens = self.tokens or reply["tokens"]


def random_prompts(seed: str, batch: int, length: int, vocab: int) -> Prompts:
    """Return prompts that differ by seed, so that no engine gains from its prefix cache."""
    draw = random.Random(seed)
    return [[draw.randrange(_FIRST_ID, vocab) for _ in range(length)] for _ in range(batch)]


@dataclasses.dataclass(frozen=True)
class Taken:
    """Samples of all peers in one phase of one cell; the absent peers with their reasons."""

    phase: Phase
    samples: dict[str, Samples]
    absent: dict[str, str]


class Session:
    """The peers' processes. A peer that dies misses the rest of its cell, and is restarted for the next.

    Args:
        peers: names, in the order in which they take turns.
        absent: peers that are known not to run, with the reason.
        work: folder for logs and converted weights.
        threads: number of threads of each peer.
    """

    def __init__(
        self, peers: Sequence[str], programs: Programs, absent: dict[str, str], work: pathlib.Path, threads: int
    ) -> None:
        self.absent = dict(absent)
        self.versions: dict[str, dict[str, str]] = {}
        self.idle_cpu_seconds: dict[str, float] = {}
        self._peers, self._programs = list(peers), programs
        self._work, self._threads = work, threads
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Session:
        for name in self._peers:
            if name not in self.absent:
                self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._workers):
            self._drop(name)

    def load(self, cell: Cell, max_len: int) -> dict[str, str]:
        """Load the cell's model in every peer. Returns the peers that cannot load it, with the reasons."""
        missing = dict(self.absent)
        for name in self._peers:
            if name not in missing:
                try:
                    self._load(name, cell, max_len)
                except (PeerDied, CannotRun) as cause:
                    missing[name] = str(cause)
        return missing

    def ask(self, name: str, op: str, **request: Any) -> Reply:
        """Send a request to a peer; return its reply.

        Raises:
            PeerDied: the peer died, and the next `load` restarts it.
        """
        try:
            return self._workers[name].ask(op, **request)
        except PeerDied:
            self._drop(name)
            raise

    def cpu_seconds(self) -> float:
        """Return the CPU time of this program, the running peers, and all child processes that have ended."""
        return sum(os.times()[:4]) + sum(worker.used_cpu_seconds for worker in self._workers.values())

    @property
    def running(self) -> list[str]:
        return [name for name in self._peers if name in self._workers]

    def _start(self, name: str) -> None:
        log = self._work / f"{name}.log"
        try:
            self._workers[name] = Worker(name, self._programs.peers[name], log)
        except (PeerDied, OSError) as cause:
            self.absent[name] = str(cause)
        else:
            self.versions[name] = self._workers[name].versions

    def _drop(self, name: str) -> None:
        worker = self._workers.pop(name)
        self.idle_cpu_seconds[name] = self.idle_cpu_seconds.get(name, 0.0) + worker.idle_cpu_seconds
        worker.close()

    def _load(self, name: str, cell: Cell, max_len: int) -> None:
        gguf = ""
        if name == "llama.cpp":
            gguf = str(gguf_file(cell.folder, cell.dtype, self._work, self._programs))
        if name not in self._workers:
            self._start(name)
        if name in self.absent:
            raise PeerDied(self.absent[name])
        self.ask(
            name,
            "load",
            folder=str(cell.folder.resolve()),
            gguf=gguf,
            dtype=cell.dtype,
            batch=cell.batch,
            max_len=max_len,
            threads=self._threads,
            **({"default": True} if cell.default and name == "jaxinfer" else {}),
        )


def run_cell(session: Session, cell: Cell, phases: Sequence[Phase], rounds: int) -> list[Taken]:
    """Load a cell, warm up, then take turns.

    Raises:
        PeerDied: jaxinfer died. Other peers that die are recorded as absent.
    """
    max_len = max(_SETTLE_PROMPT + _SETTLE_TOKENS, *(phase.prompt_len + phase.new_tokens for phase in phases))
    absent = session.load(cell, max_len)
    taken = {phase: {name: Samples() for name in session.running if name not in absent} for phase in phases}
    for number in range(-1, rounds):  # round -1 warms up: programs are compiled, caches filled, memory touched
        for phase, samples in taken.items():
            seed = f"{cell.model} {cell.dtype} {cell.batch} {phase.name} {number}"
            prompts = random_prompts(seed, cell.batch, phase.prompt_len, cell.vocab)
            for name in [name for name in samples if name not in absent]:
                try:
                    reply = _turn(session, name, cell, prompts, phase.new_tokens)
                except PeerDied as cause:
                    absent[name] = str(cause)
                    continue
                if number >= 0:
                    samples[name].add(phase.rate(reply), reply)
        settings = "default settings" if cell.default else f"batch {cell.batch}"
        print(f"{cell.model} {cell.dtype} {settings}: round {number + 1} of {rounds}", file=sys.stderr)
    if "jaxinfer" in absent:
        raise PeerDied(absent["jaxinfer"])
    return [
        Taken(phase, {name: found for name, found in samples.items() if name not in absent}, absent)
        for phase, samples in taken.items()
    ]


def _turn(session: Session, name: str, cell: Cell, prompts: Prompts, new_tokens: int) -> Reply:
    """Run one peer. A short run before it wakes its threads and reloads its data into the CPU caches."""
    settle = random_prompts("settle", cell.batch, _SETTLE_PROMPT, cell.vocab)
    session.ask(name, "generate", prompts=settle, new_tokens=_SETTLE_TOKENS)
    return session.ask(name, "generate", prompts=prompts, new_tokens=new_tokens)


def check_agreement(session: Session, cell: Cell, length: int, new_tokens: int) -> dict[str, Agreement]:
    """Compare each peer's greedy tokens with jaxinfer's on the cell's model."""
    absent = session.load(cell, max(length + new_tokens, 16))
    prompts = random_prompts("check", cell.batch, length, cell.vocab)
    names = [name for name in session.running if name not in absent]
    tokens = {name: session.ask(name, "generate", prompts=prompts, new_tokens=new_tokens)["tokens"] for name in names}
    return {name: Agreement.of(tokens["jaxinfer"], tokens[name]) for name in names if name != "jaxinfer"}
