"""Decisions whether drafts pay for their rows, and whether draft steps pay."""

from jaxinfer.spec import WORTH_OF_A_PASS, Acceptance, ThroughputMonitor


def test_a_sequence_whose_drafts_come_true_drafts_deep_and_one_whose_fail_rests_ever_longer() -> None:
    good, bad = Acceptance(), Acceptance()
    for plan in range(20):
        good.note(4, 0, plan)
    assert good.depth() > 20
    pauses, plan = list[int](), 0
    for _ in range(60):
        plan = max(plan + 1, bad.resume)
        bad.note(0, 1, plan)
        if bad.resume > plan:
            pauses.append(bad.resume - plan)
    assert pauses[:3] == [16, 32, 64]
    assert max(pauses) == pauses[-1] == 1024, "there is a longest one"
    bad.note(1, 0, plan)
    assert bad.depth(), "one that comes true counts"


def test_depth_follows_from_the_share_that_is_accepted() -> None:
    assert Acceptance(accepted=1.0, failed=1.0).depth() == 3, "0.5 ** 3 >= 0.1 > 0.5 ** 4"
    assert Acceptance(accepted=1.0, failed=1.0).depth(WORTH_OF_A_PASS) == 2
    assert Acceptance(accepted=0.05, failed=0.95).depth() == 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def share_of_drafting(tokens: float, seconds: float, steps: int = 4000) -> float:
    """Return the share of draft steps if one gives ``tokens`` in ``seconds`` and a step without drafts gives 1 in 1."""
    clock, drafted = Clock(), 0
    tempo = ThroughputMonitor(clock)
    for _ in range(steps):
        kind = tempo.drafts(1)
        drafted += kind
        clock.now += seconds if kind else 1.0
        tempo.note(1, kind, tokens if kind else 1.0)
    return drafted / steps


def test_the_faster_kind_of_step_is_chosen() -> None:
    assert share_of_drafting(tokens=1.5, seconds=1.1) > 0.9
    assert share_of_drafting(tokens=1.05, seconds=1.2) < 0.05
    assert share_of_drafting(tokens=1.0, seconds=1.05) < 0.05
    assert share_of_drafting(tokens=1.0, seconds=1.01) < 0.05


def test_a_change_is_noticed() -> None:
    clock = Clock()
    tempo, kinds = ThroughputMonitor(clock), list[bool]()
    for step in range(6000):
        kind = tempo.drafts(1)
        kinds.append(kind)
        clock.now += 1.0
        tempo.note(1, kind, (0.9 if step < 1000 else 2.0) if kind else 1.0)
    assert not all(kinds[500:1000])
    assert sum(kinds[-200:]) > 180


def test_a_run_whose_drafts_become_few_ends_before_its_time() -> None:
    """Early on all sequences draft; later only a few do, and the others wait for them."""
    clock = Clock()
    tempo, kinds = ThroughputMonitor(clock), list[bool]()
    for step in range(120):
        kind = tempo.drafts(1)
        kinds.append(kind)
        clock.now += 2.0 if kind else 1.0
        tempo.note(1, kind, (2.5 if step < 40 else 1.1) if kind else 1.0)
    assert sum(kinds[16:40]) > 18
    assert not any(kinds[-20:])


def test_a_rest_ends_where_drafts_would_come_true() -> None:
    clock = Clock()
    tempo = ThroughputMonitor(clock)
    while not tempo.rests(1):
        kind = tempo.drafts(1)
        clock.now += 2.0 if kind else 1.0
        tempo.note(1, kind, 1.0)
    assert not tempo.drafts(1)
    tempo.wake(1)
    assert tempo.drafts(1)
    assert not tempo.rests(1)


def test_steps_with_prompts_are_not_compared() -> None:
    clock = Clock()
    tempo = ThroughputMonitor(clock)
    for _ in range(500):
        clock.now += 100.0
        tempo.note(1, True, None)
    for _ in range(26):
        clock.now += 1.0
        tempo.note(1, tempo.drafts(1), 1.0)
    assert not tempo.drafts(1), "twenty-four of them were compared"
    clock.now += 1.0
    tempo.note(1, False, 1.0)
    assert tempo._load(1)._seconds[True].value == 1.0


def test_each_load_has_a_verdict_of_its_own() -> None:
    """Drafts that pay for one sequence do not pay for four, whose steps they lengthen."""
    clock, kinds = Clock(), list[bool]()
    tempo = ThroughputMonitor(clock)
    for step in range(4000):
        alone = step % 400 < 200
        kind = tempo.drafts(1 if alone else 4)
        kinds.append(kind)
        clock.now += (1.1 if alone else 2.0) if kind else 1.0
        tempo.note(1 if alone else 4, kind, 1.7 if kind else 1.0)
    late = range(2000, 4000)
    assert sum(kinds[step] for step in late if step % 400 < 200) > 900
    assert sum(kinds[step] for step in late if step % 400 >= 200) < 100


def test_the_pause_between_two_loads_is_nobodys_step() -> None:
    clock = Clock()
    tempo = ThroughputMonitor(clock)
    for step in range(2000):
        sequences, kind = (1, tempo.drafts(1)) if step % 10 else (4, tempo.drafts(4))
        clock.now += (1.1 if kind else 1.0) if sequences == 1 else 100.0
        tempo.note(sequences, kind, 1.7 if kind else 1.0)
    assert tempo.drafts(1)
    assert not tempo.rests(1)
