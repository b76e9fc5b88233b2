"""The command: one run, or a sweep of them, on one server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import math
import pathlib
import ssl
from collections.abc import Awaitable, Iterator
from typing import Any

import numpy as np
from rich.console import Console

from jaxinfer.bench import datasets, plot, table
from jaxinfer.bench.arrivals import arrivals
from jaxinfer.bench.datasets import DATASETS, Asked, DatasetError
from jaxinfer.bench.drive import Driver, Prepared
from jaxinfer.bench.figures import MS, Goals, summary
from jaxinfer.bench.grpc_target import GrpcTarget
from jaxinfer.bench.http_target import HttpTarget
from jaxinfer.bench.options import DEFAULT_REQUESTS, DEFAULT_SWEEP_SECONDS, DEFAULT_USERS, OptionsError, goals
from jaxinfer.bench.progress import Progress
from jaxinfer.bench.prompts import Words, tokens_per_word, usable_ids
from jaxinfer.bench.raw import RawFile
from jaxinfer.bench.sweep import Knee, Search
from jaxinfer.bench.target import Access, Item, Sampling, Served, Target
from jaxinfer.bench.watch import Bounds, Watch

OK, BAD_RUN, INTERRUPTED = 0, 1, 130
WARMUP_ROUND = 1 << 20  # requests of the warm-up are none of any run


@dataclasses.dataclass(frozen=True)
class Load:
    """Arrival of requests: one of ``rate`` (requests a second), ``speed`` (of a trace) and ``users`` is not None."""

    rate: float | None = None
    speed: float | None = None
    users: int | None = None
    burstiness: float = 1.0
    requests: int | None = None
    duration: float | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Load:
        load = cls(None, options.speed, None, options.burstiness, options.num_requests, options.duration)
        limited = options.num_requests or options.duration
        if options.sweep:
            rate = options.request_rate or 1.0
            return dataclasses.replace(load, rate=rate, duration=options.duration if limited else DEFAULT_SWEEP_SECONDS)
        if not limited:
            load = dataclasses.replace(load, requests=DEFAULT_REQUESTS)
        if options.request_rate or options.speed:
            return dataclasses.replace(load, rate=options.request_rate)
        return dataclasses.replace(load, users=options.concurrency or DEFAULT_USERS)

    def due(self, items: Iterator[Item], rng: np.random.Generator) -> Iterator[tuple[float, Item]]:
        """Items of the open loop with the seconds at which they are due."""
        end = math.inf if self.duration is None else self.duration
        within = itertools.takewhile(lambda each: each[0] < end, self._timed(items, rng))
        return itertools.islice(within, self.requests)

    def _timed(self, items: Iterator[Item], rng: np.random.Generator) -> Iterator[tuple[float, Item]]:
        if self.rate is not None:
            return zip(arrivals(self.rate, self.burstiness, rng), items, strict=False)
        assert self.speed is not None
        return ((item.due / self.speed, item) for item in items if item.due is not None)


class Session:
    """A server that is open, and what all runs on it share."""

    def __init__(self, options: argparse.Namespace, target: Target, served: Served, asked: Asked) -> None:
        self.options, self.target, self.served, self.asked = options, target, served, asked
        self.goals: Goals = goals(options.goodput)
        self.bounds = Bounds(options.max_lateness / MS, options.max_lag / MS)
        self.console = Console(stderr=True)
        self.runs: list[dict[str, Any]] = []
        self.interrupted = False

    @classmethod
    async def open(cls, options: argparse.Namespace) -> Session:
        """
        Raises:
            TargetError: no load can be put on this server.
            DatasetError: nor such requests.
        """
        target = make_target(options)
        served = await target.open()
        ids = None if DATASETS[options.dataset].text else usable_ids(served)
        per_word = 1.0 if ids else await tokens_per_word(target)
        asked = Asked(
            ids or Words(per_word),
            per_word,
            served.max_model_len,
            options.dataset_path,
            options.input_len,
            options.output_len,
            options.prefix_len,
            options.groups,
            options.scale,
            options.block_tokens,
        )
        return cls(options, target, served, asked)

    def items(self, number: int) -> Iterator[Item]:
        """Requests of run ``number``: others in each, so that no run finds the prompts of another cached."""
        return DATASETS[self.options.dataset].make(self.asked, self._seed(number))

    def _seed(self, number: int) -> int:
        return int(np.random.SeedSequence((self.options.seed, number)).generate_state(1)[0])

    async def warm_up(self) -> None:
        count = self.options.warmup
        if count and not self.interrupted:
            driver = Driver(self.target, asyncio.get_running_loop().time, self.options.timeout)
            items = itertools.islice(self.items(WARMUP_ROUND), count)
            self.interrupted = await _cut_short(driver.closed_loop(items, min(count, DEFAULT_USERS)))

    async def run(self, load: Load, raw: RawFile | None) -> dict[str, Any]:
        """Run once; its figures."""
        number, loop = len(self.runs), asyncio.get_running_loop()
        items = itertools.islice(self.items(number), load.requests)
        prepared = None if load.users else self._prepare(load, items, number)
        watch, progress = Watch(loop.time), Progress(self.console, load.requests if prepared is None else len(prepared))
        driver = Driver(self.target, loop.time, self.options.timeout, progress.on_end)
        with progress.shown(driver.records):
            watch.start()
            work = (
                driver.closed_loop(items, load.users or 0, load.duration)
                if prepared is None
                else (driver.open_loop(prepared))
            )
            self.interrupted = await _cut_short(work)
            await watch.stop()
        figures: dict[str, Any] = {"run": number, "rate": load.rate, "users": load.users, "speed": load.speed}
        figures |= summary(driver.records, self.goals)
        figures["generator"] = watch.report(driver.records, self.bounds, open_loop=prepared is not None)
        self.runs.append(figures)
        if raw is not None:
            raw.run(driver.records, figures)
        return figures

    def _prepare(self, load: Load, items: Iterator[Item], number: int) -> list[Prepared]:
        rng = np.random.default_rng((self._seed(number), 1))
        prepared = [Prepared(item, self.target.prepare(item), due) for due, item in load.due(items, rng)]
        if not prepared:
            raise DatasetError("no request is due: a longer --duration or a higher rate, please")
        return prepared

    async def sweep(self, load: Load, raw: RawFile | None) -> Knee:
        """Runs at rates until the knee is found, or the search is cut short."""
        options = self.options
        start = load.rate or 1.0
        limits = {"lowest": min(start, lowest_rate(load.duration)), "highest": options.sweep_max_rate}
        search = Search(start, options.sweep_precision, **limits).rates()
        rate = next(search)
        while True:
            figures = await self.run(dataclasses.replace(load, rate=rate), raw)
            figures["breaks"] = self._breaks(figures)
            if self.interrupted:
                return known(self.runs[:-1])
            try:
                rate = search.send(figures["breaks"] is None)
            except StopIteration as found:
                knee: Knee = found.value
                return knee

    def _breaks(self, figures: dict[str, Any]) -> str | None:
        """Why a rate does not hold; None: it does."""
        options, good, keeping = self.options, figures["goodput"], figures["keeping_up"]
        if figures["completed"] < 0.99 * figures["requests"]:
            return "errors"
        if good is not None and good["share"] < options.good_share:
            return "goals"
        return "queue grows" if keeping is not None and keeping < options.keep_up else None


def lowest_rate(duration: float | None) -> float:
    """Below it a run of so many seconds would have too few requests to tell anything, or none."""
    return Search.lowest if duration is None else max(Search.lowest, 5 / duration)


def known(runs: list[dict[str, Any]]) -> Knee:
    """The knee, as far as runs at several rates tell."""
    holding = [run["rate"] for run in runs if run["breaks"] is None]
    broke = [run["rate"] for run in runs if run["breaks"] is not None]
    return Knee(max(holding, default=None), min(broke, default=None))


async def _cut_short(work: Awaitable[None]) -> bool:
    """Ctrl-C, which cancels this task, ends ``work`` alone: what was measured until then is reported."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return True
    return False


