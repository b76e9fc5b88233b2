"""`jaxinfer chat` at a terminal, with a model."""

import io

import pytest

from jaxinfer.cli.app import main
from tests.terminal.pseudo import CTRL_C, CTRL_D, terminal

CHAT = ["chat", "demo", "--max-model-len", "1024", "--temperature", "0"]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> str:
    """All that one conversation shows: an answer is stopped, another one is not, and the keyboard ends it."""
    with terminal("-m", "jaxinfer", *CHAT, "--max-tokens", "900", "--ignore-eos", "--stats") as at:
        here = at.until("> ")
        at.type("Who art thou?\n")
        here = at.until("\n", at.until("Who art thou?", here) + 2)
        at.type(CTRL_C)
        here = at.until("> ", at.until("stopped", here))
        at.type("/system Be brief.\n")
        here = at.until("> ", at.until("Be brief.", here))
        at.type("/nonsense\n")
        here = at.until("> ", at.until("/nonsense is not a command", here))
        at.type("Speak!\n")
        at.until("> ", at.until("seed", here))
        at.type(CTRL_D)
        assert at.wait() == 0
        return at.text


def test_the_first_ctrl_c_stops_the_answer_alone(told):
    assert told.count("stopped") == 1
    assert told.count("tokens/s, seed") == 1
    assert "Traceback" not in told


def test_ctrl_c_at_the_prompt_ends_with_130():
    with terminal("-m", "jaxinfer", *CHAT) as at:
        at.until("> ")
        assert at.type_until_it_ends(CTRL_C) == 130
        assert "Traceback" not in at.text


def test_without_a_prompt_a_terminal_is_a_chat():
    with terminal("-m", "jaxinfer", "generate", *CHAT[1:]) as at:
        at.until("> ", at.until("Type a message; /help lists commands"))
        at.type("/exit\n")
        assert at.wait() == 0


def test_a_pipe_is_a_line_a_message(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/system Be brief.\n\nSpeak!\n"))
    assert main([*CHAT, "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "/clear" in err
    assert "> " not in out


def test_a_line_of_a_pipe_that_cannot_be_answered_ends_it(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'word ' * 3000}\nSpeak!\n"))
    assert main([*CHAT, "--max-tokens", "4"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")


def test_a_model_without_a_template_is_one_sentence_before_it_is_loaded(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 2
    assert "has no chat template: jaxinfer generate continues texts" in capsys.readouterr().err
