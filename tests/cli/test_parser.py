"""Tests of mistyped flags and of flag names of other engines."""

import importlib

import pytest

from jaxinfer.bench import options as bench
from jaxinfer.cli import chat, compile, control, convert, generate, serve
from jaxinfer.cli.app import COMMANDS
from jaxinfer.cli.parser import Parser
from jaxinfer.config import EngineConfig
from jaxinfer.config.aliases import ALIASES, ALWAYS, HINTS, SWITCHES
from jaxinfer.quant.make.recipe import METHODS
from jaxinfer.serve.settings import ServeConfig

PARSERS = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "convert": convert,
    "compile": compile,
    "control": control,
    "bench": bench,
}


def refusal(capsys, parse, *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        parse(words)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (
            "generate",
            ["--temprature", "0.3"],
            "--temprature is not a flag of jaxinfer generate: did you mean --temperat",
        ),
        ("generate", ["--max-token", "3"], "did you mean --max-tokens?"),
        ("serve", ["demo", "--api-key", "abc"], "--api-key is not a flag of jaxinfer serve: hashed keys stand in the"),
        ("serve", ["demo", "--trust-remote-code=x"], "no code of a checkpoint is ever run"),
        ("serve", ["demo", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        ("serve", ["demo", "--max-model-len", "x"], "--max-model-len: invalid int value: 'x'"),
        ("serve", ["demo", "--gpu-memory-utilization", "x"], "--memory-utilization: invalid float value"),
        ("serve", ["demo", "draft"], "draft is one word too many"),
        ("serve", [], "model is not set: name one"),
        ("compile", [], "no model is named: jaxinfer compile MODEL"),
        ("generate", ["--dtype", "int3"], "'int3' must be one of auto, float32, bfloat16, float16"),
        ("generate", ["--chat", "--json"], "--chat and --json exclude each other"),
        ("generate", ["--chat", "--prompt", "x"], "--chat and --prompt exclude each other"),
        ("generate", ["--prompt", "x", "--prompt-file", "y"], "--prompt and --prompt-file exclude each other"),
        ("generate", ["-p", "x", "--prompts", "y"], "--prompt and --prompts exclude each other"),
        ("generate", ["-t", "2"], "-t is not a flag of jaxinfer generate: "),
        ("serve", ["demo", "-d", "2"], "-d is not a flag of jaxinfer serve ("),
        ("serve", ["demo", "--num-gpus", "2"], "--num-gpus is not a flag of jaxinfer serve ("),
        ("serve", ["demo", "--batch-size", "2"], "max_num_seqs"),
        ("serve", ["demo", "--max-len", "2"], "did you mean --max-model-len?"),
        ("serve", ["demo", "--max-model-len", "1.3"], "'1.3' is no whole number"),
        ("serve", ["demo", "--max-model-len", "2Q"], "invalid int value: '2Q'"),
        (
            "bench",
            ["--targte=http://localhost:8000"],
            "--targte is not a flag of jaxinfer bench: did you mean --target?",
        ),
        ("control", ["reload"], "invalid choice: 'reload'"),
        ("control", ["abort"], "abort needs the id of a request"),
        ("control", ["stats", "x"], "x is one word too many"),
        ("generate", ["--system", "x"], "needs --chat"),
        ("chat", ["--json"], "--json is not a flag of jaxinfer chat"),
        ("compile", ["demo", "--target", "h100"], "--target h100 needs --num-pages"),
    ],
)
def test_an_error_is_one_line_with_the_way_out(capsys, command, words, said):
    assert said in refusal(capsys, PARSERS[command].parse, *words)


SAMPLES = {int: "3", float: "0.5", str: "x"}


ACTIONS = {
    action.dest: (parser, action)
    for parser in (generate.make_parser(), serve.make_parser())
    for action in parser._actions
    if action.dest in ALIASES
}


@pytest.mark.parametrize(("ours", "theirs"), [(ours, theirs) for ours in ACTIONS for theirs in ALIASES[ours]])
def test_the_fields_names_work(ours, theirs):
    """Flag names of other engines are aliases of jaxinfer's flags."""
    parser, action = ACTIONS[ours]
    value = SAMPLES.get(action.type, "3")
    wanted = [value] if ours == "prompt" or action.nargs == "+" else (action.type or str)(value)
    for spelt in (f"--{theirs.replace('_', '-')}", f"--{theirs}", f"--{ours}"):
        assert getattr(parser.parse_args([spelt, value]), ours) == wanted
    if len(theirs) <= 2:
        assert getattr(parser.parse_args([f"-{theirs}", value]), ours) == wanted


def test_no_name_of_others_is_one_of_ours():
    ours = {*EngineConfig.__dataclass_fields__, *ServeConfig.__dataclass_fields__}
    others = {*HINTS, *ALWAYS, *SWITCHES, *(name for names in ALIASES.values() for name in names)}
    assert not ours & others


@pytest.mark.parametrize("name", ["bf16", "fp16", "half", "fp32", "float"])
def test_short_names_of_dtypes(name):
    assert generate.parse(["--dtype", name]).dtype in ("bfloat16", "float16", "float32")


def test_a_model_needs_no_flag():
    assert serve.parse(["a/b", "--port", "1"]).configuration.model == "a/b"
    assert serve.parse(["--port", "1", "a/b"]).configuration.model == "a/b"
    assert serve.parse(["--model", "a/b"]).configuration.model == "a/b"
    assert generate.parse([]).model == "demo"
    assert generate.parse(["a/b", "--prompt", "x"]).model == "a/b"
    assert compile.parse(["a/b"]).model == "a/b"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], None),
        (["--no-speculation"], {"enabled": False}),
        (["--speculation", "--speculation-max-tokens", "2"], {"enabled": True, "max_tokens": 2}),
        (["--speculation-acceptance", "typical"], {"acceptance": "typical"}),
    ],
)
def test_what_is_said_of_speculation_is_one_parameter(words, asked):
    for command in (generate, chat):
        assert command.parse(words).sampling.get("speculation") == asked


