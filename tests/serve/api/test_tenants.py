"""Tests of tenant isolation: a tenant sends every possible request and learns nothing about another tenant."""

from __future__ import annotations

import asyncio
import functools
import pathlib
import random
import re
import string
from typing import Any

import grpc
import httpx
import pytest

from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.protos.v1 import control_pb2
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub
from jaxinfer.serve.api.auth import Authoriser, key_entry
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.api.tenants import cache_scope
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.auth import SCOPES as RPC_SCOPES
from jaxinfer.serve.http.app import SCOPES as ROUTES
from jaxinfer.serve.workers.codec import encode
from jaxinfer.serve.workers.render import renderer
from jaxinfer.text import chat_template
from jaxinfer.text.tokenizer import Tokenizer
from tests.serve.fake_engine import FakeEngine, Mischief
from tests.serve.live import live_fake
from tests.serve.tenancy import ALICE, BOB, OPERATOR, PROBES, SECONDS, Tenancy, ask, auc, run, tenancy, usage

LENGTH = 120  # characters and tokens: seven pages and a partial one


def secret(number: int) -> str:
    """Return one of 92 texts, which all differ in their first character."""
    first = (string.ascii_letters + string.digits + "+-!#$%&()*,./:;<=>?@_[]{}^~|'`")[number]
    return first + "".join(random.Random(number).choices(string.ascii_letters, k=LENGTH - 1))


class Watched(FakeEngine):
    """Records the work of the device: chunks and rows of each step, by position."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[tuple[list[tuple[int, int]], list[int]]] = []

    def _read(self, plan: StepPlan | None) -> StepResult | None:
        if plan is not None:
            chunks = [(each.chunk.start, each.chunk.length) for each in plan.prefills]
            self.work.append((chunks, [row.position for row in plan.decodes]))
        return super()._read(plan)


def test_there_is_a_probe_for_everything_that_a_tenant_may_ask() -> None:
    asked = {probe("x")[0] for probe in PROBES.values()}
    mine = {path for path, scope in RPC_SCOPES.items() if scope == "infer"}
    routes = {path for path, scope in ROUTES.items() if scope == "infer"}
    mine |= {path.replace("{model:path}", "fake").replace("{file}", "swagger-ui.css") for path in routes}
    assert asked == mine


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return bob's responses and the engine's work for them in two worlds: alice has sent the same requests before, or
    others of the same length. No two probes share a prompt prefix."""
    found = []
    for shift in (0, len(PROBES)):
        told: dict[str, Any] = {}
        run(functools.partial(_world, tmp_path_factory.mktemp("keys"), shift, told))
        found.append(told)
    return found


async def _world(folder: pathlib.Path, shift: int, told: dict[str, Any]) -> None:
    async with tenancy(folder, Watched()) as server:
        for place, probe in enumerate(PROBES.values()):
            await ask(server, ALICE, probe(secret(place + shift)))
        before = await _figures(server)
        for place, (name, probe) in enumerate(PROBES.items()):
            server.engine.work.clear()
            answers = [await ask(server, BOB, probe(secret(place))) for _ in range(2)]
            told[name] = answers, list(server.engine.work)
        told["figures"] = {name: value - before[name] for name, value in (await _figures(server)).items()}


async def _figures(server: Tenancy) -> dict[str, float]:
    """Return engine counters that do not depend on the clock."""
    page = await server.http.get("/metrics", headers={"authorization": f"Bearer {OPERATOR}"})
    found = re.findall(r"^jaxinfer:((?:prefix_cache|prompt_tokens|generation_tokens)\w*)\{.*\} (\S+)$", page.text, re.M)
    return {name: float(value) for name, value in found if not name.endswith("_created")}


def test_the_figures_of_all_do_not_say_it_either(worlds: list[dict[str, Any]]) -> None:
    """Metrics do not reveal prompts of another tenant either, to certificates or keys with the scope `observe`."""
    assert worlds[0]["figures"] == worlds[1]["figures"]
    assert worlds[0]["figures"]["prefix_cache_hits_total"] > 0, "of his own"


@pytest.mark.parametrize("name", PROBES)
def test_an_answer_does_not_say_what_another_tenant_asked(name: str, worlds: list[dict[str, Any]]) -> None:
    told, otherwise = (world[name] for world in worlds)
    assert told == otherwise
    assert told[0][0][0] in (200, "StatusCode.UNIMPLEMENTED" if "embed" in name else "StatusCode.OK")


