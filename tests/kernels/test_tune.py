"""Tuning with a fake clock, GPU and kernel: search, time limits, interruptions, files; and two real candidates."""

import dataclasses
import functools
import json
import time

import jax.numpy as jnp
import pytest

from pallas_kernels import compat, tiles
from pallas_kernels.choice import Target
from pallas_kernels.mla_attention import arg_specs as mla
from pallas_kernels.specs import Problem, Tunable
from pallas_kernels.supervise import Journal
from pallas_kernels.tiles import Entry, Key, Measured
from pallas_kernels.tune import __main__ as door
from pallas_kernels.tune.bench import REFUSALS, DeviceBench
from pallas_kernels.tune.kernels import TUNABLES
from pallas_kernels.tune.search import Sweep, candidates, distance
from pallas_kernels.tune.store import Files, added
from pallas_kernels.tune.tuner import Task, Tuner

KERNEL = "fake_op.sum"


@dataclasses.dataclass(frozen=True)
class Tiles:
    keys: int = 64
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    rows: int = 16
    page: int = 64
    dtype: str = "bfloat16"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@dataclasses.dataclass
class FakeBench:
    """A bench that takes a second to prepare and 10 ms to sample; ``times`` in microseconds, ``wrong`` must not win."""

    clock: Clock
    times: dict
    wrong: dict = dataclasses.field(default_factory=dict)
    interrupt_at: float = float("inf")
    sampling: float = 0.01
    prepared: list = dataclasses.field(default_factory=list)
    sampled: list = dataclasses.field(default_factory=list)

    def _spend(self, seconds):
        self.clock.now += seconds
        if self.clock.now >= self.interrupt_at:
            raise KeyboardInterrupt

    def prepare(self, one):
        self._spend(1.0)
        self.prepared.append(one)
        return self.wrong.get(one)

    def sample(self, one):
        self._spend(self.sampling)
        self.sampled.append(one)
        time = self.times[one]
        return time() if callable(time) else time


GRID = [Tiles(keys, stages) for keys in (64, 128) for stages in (2, 3, 4)]
TIMES = {one: 100.0 - 10 * (one.keys == 128) - one.stages for one in GRID}
BEST = Tiles(128, 4)


def sweep(bench, seconds=1000.0, work=GRID):
    return Sweep(work, bench, bench.clock, bench.clock.now + seconds)


def test_finds_the_fastest():
    search = sweep(FakeBench(Clock(), TIMES))
    assert search.run() == BEST
    assert search.tried == len(GRID)


def test_those_near_the_fastest_so_far_come_first():
    bench = FakeBench(Clock(), TIMES)
    sweep(bench, work=[GRID[0], *GRID[:0:-1]]).run()
    assert bench.prepared[0] == GRID[0]
    steps = [min(distance(one, other)[0] for other in bench.prepared[:i]) for i, one in enumerate(bench.prepared) if i]
    assert steps == [1] * (len(GRID) - 1)


def test_candidates_run_in_turns_and_slow_ones_leave():
    times = dict.fromkeys(GRID, 100.0) | {GRID[1]: 200.0, GRID[2]: 110.0}
    bench = FakeBench(Clock(), times)
    sweep(bench).run()
    assert bench.sampled.count(GRID[1]) == 1  # far slower: dropped at once
    assert bench.sampled.count(GRID[2]) == 3  # clearly slower: dropped after its turns
    race = bench.sampled[len(GRID) :]
    assert race[:5] == [one for one in bench.prepared if one != GRID[1]]


def test_a_gain_within_the_noise_leaves_the_heuristic():
    assert sweep(FakeBench(Clock(), TIMES | dict.fromkeys(GRID, 99.5) | {GRID[0]: 100.0})).run() == GRID[0]


def test_a_drifting_clock_rate_misleads_nobody():
    """Every sample is slower than the one before; the best candidate is sampled last."""
    bench = FakeBench(Clock(), {})
    bench.times = {
        one: functools.partial(lambda t: t * (1 + bench.clock.now / 500), time) for one, time in TIMES.items()
    }
    assert sweep(bench).run() == BEST


def test_what_is_wrong_or_does_not_run_never_wins():
    search = sweep(FakeBench(Clock(), TIMES, wrong={BEST: "its result is 1.0 off"}))
    assert search.run() == Tiles(128, 3)
    assert search.refused == {BEST: "its result is 1.0 off"}


def test_if_the_heuristic_does_not_run_there_is_nothing_to_compare_with():
    bench = FakeBench(Clock(), TIMES, wrong={GRID[0]: "no"})
    assert sweep(bench).run() is None
    assert bench.prepared == GRID[:1]


