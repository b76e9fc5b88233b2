"""python -m jaxinfer.bench serve: the whole command on servers of known times."""

import asyncio
import contextlib
import json
import pathlib
import signal
import threading
from collections.abc import Iterator

import pytest

from jaxinfer.bench import self_test
from jaxinfer.bench.__main__ import main
from jaxinfer.bench.datasets import Asked, Lengths
from jaxinfer.bench.null_server import Script, serve_grpc, serve_http
from jaxinfer.bench.options import parse
from jaxinfer.bench.plot import draw
from jaxinfer.bench.progress import Progress
from jaxinfer.bench.prompts import Ids
from jaxinfer.bench.record import Record
from jaxinfer.bench.serve import Load, Session, known
from jaxinfer.bench.sweep import Knee
from jaxinfer.bench.target import Served
from tests.bench.virtual import Scripted, run

SCRIPT = Script(ttft=0.02, itl=0.002)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """A null server of each kind, in a thread."""
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
    words = "--request-rate 50 --num-requests 20 --warmup 2 --output-len 5:9 --goodput ttft:10000 --max-lag 1e4"
    files = ["--out", str(out), "--plot", str(png)]
    assert main(["serve", "--target", servers[protocol], *words.split(), *files]) == 0
    shown = capsys.readouterr().out
    assert "20 of 20" in shown
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
        assert main(["serve", "--target", servers["http"], *words.split()]) == 0
        return [(request["due"], request["asked_output"]) for request in lines(out)["request"]]

    assert dues(1) == dues(1) != dues(2)


def test_runs_differ_in_prompts_and_pauses() -> None:
    """No run finds the prompts of another one cached."""

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
    assert main(["serve", *words.split()]) == 0
    assert (len(target.messages), len(lines(out)["request"])) == (7, 4)


def test_a_rate_at_which_requests_fail_does_not_hold() -> None:
    session = Session(parse(["serve", "--target", "grpc://a"]), Scripted(), Served("a"), Asked(Ids(5), 1.0))
    figures = {"goodput": None, "keeping_up": 1.0, "requests": 100}
    assert session._breaks({**figures, "completed": 98}) == "errors"
    assert session._breaks({**figures, "completed": 99}) is None


def test_ctrl_c_reports_what_there_is(
    servers: dict[str, str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    ended = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
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


def test_strict_refuses_a_run_that_tells_of_the_generator(
    servers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--request-rate 100 --num-requests 10 --output-len 2 --max-lateness 0.000001"
    command = ["serve", "--target", servers["http"], *words.split()]
    assert main(command) == 0
    assert main([*command, "--strict"]) == 1
    assert "the generator was the bottleneck" in capsys.readouterr().out


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
    options = parse(["serve", "--target", "http://x:1", "--sweep", *words])
    return Session(options, target, Served("scripted"), asked)


@pytest.mark.parametrize(("goal", "why"), [([], "queue grows"), (["--goodput", "ttft:700"], "goals")])
def test_a_sweep_finds_the_capacity(goal: list[str], why: str) -> None:
    """Eight slots of 0.8 seconds: ten requests a second."""

    async def measured() -> tuple[Knee, list[dict]]:
        made = session(Scripted(slots=8), "--num-requests", "400", "--burstiness", "100", *goal)
        knee = await made.sweep(Load.of(made.options), None)
        return knee, made.runs

    knee, runs = run(measured())
    assert knee.holds is not None
    assert knee.breaks is not None
    assert knee.holds <= 12 < 13 < 2 * knee.breaks
    assert knee.holds > 8
    assert {each["breaks"] for each in runs} == {None, why}
    assert known(runs) == knee


def test_a_sweep_of_a_server_that_meets_no_goal_ends() -> None:
    """It stops at the rate below which a run would have next to no request."""

    async def measured() -> tuple[Knee, list[dict]]:
        made = session(Scripted(slots=8), "--duration", "1", "--request-rate", "20", "--goodput", "ttft:0.001")
        return await made.sweep(Load.of(made.options), None), made.runs

    knee, runs = run(measured())
    assert knee == Knee(None, 5.0)
    assert [each["rate"] for each in runs] == [20.0, 10.0, 5.0]


def test_a_plot_with_a_knee(tmp_path: pathlib.Path) -> None:
    def point(rate: float) -> dict:
        latency = {name: {"p50": rate / 100, "p99": rate / 50} for name in ("ttft", "tpot")}
        return {"rate": rate, "completed": 1, "output_tokens_per_second": 10 * rate, "latency": latency}

    without, with_knee = tmp_path / "a.png", tmp_path / "b.png"
    draw(without, [point(1), point(2), point(4)], None, "t")
    draw(with_knee, [point(1), point(2), point(4)], Knee(2, 4), "t")
    assert with_knee.read_bytes()[:4] == without.read_bytes()[:4] == b"\x89PNG"
    assert with_knee.read_bytes() != without.read_bytes()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_self_test_measures_a_server_in_another_process(protocol: str) -> None:
    async def main() -> dict:
        async with self_test.null_server(protocol, self_test.SCRIPT) as target:
            return await self_test._round(target, 2)

    found = asyncio.run(asyncio.wait_for(main(), 120))
    assert (found["completed"], found["output_tokens"]) == (2, 2 * self_test.TOKENS)
    assert found["late"]["p50"] >= 0
    assert found["generator"]["cpu_seconds_per_delivery"] > 0
