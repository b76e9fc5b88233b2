"""The ``bench serve`` command: one run, or a sweep of runs, on one server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import ssl
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from jaxinfer.bench import datasets, plot, table
from jaxinfer.bench.about import date_line, requests_line, settings_of, versions
from jaxinfer.bench.datasets import DATASETS, Asked, DatasetError
from jaxinfer.bench.drive import Driver, Prepared
from jaxinfer.bench.figures import MS, Goals, summary
from jaxinfer.bench.grpc_target import GrpcTarget
from jaxinfer.bench.http_target import HttpTarget
from jaxinfer.bench.load import Load
from jaxinfer.bench.names import OptionsError
from jaxinfer.bench.options import DEFAULT_USERS, goals
from jaxinfer.bench.prompts import Words, tokens_per_word, usable_ids
from jaxinfer.bench.record import Record
from jaxinfer.bench.speculation import Watched, between
from jaxinfer.bench.sweep import Knee, Search
from jaxinfer.bench.target import Access, Item, Sampling, Served, Target
from jaxinfer.bench.watch import Bounds, Watch

OK, NOTHING_SUCCEEDED, OF_THE_GENERATOR, SOME_FAILED, INTERRUPTED = 0, 1, 3, 4, 130
"""Exit codes; `main` returns 2, measurement impossible."""
MOST_FAILED = 0.01  # maximum share of failed requests at a rate that holds
WARMUP_ROUND = 1 << 20  # seed number of the warm-up, so that its requests differ from those of every run


class Session:
    """An open server, and the state shared by all runs on it."""

    def __init__(self, options: argparse.Namespace, target: Target, served: Served, asked: Asked) -> None:
        self.options, self.target, self.served, self.asked = options, target, served, asked
        self.metrics = Watched(make_access(options), options.metrics)
        self.goals: Goals = goals(options.goodput)
        self.bounds = Bounds(options.max_lateness / MS, options.max_lag / MS)
        self.console = Console(stderr=True)
        self.runs: list[dict[str, Any]] = []
        self.interrupted = False

    @classmethod
    async def open(cls, options: argparse.Namespace) -> Session:
        """Open the target and describe the requests.

        Raises:
            TargetError: this server cannot be measured.
            DatasetError: the requests cannot be made.
        """
        target = make_target(options)
        served = await target.open()
        ids = None if DATASETS[options.dataset].text else usable_ids(served)
        per_word = 1.0 if ids else await tokens_per_word(target)
        asked = Asked.of(options, ids or Words(per_word), per_word, served.max_model_len)
        return cls(options, target, served, asked)

    def items(self, number: int) -> Iterator[Item]:
        """Return the requests of run ``number``: different in each, so that no run hits another's prefix cache."""
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
        """Run once and return the figures."""
        number, loop = len(self.runs), asyncio.get_running_loop()
        items = itertools.islice(self.items(number), load.requests)
        prepared = None if load.users else self._prepare(load, items, number)
        watch, progress = Watch(loop.time), Progress(self.console, load.requests if prepared is None else len(prepared))
        drafts = await self.metrics.counters()
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
        figures["speculation"] = between(drafts, await self.metrics.counters())
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
        """Run at various rates until the knee is found, or the search is interrupted."""
        options = self.options
        start = load.rate or 1.0
        limits = {"lowest": min(start, lowest_rate(load.duration)), "highest": options.sweep_max_rate}
        search = Search(start, options.sweep_precision, **limits).rates()
        rate = next(search)
        while True:
            figures = await self.run(dataclasses.replace(load, rate=rate), raw)
            figures["breaks"] = self._breaks(figures)
            if self.interrupted:
                return judged(known(self.runs[:-1]), self.runs)
            try:
                rate = search.send(figures["breaks"] is None)
            except StopIteration as found:
                return judged(found.value, self.runs)

    def _breaks(self, figures: dict[str, Any]) -> str | None:
        """Return the reason why a rate does not hold; None: it holds."""
        options, good, keeping = self.options, figures["goodput"], figures["keeping_up"]
        failed = figures["requests"] - figures["completed"]
        if failed > MOST_FAILED * figures["requests"]:
            example = itertools.islice(figures["error_examples"].values(), 1)
            return ": ".join((f"{failed} of {figures['requests']} failed", *example))
        if good is not None and good["share"] < options.good_share:
            return f"goodput {below(good['share'], options.good_share)}"
        if keeping is not None and keeping < options.keep_up:
            return f"keeps up {below(keeping, options.keep_up)}"
        return None