@pytest.mark.parametrize("seconds", [0.5, 2.0, 4.0, 5.5, 100.0])
def test_ends_in_time(seconds):
    bench = FakeBench(Clock(), TIMES)
    search = sweep(bench, seconds)
    search.run()
    assert bench.clock.now <= max(seconds, 1.01) + 0.02
    assert search.tried == (len(GRID) if seconds == 100.0 else max(1, int(0.7 * seconds / 1.01)))


def test_long_samples_end_in_time_too():
    bench = FakeBench(Clock(), dict.fromkeys(GRID, 100.0), sampling=1.0)
    sweep(bench, 20.0).run()
    assert bench.clock.now <= 21.0
    assert len(bench.sampled) > len(GRID)


def test_interrupted_it_gives_the_best_so_far():
    bench = FakeBench(Clock(), TIMES, interrupt_at=4.5)
    search = sweep(bench)
    assert search.run() == min(bench.sampled, key=TIMES.get) != GRID[0]
    assert search.interrupted


def test_interrupted_before_anything_ran_it_gives_nothing():
    search = sweep(FakeBench(Clock(), TIMES, interrupt_at=0.5))
    assert search.run() is None
    assert search.interrupted


# --------------------------------------------------------------------------------------------------------------
# Several shapes, and the files.


def problem(shape, multiprocessors):
    return Problem(
        key=Key({"page": shape.page, "dtype": shape.dtype}, {"rows": shape.rows}),
        heuristic=Tiles(),
        grid={"keys": (64, 128), "stages": (2, 3, 4, 9)},
        refusal=lambda one: "too many stages" if one.stages > 4 else None,
        launch=lambda *_, **__: None,
        operands=list,
    )


TUNABLE = Tunable(KERNEL, frozenset({"keys"}), (Shape(), Shape(rows=1), Shape(page=16)), problem)
TASKS = [Task(TUNABLE, shape) for shape in TUNABLE.shapes]


def tuner(tmp_path, bench, say=lambda line: None, **changes):
    (tmp_path / "fake_op").mkdir(exist_ok=True)
    clock = bench.clock
    known = {"device": "H100", "multiprocessors": 132, "facts": {"date": "2026-01-02"}, "failures": (OSError,)}
    made = {"bench": lambda task, problem: bench, "files": Files(None, tmp_path), "clock": clock, "say": say}
    return Tuner(**{**known, **made, "journal": Journal(tmp_path / "journal"), **changes})


def written(tmp_path):
    return json.loads((tmp_path / "fake_op/tiles.json").read_text(encoding="utf-8"))["entries"]


def test_candidates_are_the_heuristics_and_the_grid_that_the_kernel_takes():
    made = candidates(problem(Shape(), 132), {})
    assert made[0] == Tiles()
    assert sorted(made, key=dataclasses.astuple) == GRID
    assert candidates(problem(Shape(), 132), {"keys": 128}) == GRID[3:]
    assert candidates(problem(Shape(), 132), {"stages": 9}) == []


def test_results_are_written_and_found_again(tmp_path):
    assert tuner(tmp_path, FakeBench(Clock(), TIMES)).run(TASKS, 1000)
    first, other = written(tmp_path)[::-1]
    assert (first["options"]["page"], other["options"]["page"]) == (64, 16)
    assert first["bits"] == {"keys": 128}
    assert [one["sizes"] for one in first["measured"]] == [{"rows": 16}, {"rows": 1}]
    facts = first["measured"][0]["facts"]
    assert facts == {
        "microseconds": 86.0,
        "heuristic_microseconds": 98.0,
        "tried": 6,
        "candidates": 6,
        "date": "2026-01-02",
    }
    assert tiles.tuned(KERNEL, "H100", problem(Shape(rows=3), 1).key, package=tmp_path) == {"keys": 128, "stages": 4}


def test_later_sizes_keep_the_bits_of_the_first(tmp_path):
    bench = FakeBench(Clock(), TIMES)
    tuner(tmp_path, bench).run(TASKS[:1], 1000)
    bench.times = {one: 1000.0 - time for one, time in TIMES.items()}  # now 64 keys and 2 stages are fastest
    bench.prepared.clear()
    tuner(tmp_path, bench).run(TASKS[1:2], 1000)
    assert {one.keys for one in bench.prepared} == {128}


