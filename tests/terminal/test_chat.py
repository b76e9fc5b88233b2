"""Tests of `jaxinfer chat` at a terminal, with a model."""

import io

import pytest

from jaxinfer import load_model
from jaxinfer.cli.app import main
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.lora.goldens import GOLDENS, golden, read, write_model
from tests.terminal.pseudo import CTRL_C, CTRL_D, terminal

CHAT = ["chat", "demo", "--max-model-len", "1024", "--temperature", "0"]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> str:
    """Return the output of a conversation: one answer is stopped, another completes, and the keyboard ends it."""
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


def test_a_template_that_is_given_renders_the_conversation(capsys, tmp_path, monkeypatch):
    (tmp_path / "refusing.jinja").write_text("{{ raise_exception('refused by ' ~ bos_token) }}")
    for given, said in (
        (str(tmp_path / "refusing.jinja"), "refused by <|bos|>"),
        (str(tmp_path / "absent.jinja"), "error: chat_template: cannot read"),
        ("{% if %}", "error: chat_template: the chat template default is not valid"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("Speak!\n"))
        assert main([*CHAT, "--max-tokens", "4", "--chat-template", given]) == 2
        assert said in capsys.readouterr().err
    assert main(["generate", "demo", "--prompt", "x", "--chat-template", "{{ messages }}"]) == 2


def test_a_template_of_a_models_own_is_not_used_where_another_is_given(capsys):
    text, model = "{{ bos_token }}{{ messages[0].content }}", load_model("demo-draft", show_progress=False)
    params, settings = SamplingParams(temperature=0.0, max_tokens=2), {"max_num_seqs": 1, "max_model_len": 64}
    for given in ("demo-draft", model):
        with LLM(given, chat_template=text, show_progress=False, **settings) as llm:
            (output,) = llm.chat([{"role": "user", "content": "Thou art"}], params)
            assert output.prompt_token_ids == [llm.tokenizer.bos_id, *llm.tokenizer.encode("Thou art", False)]


def test_an_adapter_answers(tmp_path, capsys, monkeypatch):
    model = str(write_model(golden("llama-dora"), tmp_path / "base"))
    flags = ["generate", model, "--chat", "--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    flags += ["--max-model-len", "64", "--max-lora-rank", "8", "--prefill-sizes", "8", "16", "--page-size", "4"]
    said = []
    for adapter in ([], ["--lora", f"pirate={GOLDENS / 'llama-dora'}"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6 w7\n"))
        assert main([*flags, *adapter]) == 0
        said.append(capsys.readouterr().out.strip())
    merged = load_model(model, show_progress=False).with_lora(read(GOLDENS / "llama-dora", load_model(model)))
    llm = LLM(merged, max_num_seqs=1, max_model_len=64, prefill_sizes=(8, 16), page_size=4, show_progress=False)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    assert said[1] == llm.chat([{"role": "user", "content": "w5 w6 w7"}], params)[0].outputs[0].text.strip()
    assert said[0] != said[1]


def test_a_conversation_has_one_adapter(tmp_path, capsys, monkeypatch):
    model = str(write_model(golden("llama-dora"), tmp_path / "base"))
    monkeypatch.setattr("sys.stdin", io.StringIO("w5\n"))
    two = ["--lora", "a=/x", "--lora", "b=/y"]
    assert main(["generate", model, "--chat", "--max-model-len", "64", *two]) == 2
    assert "lora: 2 given for one conversation" in capsys.readouterr().err
