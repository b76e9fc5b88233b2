"""Tests of the command `python -m jaxinfer.bench serve` on servers with known latencies."""

import asyncio
import contextlib
import json
import pathlib
import signal
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.bench import self_test, serve
from jaxinfer.bench.__main__ import main
from jaxinfer.bench.datasets import Asked, Lengths
from jaxinfer.bench.load import Load
from jaxinfer.bench.null_server import Script, serve_grpc, serve_http
from jaxinfer.bench.options import parse
from jaxinfer.bench.plot import draw, offered, plain
from jaxinfer.bench.prompts import Ids
from jaxinfer.bench.record import Record
from jaxinfer.bench.serve import OF_THE_GENERATOR, Progress, Session, below, judged, known
from jaxinfer.bench.sweep import Knee
from jaxinfer.bench.target import Served
from tests.bench.virtual import Scripted, run

SCRIPT = Script(ttft=0.02, itl=0.002)
MEASURED = (0, 3)  # 3: the generator was the bottleneck, which may happen on a busy machine


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Yield the URLs of an HTTP and a gRPC null server in a thread."""
    ready, urls = threading.Event(), dict[str, str]()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        http, http_port = await serve_http(SCRIPT)
        grpc, grpc_port = await serve_grpc(SCRIPT)
        urls.update(http=f"http://127.0.0.1:{http_port}", grpc=f"grpc://127.0.0.1:{grpc_port}")
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await stop
        http.close()
        await grpc.stop(None)

    stop = loop.create_future()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield urls
    loop.call_soon_threadsafe(stop.cancel)
    thread.join(30)
    loop.close()


def lines(path: pathlib.Path) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for line in path.read_text().splitlines():
        content = json.loads(line)
        found.setdefault(content.pop("kind"), []).append(content)
    return found


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_open_loop(
    protocol: str, servers: dict[str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, png = tmp_path / "raw.jsonl", tmp_path / "picture.png"
    words = "--request-rate 50 --num-requests 20 --warmup 2 --output-len 5:9 --goodput ttft:10000"
    files = ["--out", str(out), "--plot", str(png)]
    assert main(["serve", "--target", servers[protocol], *words.split(), *files]) in MEASURED
    shown = capsys.readouterr().out
    assert "20 of 20" in shown
    head = shown.partition("milliseconds")[0]
    for words in (
        f"{servers[protocol]}: null, ",
        "random, 128 tokens in, 5 to 9 out, temperature 0, seed 0",
        "open loop, 50 requests/s, Poisson, 20 requests",
        "ttft 10000 ms",
        " UTC, jaxinfer.bench ",
    ):
        assert words in head
    assert "100.0% within ttft 10000 ms" in shown
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    raw = lines(out)
    (header,), (figures,), (end,) = raw["header"], raw["figures"], raw["end"]
    assert header["settings"]["request_rate"] == 50
    assert header["server"]["model"] == "null"
    assert "jaxinfer" in header["versions"]
    assert (end["interrupted"], figures["run"]) == (False, 0)
    assert figures["output_tokens"] == sum(request["output_tokens"] for request in raw["request"])
    assert figures["latency"]["ttft"]["p50"] >= 0.02
    assert figures["generator"]["lateness"] is not None
    for request in raw["request"]:
        times, counts = zip(*request["deliveries"], strict=True)
        assert sum(counts) == request["asked_output"] == request["output_tokens"]
        assert list(times) == sorted(times)
        assert times[0] >= request["sent"] + 0.02 - 2e-6
        assert request["sent"] >= request["due"] - 2e-6
        assert request["error_kind"] is None


def test_equal_seeds_make_equal_runs(servers: dict[str, str], tmp_path: pathlib.Path) -> None:
    def dues(seed: int) -> list[tuple[float, int]]:
        out = tmp_path / "raw.jsonl"
        words = f"--request-rate 200 --num-requests 12 --output-len 2:6 --seed {seed} --out {out}"
        assert main(["serve", "--target", servers["http"], *words.split()]) in MEASURED
        return [(request["due"], request["asked_output"]) for request in lines(out)["request"]]

    assert dues(1) == dues(1) != dues(2)


def test_runs_differ_in_prompts_and_pauses() -> None:
    """Runs use different prompts, so that they do not hit the prefix cache of earlier runs."""

    def drawn(seed: int) -> tuple[list[object], list[list[float]]]:
        options = parse(["serve", "--target", "grpc://a", "--seed", str(seed)])
        made = Session(options, Scripted(), Served("a"), Asked(Ids(10**6), 1.0))
        load = Load(rate=5.0, requests=4)
        dues = [[each.due for each in made._prepare(load, made.items(number), number)] for number in (0, 1)]
        return [next(made.items(number)).prompt for number in (0, 1, 1 << 20)], dues

    (first, dues), (other, others) = drawn(1), drawn(2)
    assert len({tuple(prompt) for prompt in (*first, *other)}) == 6
    assert len({tuple(each) for each in (*dues, *others)}) == 4


def test_what_warms_up_is_in_no_figure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, out = Scripted(ttft=0.001, itl=0.0), tmp_path / "raw.jsonl"
    monkeypatch.setattr("jaxinfer.bench.serve.make_target", lambda options: target)
    words = f"--target grpc://a --num-requests 4 --warmup 3 --out {out}"
    assert main(["serve", *words.split()]) in MEASURED
    assert (len(target.messages), len(lines(out)["request"])) == (7, 4)


def test_a_rate_at_which_requests_fail_does_not_hold() -> None:
    session = Session(parse(["serve", "--target", "grpc://a"]), Scripted(), Served("a"), Asked(Ids(5), 1.0))
    figures = {"goodput": None, "keeping_up": 1.0, "requests": 100, "error_examples": {}}
    assert session._breaks({**figures, "completed": 98}) == "2 of 100 failed"
    told = {**figures, "completed": 98, "error_examples": {"INVALID": "n=0 is too small", "UNAVAILABLE": "draining"}}
    assert session._breaks(told) == "2 of 100 failed: n=0 is too small"
    assert session._breaks({**figures, "completed": 99}) is None


def test_a_share_below_its_bound_is_told_so_that_one_sees_it() -> None:
    assert below(0.85, 0.9) == "85 % < 90 %"
    assert below(0.8996, 0.9) == "89.96 % < 90.00 %"


def test_ctrl_c_reports_what_there_is(
    servers: dict[str, str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    ended = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores SIGINT
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def on_end(self: Progress, record: Record) -> None:
        nonlocal ended
        ended += 1
        if ended == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "on_end", on_end)
    out = tmp_path / "raw.jsonl"
    words = f"--concurrency 2 --num-requests 5000 --output-len 4 --out {out}"
    assert main(["serve", "--target", servers["http"], *words.split()]) == 130
    raw = lines(out)
    assert raw["end"][0]["interrupted"]
    kinds = [each["error_kind"] for each in raw["request"]]
    assert kinds.count(None) >= 3
    assert 1 <= kinds.count("interrupted") <= 2
    assert "failed" in capsys.readouterr().out


def test_a_run_that_tells_of_the_generator_says_so_once_and_ends_with_3(
    servers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--request-rate 100 --num-requests 10 --output-len 2 --max-lag 1e-6 --max-lateness 1e-6"
    assert main(["serve", "--target", servers["http"], *words.split()]) == OF_THE_GENERATOR == 3
    shown = capsys.readouterr().out
    assert shown.count("the generator was the bottleneck") == 1
    assert "requests left late: p99" in shown
    assert "its event loop lagged: p99" in shown


def test_a_sweep_by_an_overloaded_generator_claims_no_knee(
    servers: dict[str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report names no knee, and is not truncated at 80 columns, because a pipe has no width."""
    out = tmp_path / "raw.jsonl"
    words = "--sweep --request-rate 20 --duration 0.5 --output-len 2 --goodput ttft:0.001 --max-lateness 1e-6"
    files = ["--out", str(out), "--plot", str(tmp_path / "a.png")]
    assert main(["serve", "--target", servers["http"], *words.split(), *files]) == 3
    shown = capsys.readouterr().out
    assert shown.count("the generator was the bottleneck") == 1
    assert "at 2 of 2 rates" in shown
    assert "no knee is claimed" in shown
    assert "the knee:" not in shown
    assert "open loop, a sweep from 20 requests/s, Poisson, 0.5 s a rate" in shown
    for head in ("done/s", "tokens/s", "TTFT p99", "no: goodput 0 % < 90 %", "20*"):
        assert head in shown
    assert lines(out)["end"][0]["knee"]["doubted"]