def test_a_run_that_goes_on_replaces_equal_sizes_alone(tmp_path):
    bench = FakeBench(Clock(), TIMES)
    made = tuner(tmp_path, bench)
    made.run(TASKS[:2], 1000)
    bench.times = TIMES | {Tiles(128, 3): 1.0}
    made.run(TASKS[:1], 1000)
    (found,) = written(tmp_path)
    assert [(one["sizes"]["rows"], one["tiles"]["stages"]) for one in found["measured"]] == [(1, 4), (16, 3)]


def test_sizes_measured_with_other_bits_do_not_join():
    def entry(keys):
        return Entry("H100", KERNEL, {}, {"keys": keys}, (Measured({"rows": 1}, {"stages": 2}, {}),))

    with pytest.raises(ValueError, match="new sizes have"):
        added((entry(64),), entry(128))


def test_forgetting_concerns_one_kernel_of_one_device(tmp_path):
    files = Files(tmp_path / "out.json")
    for device, kernel in (("H100", KERNEL), ("H100", "fake_op.other"), ("H200", KERNEL)):
        files.add(Entry(device, kernel, {}, {}, ()))
    files.forget("H100", KERNEL)
    assert [(one.device, one.kernel) for one in tiles.read(tmp_path / "out.json")] == [
        ("H100", "fake_op.other"),
        ("H200", KERNEL),
    ]


def test_time_is_shared_and_what_is_left_goes_to_those_behind(tmp_path):
    bench, said = FakeBench(Clock(), TIMES), []
    tuner(tmp_path, bench, said.append).run(TASKS, 9)
    assert bench.clock.now <= 9.02
    assert len(said) == 3
    assert said[0].endswith("2 of 6 tried")  # in a third of the time
    tuner(tmp_path, bench, said.append).run(TASKS, 0)
    assert "time is up: 3 shapes" in said[-1]


def test_interrupted_it_keeps_what_it_has(tmp_path):
    bench, said = FakeBench(Clock(), TIMES, interrupt_at=8.0), []
    assert not tuner(tmp_path, bench, said.append).run(TASKS, 1000)
    assert "interrupted" in said[-1]
    assert [one["sizes"]["rows"] for one in written(tmp_path)[0]["measured"]] == [16, 1]


def test_a_failure_is_told_and_the_next_shape_goes_on(tmp_path):
    def make(task, problem):
        if problem.key.options["page"] == 64:
            raise OSError("out of memory")
        return FakeBench(clock, TIMES)

    clock, said = Clock(), []
    made = dataclasses.replace(tuner(tmp_path, FakeBench(clock, TIMES), said.append), bench=make)
    assert made.run(TASKS, 1000)
    assert made.failed == ["fake_op.sum at its first shape", "fake_op.sum rows=1"]
    assert "failed: out of memory" in said[0]
    assert [one["options"]["page"] for one in written(tmp_path)] == [16]


def test_the_reason_of_a_heuristic_that_fails_is_told(tmp_path):
    said = []
    made = tuner(tmp_path, FakeBench(Clock(), TIMES, wrong={Tiles(): "it does not run: no"}), said.append)
    made.run(TASKS[:1], 1000)
    assert said == ["fake_op.sum at its first shape: failed: it does not run: no"]


# --------------------------------------------------------------------------------------------------------------
# The bench, with functions in place of kernels.


@dataclasses.dataclass(frozen=True)
class Scaled:
    keys: int = 64
    stages: int = 1


def bench_of(launch, sets=2):
    operands = [(jnp.arange(1.0, 5.0, dtype=jnp.float32) + index,) for index in range(sets)]
    made = dataclasses.replace(problem(Shape(), 1), launch=launch, operands=lambda: operands)
    return DeviceBench(made, frozenset({"keys"}), sample_seconds=0.0)


def test_results_are_compared_with_the_first_ones():
    def launch(x, *, tiles):
        return x * (1 + {64: 0, 128: 1e-3, 192: 1e-2, 256: jnp.nan}[tiles.keys]) + 1e-6 * (tiles.stages - 1)

    bench = bench_of(launch)
    assert bench.prepare(Scaled()) is None
    assert bench.prepare(Scaled(128)) is None  # other bits, within the tolerance
    assert "e-02 off" in bench.prepare(Scaled(192))
    assert "not finite" in bench.prepare(Scaled(256))
    assert "changes bits" in bench.prepare(Scaled(64, 2))
    assert bench.sample(Scaled()) > 0


def test_what_the_compiler_refuses_is_a_reason():
    def launch(x, *, tiles):
        if tiles.stages > 1:
            raise ValueError("no room\nfor this")
        return x

    bench = bench_of(launch)
    assert bench.prepare(Scaled()) is None
    assert bench.prepare(Scaled(64, 2)) == "it does not run: no room"