COUNTED = {
    "generate": "cachedTokens",
    "batch": "cachedTokens",
    "completions": "cached_tokens",
    "chat, stream": "cached_tokens",
    "vllm": "cachedTokens",
}


def test_what_is_found_in_the_cache_does_not_tell_what_another_has_asked(tmp_path: pathlib.Path) -> None:
    async def attack() -> None:
        async with tenancy(tmp_path, Watched()) as server:
            for place, name in enumerate(COUNTED):
                await _told_apart(server, name, range(14 * place, 14 * (place + 1)))

    run(attack)


async def _told_apart(server: Tenancy, name: str, numbers: range) -> None:
    probe, field = PROBES[name], COUNTED[name]
    order = [(number, number % 2 == 0) for number in numbers]
    random.Random(0).shuffle(order)
    for number, primed in order:
        if primed:
            await ask(server, ALICE, probe(secret(number)))
    await ask(server, BOB, probe(secret(91)))  # prompts may share a prefix: of a template or a list
    cached: dict[bool, list[float]] = {True: [], False: []}
    work: dict[bool, list[float]] = {True: [], False: []}
    for number, primed in order:
        server.engine.work.clear()
        told = await ask(server, BOB, probe(secret(number)))
        cached[primed].append(max(usage(told, field), default=0))
        work[primed].append(-sum(length for chunks, _ in server.engine.work for _, length in chunks))
    assert (auc(cached[True], cached[False]), auc(work[True], work[False])) == (0.5, 0.5), name
    own = await ask(server, BOB, probe(secret(numbers[0])))
    assert max(usage(own, field)) >= LENGTH - 32, "a tenant finds what it has asked itself"