def test_only_the_two_rates_of_the_knee_put_it_in_doubt() -> None:
    def runs(*doubted: float) -> list[dict]:
        doubts = {rate: ["it lagged"] if rate in doubted else [] for rate in (1.0, 2.0, 4.0, 8.0)}
        return [{"rate": rate, "generator": {"doubts": doubts[rate]}} for rate in doubts]

    knee = Knee(2.0, 4.0)
    assert judged(knee, runs(1.0, 8.0)) == knee
    assert judged(knee, runs(2.0)).doubted
    assert judged(knee, runs(4.0)).doubted


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("grpc://127.0.0.1:1", ["no answer from grpc://127.0.0.1:1", "refused"]),
        ("http://127.0.0.1:1", ["no answer from http://127.0.0.1:1", "refused"]),
    ],
)
def test_nobody_there(target: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--target", target]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_model_that_is_not_there(protocol: str, servers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--target", servers[protocol], "--model", "gpt-9"]) == 2
    assert "no model 'gpt-9'" in capsys.readouterr().err


def session(target: Scripted, *words: str) -> Session:
    asked = Asked(Ids(10), 1.0, output=Lengths(4, 4))
    options = parse(["serve", "--target", "grpc://x:1", "--sweep", *words])
    return Session(options, target, Served("scripted"), asked)