def test_a_sample_is_the_time_of_one_launch():
    clock, made = Clock(), dataclasses.replace(problem(Shape(), 1), launch=lambda x, *, tiles: x + 1)
    operands = [(jnp.ones(3),), (jnp.zeros(3),)]
    ticking = iter(range(100))
    bench = DeviceBench(
        dataclasses.replace(made, operands=lambda: operands),
        frozenset(),
        clock=lambda: float(next(ticking)),
        sample_seconds=3.0,
    )
    assert bench.prepare(Scaled()) is None  # a call takes a second of this clock: three calls make a sample
    assert bench.sample(Scaled()) == pytest.approx(1e6 / (3 * 2))
    assert clock.now == 0


# --------------------------------------------------------------------------------------------------------------
# The command.


def test_without_a_gpu_it_says_so(capfd):
    assert door.main(["--seconds", "1"]) == 3
    assert "no GPU here: JAX runs on cpu" in capfd.readouterr().err


def test_another_gpu_is_named():
    assert "(NVIDIA A100) has another" in door._unfit(Target("gpu", (8, 0), "NVIDIA A100"))
    assert door._unfit(Target("gpu", (9, 0), "NVIDIA H100")) is None


def test_a_dry_run_lists_every_kernel(capsys):
    assert door.main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{one.kernel} at its first shape" in shown for one in TUNABLES)
    assert " 0 candidates" not in shown


def test_shapes_can_be_given(capsys):
    assert door.main(["--dry-run", "--op", "paged_attention.decode", "--shape", "rows=3,page=128", "context=512"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("paged_attention.decode page=128,rows=3: ")
    assert second.startswith("paged_attention.decode context=512: ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--op", "softmax"], "no kernel begins with softmax"),
        (["--op", "paged_attention.decode", "--shape", "colour=3"], "has no colour"),
        (["--op", "paged_attention.decode", "--shape", "rows=many"], "invalid literal"),
    ],
)
def test_wrong_arguments_are_explained(arguments, why, capsys):
    with pytest.raises(SystemExit) as error:
        door.main(["--dry-run", *arguments])
    assert error.value.code == 2
    assert why in capsys.readouterr().err


def test_the_first_shapes_of_all_kernels_come_first():
    kernels = [task.tunable.kernel for task in door._tasks([""], [door.SHIPPED])]
    assert kernels[: len(TUNABLES)] == [one.kernel for one in TUNABLES]
    assert len(kernels) == sum(len(one.shapes) for one in TUNABLES)


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda one: one.kernel)
def test_every_shape_that_ships_can_be_swept(tunable):
    for shape in tunable.shapes:
        made = tunable.problem(shape, 132)
        assert candidates(made, {})[0] == made.heuristic
        assert set(made.grid) == {field.name for field in dataclasses.fields(made.heuristic)} >= tunable.bits
    keys = [tunable.problem(shape, 132).key for shape in tunable.shapes]
    assert len({json.dumps(dataclasses.asdict(key), sort_keys=True) for key in keys}) == len(keys)


@pytest.mark.slow
def test_a_real_sweep_of_two_candidates_interpreted(tmp_path):
    """MLA decode with splits of 128 and 256 keys, whose results are compared. The times have no meaning."""
    shape = mla.Latents(sequences=1, context=256, heads=8, page=64)
    real = shape.problem(1)
    interpret = compat.interpret_params(detect_races=False)
    small = dataclasses.replace(
        real,
        heuristic=dataclasses.replace(real.heuristic, keys_per_split=128, blocks=1),
        grid={"keys_per_split": (128, 256)},
        launch=functools.partial(real.launch, interpret=interpret),
        operands=lambda: real.operands()[:1],
    )
    tunable = dataclasses.replace(mla.TUNED[0], problem=lambda *_: small)
    (tmp_path / "mla_attention").mkdir()
    said = []

    def bench(task, problem):
        return DeviceBench(problem, task.tunable.bits, sample_seconds=0.0)

    made = tuner(tmp_path, FakeBench(Clock(), {}), said.append, failures=REFUSALS, clock=time.monotonic)
    made = dataclasses.replace(made, bench=bench)
    assert made.run([Task(tunable, shape)], 400)
    assert not made.failed, said
    (found,) = tiles.read(tmp_path / "mla_attention/tiles.json")
    assert found.measured[0].facts["tried"] == 2
    assert "left out" not in "".join(said)
