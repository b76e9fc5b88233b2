"""benchmarks/tenant_isolation.py: its arithmetic by hand, its attack on leaking fakes, and on a real server."""

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks import tenant_isolation as attack
from benchmarks.tenant_isolation import Seen


def test_the_area_under_the_curve() -> None:
    assert attack.auc([3, 4], [1, 2]) == 1
    assert attack.auc([1, 2], [3, 4]) == 0
    assert attack.auc([1, 2], [1, 2]) == 0.5
    assert attack.auc([2, 3], [1, 3]) == (1 + 0 + 1 + 0.5) / 4


def test_its_error_where_nothing_is_told() -> None:
    chance = random.Random(0)
    found = [attack.auc(*([chance.random() for _ in range(40)] for _ in range(2))) for _ in range(400)]
    spread = math.sqrt(sum((each - 0.5) ** 2 for each in found) / len(found))
    assert spread == pytest.approx(attack.null_error(40, 40), rel=0.15)


class Leaky:
    """A fake server whose tenants share a cache if ``shares``, with token counts as its clock."""

    def __init__(self, shares: bool) -> None:
        self.shares = shares
        self.known: dict[str, set[str]] = {}
        self.asked: list[tuple[str, str]] = []

    def tenant(self, name: str) -> "Tenant":
        return Tenant(self, name)


class Tenant(attack.Tenant):
    def __init__(self, server: Leaky, name: str) -> None:
        self.server, self.name = server, "" if server.shares else name
        self.told = name

    def ask(self, prompt: str) -> tuple[float, int]:
        known = self.server.known.setdefault(self.name, set())
        found = prompt in known
        known.add(prompt)
        self.server.asked.append((self.told, prompt))
        return (1.0, 7) if found else (9.0, 0)

    def tokenize(self, text: str) -> float:
        return 1.0


@pytest.mark.parametrize(("shares", "told"), [(True, 1.0), (False, 0.5)])
def test_the_attack_finds_a_leak_where_there_is_one(shares: bool, told: float) -> None:
    server = Leaky(shares)
    seen = attack.attack(server.tenant("victim"), server.tenant("attacker"), 40, 50)
    assert {kind: len(each) for kind, each in seen.items()} == {True: 20, False: 20}
    found = attack.figures(seen)
    assert {name: row["auc"] for name, row in found.items()} == {"ttft": told, "cached_tokens": told, "tokenize": 0.5}
    assert f"AUC {told:.3f}" in attack.table({"sharing": "all", "probes": 40, **found})
    probes = [prompt for name, prompt in server.asked if name == "attacker"][5:]
    primed = {prompt for name, prompt in server.asked if name == "victim"}
    firsts = [pair[0] in primed for pair in zip(probes[::2], probes[1::2], strict=True)]
    assert {True, False} == set(firsts), "the order says nothing"


def test_what_looks_primed_has_the_larger_figure() -> None:
    told = {True: [Seen(-1.0, 9, -1.0)], False: [Seen(-2.0, 0, -3.0)]}
    assert all(row["auc"] == 1 for row in attack.figures(told).values())


@pytest.mark.slow
@pytest.mark.parametrize("sharing", attack.SHARING)
def test_tenants_cannot_tell_what_others_asked_unless_they_share(sharing: str, tmp_path: Path) -> None:
    """Four standard errors: one run in 16,000 exceeds them by chance."""
    out = tmp_path / "result.json"
    assert attack.main(["--sharing", sharing, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    apart = {name: abs(result[name]["auc"] - 0.5) for name in ("ttft", "cached_tokens", "tokenize")}
    if sharing == "all":
        assert min(apart["ttft"], apart["cached_tokens"]) > 0.4
    else:
        assert max(apart.values()) < 4 * result["ttft"]["error"]