@pytest.mark.parametrize(("goal", "why"), [([], "keeps up"), (["--goodput", "ttft:700"], "goodput")])
def test_a_sweep_finds_the_capacity(goal: list[str], why: str) -> None:
    """The capacity is ten requests per second: eight slots of 0.8 seconds."""

    async def measured() -> tuple[Knee, list[dict]]:
        made = session(Scripted(slots=8), "--num-requests", "400", "--burstiness", "100", *goal)
        knee = await made.sweep(Load.of(made.options), None)
        return knee, made.runs

    knee, runs = run(measured())
    assert knee.holds is not None
    assert knee.breaks is not None
    assert knee.holds <= 12 < 13 < 2 * knee.breaks
    assert knee.holds > 8
    assert {each["breaks"] and each["breaks"].startswith(why) for each in runs} == {None, True}
    assert judged(known(runs), runs) == knee


def test_a_sweep_of_a_server_that_meets_no_goal_ends() -> None:
    """The sweep stops at the rate below which a run would have almost no requests."""

    async def measured() -> tuple[Knee, list[dict]]:
        made = session(Scripted(slots=8), "--duration", "1", "--request-rate", "20", "--goodput", "ttft:0.001")
        return await made.sweep(Load.of(made.options), None), made.runs

    knee, runs = run(measured())
    assert (knee.holds, knee.breaks) == (None, 5.0)
    assert [each["rate"] for each in runs] == [20.0, 10.0, 5.0]


def point(rate: float | None, breaks: str | None = None) -> dict:
    latency = {name: {"p50": 0.6, "p99": 1.2} for name in ("ttft", "tpot")}
    known = {"requests_per_second": 3.0, "output_tokens_per_second": 10 * (rate or 3.0), "latency": latency}
    return {"rate": rate, "breaks": breaks, **known}


def drawn(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, points: list[dict], knee: Knee | None) -> Any:
    """Return the saved figure."""
    found = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *args, **more: found.append(self))
    draw(tmp_path / "a.png", points, knee, {"server": "demo at home", "date": "today"})
    found[0].draw_without_rendering()
    return found[0]


def test_a_plot_is_over_the_offered_rate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are sorted by rate, ticks are plain numbers, and the title describes the run."""
    figure = drawn(tmp_path, monkeypatch, [point(4, "too slow"), point(1), point(2)], Knee(2, 4))
    assert figure.get_suptitle() == "demo at home\ntoday"
    for axis in figure.axes:
        lines = [line.get_xdata() for line in axis.get_lines() if line.get_linestyle() == "-"]
        assert [list(xs) for xs in lines] == [[1, 2, 4]] * len(lines)
        assert [line.get_xdata()[0] for line in axis.get_lines() if line.get_linestyle() == "--"] == [2]
        for markers in axis.collections:
            assert [bool(colour[3]) for colour in markers.get_facecolors()] == [True, True, False]
    ticks = [label.get_text() for axis in figure.axes for label in axis.get_yticklabels()]
    assert ticks
    assert not any("$" in tick or "e" in tick for tick in ticks)
    assert (plain(0.5), plain(600), plain(12000)) == ("0.5", "600", "12,000")


def test_a_plot_claims_no_knee_that_is_in_doubt(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for knee in (None, Knee(2, 4, doubted=True), Knee(4, None)):
        figure = drawn(tmp_path, monkeypatch, [point(2), point(4)], knee)
        assert not any(line.get_linestyle() == "--" for axis in figure.axes for line in axis.get_lines())


def test_a_run_without_a_rate_stands_where_it_was_answered() -> None:
    assert [offered(point(rate)) for rate in (None, float("inf"), 2.0)] == [3.0, 3.0, 2.0]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_self_test_measures_a_server_in_another_process(protocol: str) -> None:
    async def main() -> dict:
        async with self_test.null_server(protocol, self_test.SCRIPT) as target:
            return await self_test._round(target, 2)

    found = asyncio.run(asyncio.wait_for(main(), 120))
    assert (found["completed"], found["output_tokens"]) == (2, 2 * self_test.TOKENS)
    assert found["late"]["p50"] >= 0
    assert found["generator"]["cpu_seconds_per_delivery"] > 0


@pytest.mark.parametrize(
    ("completed", "errors", "doubts", "sweep", "code"),
    [
        (10, {}, [], False, 0),
        (0, {"timeout": 10}, [], False, 1),
        (9, {"timeout": 1}, [], False, 4),
        (9, {"timeout": 1}, ["late"], False, 4),
        (10, {}, ["late"], False, 3),
        (9, {"timeout": 1}, [], True, 0),
    ],
)
def test_exit_codes(completed: int, errors: dict[str, int], doubts: list[str], sweep: bool, code: int) -> None:
    run = {"completed": completed, "errors": errors, "generator": {"doubts": doubts}}
    knee = types.SimpleNamespace(doubted=False) if sweep else None
    assert serve._exit_code(types.SimpleNamespace(interrupted=False, runs=[run]), knee) == code