def test_figures_are_not_for_those_who_may_only_infer(tmp_path: pathlib.Path) -> None:
    async def attack() -> None:
        async with tenancy(tmp_path) as server:
            for key, wanted in ((BOB, 403), ("nobody", 401), (OPERATOR, 200)):
                answer = await server.http.get("/metrics", headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == wanted
                assert ("prefix_cache" in answer.text) == (wanted == 200)
            with pytest.raises(grpc.RpcError) as refusal:
                await _Control(server, BOB).GetStats(control_pb2.GetStatsRequest())
            assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
            for page in ("/health", "/ready"):
                assert (await server.http.get(page)).json() == {"state": "ready"}

    run(attack)


class _Control:
    """A Control client with a key."""

    def __init__(self, server: Tenancy, key: str) -> None:
        self._stub, self._metadata = ControlStub(server.control), (("authorization", f"Bearer {key}"),)

    def __getattr__(self, name: str) -> Any:
        return lambda request: getattr(self._stub, name)(request, metadata=self._metadata)


# ---- groups, and sharing between all tenants


async def _found(server: Tenancy, key: str, number: int) -> int:
    told = await ask(server, key, PROBES["completions"](secret(number)))
    return max(usage(told, "cached_tokens"))


@pytest.mark.parametrize(
    ("groups", "shared"),
    [({"alice": "team", "bob": "team"}, True), ({"alice": "team"}, False), ({"alice": "bob", "bob": None}, False)],
)
def test_a_group_of_keys_shares_and_nobody_else(groups: dict, shared: bool, tmp_path: pathlib.Path) -> None:
    def scope(tenant: str) -> str:
        return cache_scope(tenant, Authoriser(tmp_path / "keys.yaml").cache_group(tenant))

    async def story() -> None:
        async with tenancy(tmp_path, groups=groups, scope=scope) as server:
            assert await _found(server, ALICE, 1) == 0
            assert (await _found(server, BOB, 1) > 0) == shared

    run(story)


def test_all_share_where_the_operator_says_so(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with tenancy(tmp_path, scope=lambda tenant: "") as server:
            assert await _found(server, ALICE, 1) == 0
            assert await _found(server, BOB, 1) > 0

    run(story)


@pytest.mark.parametrize(
    ("sharing", "groups", "shared"),
    [("tenant", [None, None], False), ("tenant", ["team", "team"], True), ("all", [None, None], True)],
)
def test_a_whole_server_does_as_its_settings_say(
    sharing: str, groups: list[str | None], shared: bool, tmp_path: pathlib.Path
) -> None:
    """The settings apply in a whole server, with the engine in its own process."""
    tenants = zip((ALICE, BOB), ("alice", "bob"), groups, strict=True)
    keys = tmp_path / "keys.yaml"
    keys.write_text("".join(key_entry(key, name, ["infer"], group) for key, name, group in tenants))
    settings = {"api_keys": str(keys), "prefix_cache_sharing": sharing}
    with live_fake(tmp_path / "model", "fake", **settings) as server, httpx.Client(base_url=server.url) as http:

        def cached(key: str) -> int:
            path, sent = PROBES["completions"](secret(1))
            answer = http.post(path, json=sent, headers={"authorization": f"Bearer {key}"}, timeout=SECONDS)
            return max(usage(answer.json(), "cached_tokens"))

        assert [cached(ALICE), cached(BOB) > 0, cached(BOB) > 0] == [0, shared, True]


@pytest.mark.parametrize(
    ("settings", "forgets"),
    [({}, False), ({"api_keys": ""}, True), ({"api_keys": "", "prefix_cache_sharing": "all"}, False)],
)
def test_a_server_with_tenants_has_a_tokenizer_that_forgets(
    settings: dict[str, str], forgets: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgot: list[Tokenizer] = []
    monkeypatch.setattr(Tokenizer, "forget", lambda self: forgot.append(self))
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_entry(ALICE, "alice", ["infer"]))
    with live_fake(tmp_path / "model", "fake", **{k: v or str(keys) for k, v in settings.items()}) as server:
        assert server.server.frontend is not None
        assert (forgot == [server.server.frontend.tokenizer]) == forgets


def test_a_template_of_a_request_is_compiled_whoever_sent_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(chat_template, "_compile", lambda *given: compiled.append(given[2]) or COMPILE(*given))
    asked = {"messages": [], "tools": None, "variables": {}, "template": "{{ 1 + 1 }}"}
    asked |= {"add_generation_prompt": True, "continue_final_message": False}
    render = renderer({}, {})
    assert [render(encode(asked)) for _ in range(2)] == ["2"] * 2
    assert compiled == [asked["template"]] * 2


COMPILE = chat_template._compile

# ---- request ids

SLOW = Mischief(seconds=0.005)


async def _begun(frontend: Frontend, tenant: str, request_id: str) -> Any:
    """Return a long-running generation that has a token."""
    call = Call(f"{tenant} asks", {"max_tokens": 1900, "seed": 1}, request_id=request_id, tenant=tenant)
    generation = await frontend.generate(call)
    await anext(generation)
    return generation


async def _rest(generation: Any) -> str | None:
    reason = None
    async for delta in generation:
        reason = delta.finish_reason
    return reason


def test_two_tenants_may_use_one_id_at_once(tmp_path: pathlib.Path) -> None:
    async def attack() -> None:
        async with tenancy(tmp_path, FakeEngine(SLOW)) as server:
            generation = await _begun(server.frontend, "alice", "r")
            for name in ("generate", "batch", "completions", "chat"):
                told = await ask(server, BOB, PROBES[name](secret(1)))
                assert told[0] in (200, "StatusCode.OK"), told
                assert "already" not in str(told)
            assert generation.request_id == "r"
            with pytest.raises(ServeError, match="request_id='r' is in use") as refusal:
                await _begun(server.frontend, "alice", "r")
            assert refusal.value.kind is Kind.EXISTS
            await generation.aclose()
            await (await _begun(server.frontend, "alice", "r")).aclose()

    run(attack)


@pytest.mark.parametrize(("tenant", "ended"), [(None, {"alice", "bob"}), ("bob", {"bob"}), ("carol", set())])
def test_an_operator_ends_a_request_by_its_id_and_tenant(
    tenant: str | None, ended: set[str], tmp_path: pathlib.Path
) -> None:
    async def story() -> None:
        async with tenancy(tmp_path, FakeEngine(SLOW)) as server:
            running = {name: await _begun(server.frontend, name, "r") for name in ("alice", "bob")}
            other = await _begun(server.frontend, "bob", "bob\\nr")
            await _Control(server, OPERATOR).Abort(control_pb2.AbortRequest(request_id="r", tenant=tenant))
            for name in ended:
                assert await asyncio.wait_for(_rest(running[name]), 30) == "abort"
            for generation in [other, *(running[name] for name in running.keys() - ended)]:
                assert (await anext(generation)).finish_reason is None
                await generation.aclose()

    run(story)


def test_no_tenant_ends_another_ones_request_by_leaving_its_own(tmp_path: pathlib.Path) -> None:
    async def attack() -> None:
        async with tenancy(tmp_path, FakeEngine(SLOW)) as server:
            kept, left = [await _begun(server.frontend, name, "r") for name in ("alice", "bob")]
            await left.aclose()
            assert (await anext(kept)).finish_reason is None
            await kept.aclose()

    run(attack)