def make_target(options: argparse.Namespace) -> Target:
    """
    Raises:
        OptionsError: a file that is named cannot be read, or is not what it should be.
    """
    access = Access(
        options.target,
        options.model,
        _first_line(options.api_key_file),
        _authority(options.ca_file),
        options.connections,
    )
    exact = DATASETS[options.dataset].lengths_given if options.ignore_eos is None else options.ignore_eos
    sampling = Sampling(options.temperature, exact, options.seed)
    if options.target.startswith("http"):
        return HttpTarget(access, sampling, options.endpoint, options.vocab_size)
    return GrpcTarget(access, sampling)


def _first_line(path: pathlib.Path | None) -> str | None:
    content = _bytes(path)
    return None if content is None else content.decode("latin-1").partition("\n")[0].strip()


def _authority(path: pathlib.Path | None) -> bytes | None:
    """Looked at here: gRPC would only say that it cannot connect."""
    content = _bytes(path)
    if content is not None:
        try:
            ssl.create_default_context(cadata=content.decode("ascii"))
        except (UnicodeDecodeError, ValueError, ssl.SSLError) as cause:
            raise OptionsError(f"{path} holds no certificates in PEM") from cause
    return content


def _bytes(path: pathlib.Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as cause:
        raise OptionsError(f"{path} cannot be read: {cause.strerror}") from cause


async def measure(options: argparse.Namespace, report: Console) -> int:
    """The whole command; its exit code.

    Raises:
        TargetError, DatasetError, OptionsError, PlotError: one sentence.
    """
    if options.plot is not None:
        plot.check()
    session = await Session.open(options)
    with _raw(options) as raw:
        if raw is not None:
            raw.header(options, session.served, datasets.describe(session.asked))
        await session.warm_up()
        knee = None if session.interrupted else await _runs(session, raw, report)
        if raw is not None:
            raw.end({"interrupted": session.interrupted, "knee": None if knee is None else dataclasses.asdict(knee)})
    await session.target.close()
    if options.plot is not None and session.runs:
        plot.draw(options.plot, session.runs, knee, f"{session.served.model} at {options.target}")
    return _exit_code(session)


async def _runs(session: Session, raw: RawFile | None, report: Console) -> Knee | None:
    load = Load.of(session.options)
    if not session.options.sweep:
        table.show(report, await session.run(load, raw))
        return None
    knee = await session.sweep(load, raw)
    table.show_sweep(report, session.runs, knee)
    for run in session.runs:
        for doubt in run["generator"]["doubts"]:
            report.print(f"at {run['rate']:.3g}/s {table.BOTTLENECK}: {doubt}", highlight=False)
    return knee


@contextlib.contextmanager
def _raw(options: argparse.Namespace) -> Iterator[RawFile | None]:
    if options.out is None:
        yield None
        return
    try:
        file = options.out.open("w", encoding="utf-8")
    except OSError as cause:
        raise OptionsError(f"{options.out} cannot be written: {cause.strerror}") from cause
    with file:
        yield RawFile(file)


def _exit_code(session: Session) -> int:
    if session.interrupted:
        return INTERRUPTED
    doubted = any(run["generator"]["doubts"] for run in session.runs)
    nothing = not any(run["completed"] for run in session.runs)
    return BAD_RUN if nothing or (session.options.strict and doubted) else OK
