"""Tests of the clients of the control port, against a real server over the fake engine."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Iterator

import pytest

from jaxinfer import client as c
from jaxinfer.cli.app import main
from jaxinfer.serve.frontend.loras import LoRAs
from tests.client.serving import Served, served
from tests.lora.fakes import write_number
from tests.serve.fake_engine import Mischief
from tests.serve.fake_weights import digest_of, write_fake_weights


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    for content, name in enumerate(("pirate", "poet"), 1):
        write_number(root / name, content)
    with served(loras=lambda engine: LoRAs(engine, root=root)) as run:
        yield run


def target(server: Served) -> str:
    return f"127.0.0.1:{server.run.servers.control_port}"


def test_adapters_come_and_go(server: Served) -> None:
    with c.Control(target(server), timeout=20) as control, c.Client(server.target, timeout=20) as client:
        lora = control.load_lora("a", "pirate")
        assert (lora.name, pathlib.Path(lora.path).name, lora.identity, lora.rank, lora.parent) == (
            *("a", "pirate", "1", 1),
            "fake",
        )
        assert control.list_loras() == [lora]
        answer = client.generate("Hi", max_tokens=4, lora_name="a")
        with client.stream("Hi", max_tokens=4) as stream:
            assert (answer.model, stream.model) == ("a", "fake")
        assert len(client.score("Hi", ["a"], lora_name="a")) == 1
        assert [item.result().model for item in client.generate_batch(["Hi"], max_tokens=2, lora_name="a")] == ["a"]
        with pytest.raises(c.AlreadyExists):
            control.load_lora("a", "poet")
        assert control.load_lora("a", "poet", load_inplace=True).identity == "2"
        control.unload_lora("a")
        with pytest.raises(c.NotFound):
            client.generate("Hi", lora_name="a")
        with pytest.raises(c.NotFound):
            client.score("Hi", ["a"], lora_name="a")
        with pytest.raises(c.NotFound):
            control.unload_lora("a")


def test_a_server_is_operated() -> None:
    with (
        served(Mischief(seconds=0.05)) as run,
        c.Control(target(run), timeout=20) as control,
        c.Client(run.target) as client,
    ):
        stats = control.stats()
        assert (stats["state"], stats["running"], stats["draft_accepted_at"]) == ("ready", 0, [])
        assert stats["finished"]["abort"] == 0
        assert "lora_usage" not in stats
        with client.stream("Hi", max_tokens=400, request_id="mine") as stream:
            next(stream)
            assert control.stats()["running"] == 1
            control.abort("mine")
            assert [delta.finish_reason for delta in stream][-1] == "abort"
        assert isinstance(control.flush_prefix_cache(), int)
        with client.stream("Hi", max_tokens=400) as stream:
            next(stream)
            assert control.drain(0.0) == 1
            with pytest.raises(c.Unavailable):
                list(stream)
        with pytest.raises(ValueError, match="within=-1"):
            control.drain(-1)


def test_the_command_prints_json(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["control", "stats", "--target", target(server)]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "ready"
    assert main(["control", "flush", "--target", target(server)]) == 0
    assert json.loads(capsys.readouterr().out) == {"pages": 0}
    for action in ("start-profile", "stop-profile"):  # the server has no folder for them
        assert main(["control", action, "--target", target(server)]) == 2
        assert "profile_dir" in capsys.readouterr().err
    assert main(["control", "stats", "--target", "localhost:1", "--timeout", "5"]) == 2
    assert main(["control", "stats", "--api-key-file", "/no/such"]) == 2


def test_profiles_of_so_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with served(profile_dir="traces") as run, c.Control(target(run), timeout=20) as control:
        profiles = run.run.supervisor.profiles
        control.start_profile(3)
        assert control.stop_profile() == "profiles/1"
        assert profiles == ["start 3", "stop"]
        with pytest.raises(c.InvalidRequest, match="steps"):
            control.start_profile(0)
        with pytest.raises(ValueError, match="steps"):
            control.start_profile(2**31)
        assert main(["control", "start-profile", "--steps", "4", "--target", target(run)]) == 0
        capsys.readouterr()
        assert main(["control", "stop-profile", "--target", target(run)]) == 0
        assert json.loads(capsys.readouterr().out) == {"folder": "profiles/1"}

        async def story() -> None:
            async with c.AsyncControl(target(run), timeout=20) as other:
                await other.start_profile()
                assert await other.stop_profile() == "profiles/1"

        asyncio.run(story())
        assert profiles[2:] == ["start 4", "stop", "start 1000", "stop"]


def test_the_same_for_asyncio(server: Served) -> None:
    async def story() -> None:
        async with c.AsyncControl(target(server), timeout=20) as control, c.AsyncClient(server.target) as client:
            lora = await control.load_lora("b", "poet")
            assert await control.list_loras() == [lora]
            assert (await client.generate("Hi", max_tokens=4, lora_name="b")).model == "b"
            with pytest.raises(c.InvalidRequest, match="lora_path"):
                await control.load_lora("c", "nowhere")
            await control.unload_lora("b")
            assert (await control.stats())["lora_usage"]["loaded"] == 0
            await control.abort("unknown", tenant="nobody")
            assert await control.flush_prefix_cache() == 0
            with pytest.raises(c.NotFound):
                await control.unload_lora("b")

    asyncio.run(story())


def test_a_server_without_adapters() -> None:
    refused = pytest.raises(c.FailedPrecondition, match="enable_lora")
    with served() as run, c.Control(target(run), timeout=20) as control, refused:
        control.list_loras()


def test_what_cannot_be_sent_is_no_call(server: Served) -> None:
    with c.Control(target(server)) as control:
        with pytest.raises(ValueError, match="lora_name=1 cannot be sent"):
            control.load_lora(1, "poet")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="lora_path=None cannot be sent"):
            control.load_lora("a", None)  # type: ignore[arg-type]
        assert repr(control) == f"<Control {target(server)}>"
    with pytest.raises(ValueError, match="http://"):
        c.Control("http://localhost:1")


def test_weights_change_and_the_engine_pauses(tmp_path: pathlib.Path) -> None:
    write_fake_weights(tmp_path / "a", "new")
    with served(Mischief(seconds=0.005), weights_root=str(tmp_path)) as run:
        address = target(run)
        with c.Control(address, timeout=20) as control, c.Client(run.target, timeout=20) as client:
            assert control.weight_info() == c.WeightInfo(0, False, [], checksums={})
            assert client.generate("Hi", max_tokens=2).outputs[0].weight_version == 0
            with client.stream("Hi", max_tokens=300, ignore_eos=True) as stream:
                deltas = [next(stream)]
                update = control.update_weights("a", weight_version=3, mode="keep")
                assert (update.weight_version, update.bytes, update.seconds, update.is_paused) == (3, 3, 0.5, False)
                deltas += list(stream)
            assert [delta.weight_version for delta in deltas] == [None] * (len(deltas) - 1) + [3]
            first, second = deltas[-1].weight_versions
            assert (first[:2], second[0], second[2], first[2]) == ((0, 0), 3, 300, second[1])
            output = client.generate("Hi", max_tokens=2).outputs[0]
            assert (output.weight_version, output.weight_versions) == (3, ())
            assert control.weight_info(checksums=True).checksums == {"text": digest_of("new")}
            assert control.pause("keep").is_paused
            assert control.abort_all() == 0
            assert not control.resume().is_paused
            assert control.sleep(2, ["weights"], mode="wait").asleep == ["weights"]
            with pytest.raises(c.InvalidRequest):
                control.resume()
            assert control.wake_up(["weights"]).asleep == []
            with pytest.raises(c.InvalidRequest) as refused:
                control.update_weights("a", weight_version=3)
            assert refused.value.field == "weight_version"
            for wrong in (lambda: control.pause("now"), lambda: control.update_weights("a", mode="now")):
                with pytest.raises(ValueError, match="now"):
                    wrong()

        async def story() -> None:
            async with c.AsyncControl(address, timeout=20) as control:
                assert (await control.pause("abort")).is_paused
                assert (await control.update_weights("a")).weight_version == 4
                assert await control.abort_all() == 0
                assert not (await control.resume()).is_paused
                assert (await control.sleep()).asleep == ["kv_cache", "weights"]
                assert (await control.wake_up()).asleep == []
                assert (await control.weight_info()).weight_version == 4

        asyncio.run(story())


def test_a_server_without_weights_root_reads_none(server: Served) -> None:
    with c.Control(target(server), timeout=20) as control, pytest.raises(c.FailedPrecondition):
        control.update_weights("a")


def test_the_command_changes_a_running_engine(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_fake_weights(tmp_path / "a", "new")
    write_fake_weights(tmp_path / "b", "more")
    with served(weights_root=str(tmp_path)) as run:

        def control(*words: str) -> dict[str, object]:
            assert main(["control", *words, "--target", target(run)]) == 0
            return json.loads(capsys.readouterr().out)

        state = {"weight_version": 6, "is_paused": False, "asleep": []}
        assert control("update-weights", "a", "--weight-version", "6") == state | {"bytes": 3, "seconds": 0.5}
        assert control("pause", "--mode", "keep") == state | {"is_paused": True}
        assert control("resume") == state
        assert control("abort-all") == {"aborted": 0}
        assert control("sleep", "--level", "2", "--tags", "kv_cache")["asleep"] == ["kv_cache"]
        assert control("wake-up") == state
        assert control("weight-info") == state | {"checksums": {"text": digest_of("new")}}
        update = control("update-weights", "a", "--parts", "b")
        assert (update["weight_version"], update["bytes"]) == (7, 7)
        for words in (["update-weights"], ["resume", "now"], ["pause", "--mode", "now"]):
            assert main(["control", *words, "--target", target(run)]) == 2