def below(share: float, bound: float) -> str:
    """Format ``85 % < 90 %``, with enough digits to show that it is less."""
    digits = next(each for each in range(9) if round(100 * share, each) < round(100 * bound, each) or each == 8)
    return f"{100 * share:.{digits}f} % < {100 * bound:.{digits}f} %"


def lowest_rate(duration: float | None) -> float:
    """Return the lowest rate at which a run of ``duration`` seconds has enough requests."""
    return Search.lowest if duration is None else max(Search.lowest, 5 / duration)


def known(runs: list[dict[str, Any]]) -> Knee:
    """Return the knee, as far as the runs determine it."""
    holding = [run["rate"] for run in runs if run["breaks"] is None]
    broke = [run["rate"] for run in runs if run["breaks"] is not None]
    return Knee(max(holding, default=None), min(broke, default=None))


def judged(knee: Knee, runs: list[dict[str, Any]]) -> Knee:
    """Return the knee, marked as doubted if the generator was the bottleneck at one of its two rates."""
    doubted = {run["rate"] for run in runs if run["generator"]["doubts"]}
    return dataclasses.replace(knee, doubted=not doubted.isdisjoint((knee.holds, knee.breaks)))


async def _cut_short(work: Awaitable[None]) -> bool:
    """Wait for ``work``; Ctrl-C, which cancels this task, ends only ``work``, so that the results are reported."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return True
    return False


def make_target(options: argparse.Namespace) -> Target:
    """Return the target of the options.

    Raises:
        OptionsError: a file cannot be read, or has invalid contents.
    """
    access = make_access(options)
    exact = DATASETS[options.dataset].lengths_given if options.ignore_eos is None else options.ignore_eos
    sampling = Sampling(options.temperature, exact, options.seed)
    if options.target.startswith("http"):
        return HttpTarget(access, sampling, options.endpoint, options.vocab_size)
    return GrpcTarget(access, sampling)


def make_access(options: argparse.Namespace) -> Access:
    """Return address and credentials of the options.

    Raises:
        OptionsError: as `make_target`.
    """
    return Access(
        options.target,
        options.model,
        _first_line(options.api_key_file),
        _authority(options.ca_file),
        options.connections,
    )


def _first_line(path: pathlib.Path | None) -> str | None:
    content = _bytes(path)
    return None if content is None else content.decode("latin-1").partition("\n")[0].strip()


def _authority(path: pathlib.Path | None) -> bytes | None:
    """Read and check certificates: gRPC would only report that it cannot connect."""
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
    """Run the whole command and return its exit code.

    Raises:
        TargetError, DatasetError, OptionsError, PlotError: one sentence.
    """
    if options.plot is not None:
        plot.check()
    session = await Session.open(options)
    load = Load.of(options)
    head = header(options, session.served, load)
    table.show_header(report, head)
    with _raw(options) as raw:
        if raw is not None:
            raw.header(options, session.served, datasets.describe(session.asked))
        await session.warm_up()
        knee = None if session.interrupted else await _runs(session, load, raw, report)
        if raw is not None:
            raw.end({"interrupted": session.interrupted, "knee": None if knee is None else dataclasses.asdict(knee)})
    await session.target.close()
    if options.plot is not None and session.runs:
        plot.draw(options.plot, session.runs, knee, head)
    return _exit_code(session, knee)


async def _runs(session: Session, load: Load, raw: RawFile | None, report: Console) -> Knee | None:
    if not session.options.sweep:
        table.show(report, await session.run(load, raw))
        return None
    knee = await session.sweep(load, raw)
    table.show_sweep(report, session.runs, knee)
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


def _exit_code(session: Session, knee: Knee | None) -> int:
    if session.interrupted:
        return INTERRUPTED
    if not any(run["completed"] for run in session.runs):
        return NOTHING_SUCCEEDED
    if knee is None and any(run["errors"] for run in session.runs):  # a sweep searches for rates at which some fail
        return SOME_FAILED
    doubted = knee.doubted if knee is not None else bool(session.runs[-1]["generator"]["doubts"])
    return OF_THE_GENERATOR if doubted else OK


def header(options: argparse.Namespace, served: Served, load: Load) -> dict[str, str]:
    """Return the lines of the header by name. The date is the current time, in UTC."""
    version = f"version {served.version}" if served.version else "which does not tell its version"
    found = {
        "server": f"{options.target}: {served.model}, {version}",
        "requests": requests_line(options),
        "load": _load(options, load),
    }
    if options.goodput:
        share = f", {options.good_share:.0%} of requests" if options.sweep else ""
        found["goals"] = ", ".join(f"{word.replace(':', ' ')} ms" for word in options.goodput) + share
    return found | {"date": date_line()}


def _load(options: argparse.Namespace, load: Load) -> str:
    parts = [_arrivals(options, load)]
    if load.requests is not None:
        parts.append(f"{load.requests} requests" + (" a rate" if options.sweep else ""))
    if load.duration is not None:
        parts.append(f"{load.duration:g} s" + (" a rate" if options.sweep else ""))
    return ", ".join(parts)


def _arrivals(options: argparse.Namespace, load: Load) -> str:
    if load.users is not None:
        return f"closed loop of {load.users} users"
    if load.speed is not None:
        return f"open loop, the trace's arrivals at {load.speed:g} times their speed"
    if load.rate == math.inf:
        return "open loop, all at once"
    shape = "Poisson" if load.burstiness == 1 else f"burstiness {load.burstiness:g}"
    return f"open loop, {'a sweep from ' if options.sweep else ''}{load.rate:g} requests/s, {shape}"


FORMAT = 1


class RawFile:
    """Writer of the raw file, after each run and never during one."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def header(self, options: argparse.Namespace, served: Served, more: Mapping[str, Any]) -> None:
        about = versions(("grpcio", "protobuf", "numpy"))
        settings = settings_of(options)
        self._line("header", {"format": FORMAT, "settings": settings, "server": vars(served), **about, **more})

    def run(self, records: Sequence[Record], figures: Mapping[str, Any]) -> None:
        for record in records:
            self._line("request", {"run": figures["run"], **record.as_json()})
        self._line("figures", figures)
        self._file.flush()

    def end(self, found: Mapping[str, Any]) -> None:
        self._line("end", found)

    def _line(self, kind: str, content: Mapping[str, Any]) -> None:
        json.dump({"kind": kind, **content}, self._file, separators=(",", ":"))
        self._file.write("\n")


