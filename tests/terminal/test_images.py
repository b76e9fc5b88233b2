"""Images at the terminal: `jaxinfer generate --image`, and `/image` in a chat."""

from __future__ import annotations

import pathlib

import pytest

from jaxinfer.cli import generate
from jaxinfer.cli.app import main
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.terminal import complete
from jaxinfer.terminal.chat import Conversation
from tests.fake_vision_processor import FakeProcessor
from tests.serve.vision import file_of, ids_of, video_source
from tests.test_llm_images import FakeLLM

PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    (path := tmp_path / "a.png").write_bytes(file_of(4, 2))
    return str(path)


def test_prompts_about_images(file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(FakeProcessor())
    monkeypatch.setattr(complete, "start", lambda args, sequences: (llm, PARAMS))
    flags = ["model", "--image", file, "--image", file]
    for more in (["--prompt", "hi"], ["--prompt", "hi", "--prompt", "hi"], ["--prompt", "hi", "--json"]):
        assert complete.run(generate.parse([*flags, *more])) == 0
        assert "None" not in capsys.readouterr().out.replace(": None", "")
    assert len(llm.recording.seen) == 4
    for request in llm.recording.seen:
        assert request.prompt_token_ids == ids_of("[user] ", 2, 2, "hi\n[a] ")
        assert len(request.images) == 2
    assert complete.run(generate.parse(["model", "--image", f"{file}x", "--prompt", "hi"])) == 2
    assert f"{file}x" in capsys.readouterr().err


def test_prompts_about_videos(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, files = FakeLLM(video_source("Qwen3VL").processor()), [str(tmp_path / f"{number}.png") for number in range(2)]
    for number, name in enumerate(files):
        pathlib.Path(name).write_bytes(file_of(8, 4, seed=number))
    monkeypatch.setattr(complete, "start", lambda args, sequences: (llm, PARAMS))
    flags = ["model", "--image", files[0], "--video", *files, "--fps", "4", "--prompt", "hi"]
    assert complete.run(generate.parse(flags)) == 0
    (request,) = llm.recording.seen
    block = ("<|vision_start|>", [8], "<|vision_end|>")
    wanted = ids_of("[user] ", 8, "<0.0 seconds>", *block, "<0.2 seconds>", *block, "hi\n[a] ")
    assert request.prompt_token_ids == wanted
    for rate in ("0", "nan"):
        assert complete.run(generate.parse([*flags[:-4], "--fps", rate, "--prompt", "hi"])) == 2


def test_flags_of_images(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--image", file, "--chat"]) == 2
    assert "--image" in capsys.readouterr().err
    assert generate.parse(["model", "--image", file, "--prompt", "x", "--chat-template", "{{ x }}"]).image == [file]


def test_images_of_a_chat(file: str) -> None:
    llm = FakeLLM(FakeProcessor())
    talk = Conversation(llm, PARAMS, None, stats=False)
    for line in (f"/image {file}", f"/image {file}", "hi", "why?"):
        assert talk.say(line)
    first, second = llm.recording.seen
    assert first.prompt_token_ids == ids_of("[user] ", 2, 2, "hi\n[a] ")
    assert len(first.images) == len(second.images) == 2
    assert second.prompt_token_ids[: len(first.prompt_token_ids) - 4] == first.prompt_token_ids[:-4]
    for line in (f"/image {file}x", "/image"):
        with pytest.raises(RequestError) as refused:
            talk.say(line)
        assert refused.value.place == "/image"
    talk.say(f"/image {file}")
    talk.say("/clear")
    talk.say("hi")
    assert llm.recording.seen[-1].images == ()


def test_a_chat_with_a_model_that_reads_text_only(file: str) -> None:
    with pytest.raises(RequestError, match="text only"):
        Conversation(FakeLLM(None), PARAMS, None, stats=False).say(f"/image {file}")