def test_what_an_output_must_be_is_one_parameter(tmp_path, capsys):
    (tmp_path / "schema.json").write_text("{}")
    for words, asked in (
        ([], None),
        (["--json-schema", '{"type": "null"}'], {"json": '{"type": "null"}'}),
        (["--json-schema", f"@{tmp_path / 'schema.json'}"], {"json": "{}"}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "a"], {"regex": "a"}),
        (["--choice", "a", "--choice", "b"], {"choice": ["a", "b"]}),
        (["--grammar", "start: /a/"], {"grammar": "start: /a/"}),
        (["--structural-tag", "{}"], {"structural_tag": "{}"}),
    ):
        assert generate.parse(words).sampling.get("structured_outputs") == asked
    for words, said in (
        (["--regex", "a", "--json-object"], "not allowed"),
        (["--grammar", "@/no/such"], "cannot be read"),
    ):
        with pytest.raises(SystemExit):
            generate.parse(words)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate", "compile"])
def test_all_flags_are_explained_in_groups(command):
    page = PARSERS[command].make_parser().format_help()
    for title in ("Scheduling and batching:", "Parallelism:", "Speculative decoding:"):
        assert title in page
    plain = " ".join(page.split())
    assert "[also --gpu-memory-utilization, --mem-fraction-static, --kv-cache-free-gpu-memory-fraction]" in plain
    assert "--[no-]enable-prefix-caching" in plain
    assert "_MISSING_TYPE" not in plain


def test_methods_of_quantisation_are_all_there():
    assert tuple(METHODS) == convert.METHODS


def test_the_page_has_every_name_of_others(repo):
    rows = [f"| `{ours}` | {', '.join(f'`{name}`' for name in names)} |" for ours, names in ALIASES.items()]
    assert "\n".join(["|---|---|", *rows, ""]) in (repo / "docs/cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[("7", 7), ("-1", -1), ("32K", 32 << 10), ("32k", 32_000), ("1.5K", 1536), ("4GiB", 4 << 30), ("4G", 4 << 30)],
        *[
            ("4GB", 4 * 10**9),
            ("256MiB", 256 << 20),
            ("1T", 1 << 40),
            ("2MB", 2_000_000),
            ("12B", 12),
            ("25.6k", 25_600),
        ],
    ],
)
def test_sizes_have_units(text: str, number: int):
    parsed = serve.make_parser().parse_args(["--kv-cache-bytes", text, "--prefill-sizes", text, "--max-num-seqs", text])
    assert (parsed.kv_cache_bytes, parsed.prefill_sizes, parsed.max_num_seqs) == (number, [number], number)


@pytest.mark.parametrize(("text", "gib"), [("4", 4.0), ("0.5", 0.5), ("1e1", 10.0), ("512MiB", 0.5), ("2GiB", 2.0)])
def test_gibibytes_may_have_another_unit(text: str, gib: float):
    assert serve.make_parser().parse_args(["--swap-space", text]).swap_space_gib == gib


def test_one_letter_may_be_followed_by_its_value():
    assert generate.parse(["-n3"]).n == 3


@pytest.mark.parametrize(
    ("default", "text"),
    [
        (600.0, " (default: 600)"),
        (0, " (default: 0)"),
        ("demo", " (default: demo)"),
        *((each, "") for each in (None, False, "", [])),
    ],
)
def test_the_help_shows_a_default_once(default: object, text: str):
    parser = Parser("jaxinfer test", "Test.")
    parser.add_argument("--seconds", default=default, help="limit")
    parser.add_argument("--told", default=default, help="limit (default: the model's)")
    lines = parser.format_help().splitlines()
    assert f"limit{text}" in [line.partition("VALUE")[2].strip() for line in lines if "--seconds" in line]
    assert [line for line in lines if line.endswith("limit (default: the model's)")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_help_text_and_no_empty_default(name: str, monkeypatch: pytest.MonkeyPatch):
    def stop(parser: Parser, *_: object) -> None:
        pages.append((parser.format_help(), [action.option_strings for action in parser._actions if not action.help]))
        parser.exit()

    pages: list[tuple[str, list[object]]] = []
    monkeypatch.setattr(Parser, "parse_args", stop)
    with pytest.raises(SystemExit):
        importlib.import_module(COMMANDS[name].flags).parse([])
    ((text, without),) = pages
    assert without == []
    assert "default: )" not in text