INTERVAL = 1.0  # seconds: drawing takes milliseconds of the measurement


class Progress:
    """A progress bar on a terminal, no output elsewhere. ``total``: requests; None: unknown."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._console, self._total = console, total
        self._ended = self._failed = self._tokens = 0

    def on_end(self, record: Record) -> None:
        self._ended += 1
        self._failed += record.error_kind is not None
        self._tokens += record.output_tokens

    @contextlib.contextmanager
    def shown(self, records: Sequence[Record]) -> Iterator[None]:
        """Show the bar within the block. ``records``: the growing list of sent requests."""
        if not self._console.is_terminal:
            yield
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Bars(*columns, console=self._console, auto_refresh=False, transient=True) as bars:
            task = asyncio.get_running_loop().create_task(self._follow(bars, records))
            try:
                yield
            finally:
                task.cancel()

    async def _follow(self, bars: Bars, records: Sequence[Record]) -> None:
        bar, before = bars.add_task("", total=self._total), 0
        while True:
            words = f"{len(records) - self._ended} under way, {(self._tokens - before) / INTERVAL:.0f} tokens/s"
            before = self._tokens
            failed = f", {self._failed} failed" if self._failed else ""
            bars.update(bar, completed=self._ended, description=words + failed, refresh=True)
            await asyncio.sleep(INTERVAL)
