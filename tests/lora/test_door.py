"""Adapter arguments of `LLM` and the command line, over an engine without a device."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from jaxinfer import LoRARequest
from jaxinfer.cli.generate import parse
from jaxinfer.config.aliases import demo_adapter
from jaxinfer.llm import LLM
from jaxinfer.lora.store import LoRAError
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.terminal import complete
from jaxinfer.types import LoRARef, Request
from tests.fakes import random_model
from tests.lora.fakes import Folders, make_store
from tests.serve.fake_engine import FakeEngine

SHORT = SamplingParams(max_tokens=3, seed=0)


class Recorder(FakeEngine):
    """A fake engine that records the adapter of each prompt."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: list[tuple[tuple[int, ...], LoRARef | None]] = []

    def add(self, request: Request) -> Request:
        self.asked.append((request.prompt_token_ids, request.lora))
        return super().add(request)


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture
def folders() -> Folders:
    return Folders(p=1, q=2)


@pytest.fixture
def llm(model, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> LLM:
    store, _ = make_store(folders)
    engine = Recorder(loras=store, enable_lora=True, max_loras=2)
    monkeypatch.setattr("jaxinfer.llm.start_engine", lambda *arguments, **named: (model, engine))
    return LLM(model)


def asked(llm: LLM) -> list[LoRARef | None]:
    return [lora for _, lora in llm.engine.asked]


def test_one_for_all_or_one_for_each(llm: LLM) -> None:
    poet = LoRARequest("poet", "p")
    llm.generate([[1], [2]], SHORT, lora=poet)
    llm.generate([[1], [2], [3]], SHORT, lora=[poet, None, LoRARequest("bard", "q")])
    llm.generate([1, 2], SHORT)
    one, other = LoRARef("poet", "1"), LoRARef("bard", "2")
    assert asked(llm) == [one, one, one, None, other, None]


def test_a_folder_is_read_once_until_it_is_loaded_again(llm: LLM, folders: Folders) -> None:
    for _ in range(3):
        llm.generate([[1]], SHORT, lora=LoRARequest("poet", "p"))
    assert folders.reads["p"] == 1
    folders.contents["p"] = 7
    llm.load_lora("poet", "p")
    llm.generate([[1]], SHORT, lora="poet")
    llm.generate([[1]], SHORT, lora=LoRARequest("poet", "q"))  # another folder under the same name
    assert [lora.identity for lora in asked(llm)] == ["1", "1", "1", "7", "2"]


def test_loaded_listed_unloaded(llm: LLM) -> None:
    llm.load_lora("poet", "p")
    assert [(each.name, each.path) for each in llm.list_loras()] == [("poet", "p")]
    llm.unload_lora("poet")
    assert llm.list_loras() == []
    with pytest.raises(RequestError, match="lora='poet' is no adapter that is loaded: known: none"):
        llm.generate([[1]], SHORT, lora="poet")
    assert llm.engine.asked == [], "nothing was generated"


def test_what_is_wrong_is_said_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lora: 1 given for 2 prompts"):
        llm.generate([[1], [2]], SHORT, lora=[None])
    with pytest.raises(LoRAError, match="adapter 'poet': nowhere: no such folder"):
        llm.generate([[1]], SHORT, lora=LoRARequest("poet", "nowhere"))
    for field, values in {"lora_name": ("", "p"), "lora_path": ("poet", "")}.items():
        with pytest.raises(RequestError, match=f"{field}='' must not be empty"):
            LoRARequest(*values)
    assert llm.engine.asked == []


def test_an_adapter_that_vanished_ends_its_requests_with_the_reason(model, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = Folders(p=1, q=2)
    store, _ = make_store(folders, 1)
    engine = Recorder(loras=store, enable_lora=True, max_loras=1)
    monkeypatch.setattr("jaxinfer.llm.start_engine", lambda *arguments, **named: (model, engine))
    llm = LLM(model)
    llm.load_lora("poet", "p")
    llm.load_lora("bard", "q")
    del folders.contents["p"]
    lost, fine = llm.generate([[1], [2]], SHORT, lora=["poet", "bard"])
    assert lost.outputs[0].finish_reason == "error"
    assert lost.outputs[0].stop_reason == "adapter 'poet': p: no such folder"
    assert fine.outputs[0].finish_reason == "length"


def test_an_engine_without_adapters_refuses_them(model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder()
    monkeypatch.setattr("jaxinfer.llm.start_engine", lambda *arguments, **named: (model, engine))
    llm = LLM(model)
    for call in (
        lambda: llm.generate([[1]], SHORT, lora=LoRARequest("poet", "p")),
        lambda: llm.generate([[1]], SHORT, lora=["poet"]),
        lambda: llm.load_lora("poet", "p"),
        lambda: llm.unload_lora("poet"),
        llm.list_loras,
    ):
        with pytest.raises(RequestError, match="lora is not served by this engine: it needs enable_lora"):
            call()
    assert engine.asked == []


# ---- the command line


def test_the_flag_enables_what_it_needs() -> None:
    args = parse(["demo", "--prompt", "a", "--lora", "poet=/a=b", "--lora", "bard=q"])
    assert args.lora == [("poet", "/a=b"), ("bard", "q")]
    assert args.settings == {"enable_lora": True, "max_loras": 2}
    assert parse(["demo", "--lora", "poet=p", "--max-loras", "5"]).settings == {"enable_lora": True, "max_loras": 5}
    assert parse(["demo", "--prompt", "a"]).settings == {}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["demo", "--lora", "=p"], "'=p' must be NAME=PATH, or the name of an adapter of demo"),
        (["demo", "--lora", "poet="], "'poet=' must be NAME=PATH"),
        (["demo", "--lora", "poet"], "poet is no adapter that ships for demo: austen, melville are adapters of demo"),
        (["path/to/model", "--lora", "austen"], "austen is no adapter that ships for path/to/model"),
    ],
)
def test_a_flag_that_names_nothing_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flags)
    assert said in capsys.readouterr().err


def test_an_adapter_that_ships_is_named_without_its_folder() -> None:
    (found,) = parse(["--model", "demo", "--lora", "austen"]).lora
    assert found == ("austen", str(demo_adapter("demo", "austen")))
    assert parse(["demo", "--lora", "austen=p"]).lora == [("austen", "p")]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--lora", "poet=p"], ["1", "1"]),
        (["--lora", "poet=p", "--lora", "bard=q"], ["1", "2"]),
        ([], [None, None]),
    ],
)
def test_texts_are_generated_with_it(
    llm: LLM, flags: list[str], wanted: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete, "start", lambda args, sequences: (llm, SHORT))
    args: argparse.Namespace = parse(["demo", "--json", *flags])
    complete.complete(args, [[1], [2]])  # type: ignore[list-item]
    assert [lora and lora.identity for lora in asked(llm)] == wanted
