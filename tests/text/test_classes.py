"""Tests of transformers' tokenizer classes: against committed results, and live under the marker ``parity``."""

import itertools
import json
import pathlib
import subprocess
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from jaxinfer.text import ChatTemplate, TemplateError, Tokenizer, TokenizerError, load_template
from jaxinfer.text.classes import prefix_scheme, tokenizer_class
from tests.text.build import byte_level, metaspace, write_folder
from tests.text.folders import BEGINS_WITH_SPACE, LIBRARIES, TEXTS, answer, comparable, digest, write_all

CHATS: list[dict[str, Any]] = [
    {"conversation": [{"role": "user", "content": "Hi <b>&'é"}], "add_generation_prompt": True},
    {"conversation": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False, "tools": []},
    {
        "conversation": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
        "add_generation_prompt": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "é"}}}],
    },
]
TEMPLATE = (
    "{{ bos_token }}KIND{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{{ eot_token }}\n"
    "{% endfor %}\n"
    "{{ image_token }}{{ pad_token }}{{ tools | tojson if tools }}{% if add_generation_prompt %}assistant:{% endif %}\n"
)
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "tokenizers.json"


def ask(
    folders: list[pathlib.Path],
    root: pathlib.Path,
    python: pathlib.Path,
    repo: pathlib.Path,
    chats: list[dict[str, Any]] = CHATS,
) -> list[dict]:
    """Return transformers' results for these folders."""
    asked = root / "asked.json"
    content = {"folders": list(map(str, folders)), "texts": TEXTS, "chats": chats}
    asked.write_text(json.dumps(content), encoding="utf-8")
    command = [python, "-m", "tools.oracle.tokenizers", asked]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def test_ids_and_texts_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    golden, folders = json.loads(GOLDEN.read_text()), write_all(tmp_path)
    found = {str(folder.relative_to(tmp_path)): digest(comparable(folder, answer(folder))) for folder in folders}
    assert {name: digest(json.loads(made().to_str())) for name, made in LIBRARIES.items()} == golden["libraries"]
    assert [name for name in found if found[name] != golden["folders"].get(name)] == []
    assert found.keys() == golden["folders"].keys()


@pytest.mark.parity
def test_ids_and_texts_are_those_of_transformers_live(
    tmp_path: pathlib.Path, oracle_python: pathlib.Path, repo: pathlib.Path
) -> None:
    folders = write_all(tmp_path)
    for folder, theirs in zip(folders, ask(folders, tmp_path, oracle_python, repo), strict=True):
        del theirs["chats"]  # no folder has a template
        assert comparable(folder, answer(folder)) == comparable(folder, theirs), folder.relative_to(tmp_path)


@pytest.mark.parity
def test_chats_live(tmp_path: pathlib.Path, oracle_python: pathlib.Path, repo: pathlib.Path) -> None:
    """Templates and variables are found in all locations that transformers reads."""
    plain, tools = (TEMPLATE.replace("KIND", kind) for kind in ("plain", "tools"))
    listed = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tools}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "image_token": "<image>"}
    tables = {"extra_special_tokens": {"eot_token": "<eot>"}}
    folders = [tmp_path / name for name in ("one", "list", "jinja", "both", "class", "map")]
    for folder in folders:
        write_folder(folder, byte_level(), config={"model_type": "llama"}, tokenizer_config=config)
    write_folder(folders[0], tokenizer_config={**config, "chat_template": plain})
    write_folder(folders[1], tokenizer_config={**config, **tables, "chat_template": listed})
    for folder in folders[2:]:
        (folder / "chat_template.jinja").write_text(plain)
    (folders[3] / "additional_chat_templates").mkdir()
    (folders[3] / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    write_folder(folders[4], tokenizer_config={"tokenizer_class": "Qwen2Tokenizer", **tables, "chat_template": listed})
    write_folder(folders[5], special_tokens_map={"bos_token": "</s>", "eot_token": {"content": "<eot>"}})
    for folder, theirs in zip(folders, ask(folders, tmp_path, oracle_python, repo), strict=True):
        template = load_template(folder)
        assert template is not None
        assert [rendered(template, chat) for chat in CHATS] == theirs["chats"], folder.name


CALL = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "é"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<d>", "parameters": {"type": "object"}}}]
USER, SYSTEM, ANSWER = ({"role": role, "content": f" {role} 'é' "} for role in ("user", "system", "assistant"))
TURNS = (
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER, ANSWER, USER, ANSWER],
    [USER, USER],
    [ANSWER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5", "name": "f"}],
    [{"role": "developer", "content": "x"}, USER],
)
OFFERS: tuple[dict[str, Any], ...] = ({}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"tools": []})


@pytest.mark.parity
def test_published_templates_live(
    test_data: pathlib.Path, tmp_path: pathlib.Path, oracle_python: pathlib.Path, repo: pathlib.Path
) -> None:
    """Published templates give the same texts as in transformers, and fail for the same chats."""
    content = json.loads((test_data / "templates" / "chat_template_cases.json").read_text(encoding="utf-8"))
    folders = [tmp_path / str(rank) for rank, _ in enumerate(content["cases"])]
    for folder, case in zip(folders, content["cases"], strict=True):
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": case["template_str"]}
        write_folder(folder, byte_level(), config={"model_type": "llama"}, tokenizer_config=config)
    chats = [
        {"conversation": turns, "add_generation_prompt": True, **offer}
        for turns, offer in itertools.product(TURNS, OFFERS)
    ]
    answers = ask(folders, tmp_path, oracle_python, repo, chats)
    for folder, case, theirs in zip(folders, content["cases"], answers, strict=True):
        template = load_template(folder)
        assert template is not None
        assert [rendered(template, chat) for chat in chats] == theirs["chats"], case["name"]


def rendered(template: ChatTemplate, chat: dict[str, Any]) -> str | None:
    """Return the result in the form of `tools.oracle.tokenizers`."""
    try:
        return template.render(chat["conversation"], chat["add_generation_prompt"], chat.get("tools"))
    except TemplateError:
        return None


@pytest.mark.parity
def test_published_tokenizers_live(
    test_data: pathlib.Path, tmp_path: pathlib.Path, oracle_python: pathlib.Path, repo: pathlib.Path
) -> None:
    folders = [test_data / name for name in ("tokenizers/gpt2", "tokenizers/llama-2", "models/stories260K/hf")]
    keep = [rank for rank, text in enumerate(TEXTS) if not BEGINS_WITH_SPACE.search(text)]
    for folder, theirs in zip(folders, ask(folders, tmp_path, oracle_python, repo), strict=True):
        ours = answer(folder)
        for part in ("encoded", "plain", "decoded", "visible"):
            assert [ours[part][rank] for rank in keep] == [theirs[part][rank] for rank in keep], (folder, part)


@pytest.mark.parametrize(
    ("model_type", "named", "known"),
    [
        ("llama", "GPT2TokenizerFast", True),
        ("llama", "LlamaTokenizerFast", False),  # its file is byte-level
        ("llama", "PreTrainedTokenizerFast", False),
        ("gpt2", None, True),
        ("gpt2", "Unheard", False),
        ("qwen2", "Unheard", True),
        ("mistral", "GPT2Tokenizer", False),
        (None, "GPT2Tokenizer", True),
        ([], "GPT2Tokenizer", True),
    ],
)
def test_which_class_counts(tmp_path: pathlib.Path, model_type: object, named: str | None, known: bool) -> None:
    config = {} if named is None else {"tokenizer_class": named}
    folder = write_folder(tmp_path, byte_level(), config={"model_type": model_type}, tokenizer_config=config)
    assert (tokenizer_class(folder, TokenizerError) is not None) is known


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({}, "first"),
        ({"legacy": True}, "always"),
        ({"legacy": None, "add_prefix_space": None}, "first"),
        ({"legacy": True, "add_prefix_space": False}, "never"),
    ],
)
def test_where_llamas_tokenizer_puts_a_space(tmp_path: pathlib.Path, config: dict, scheme: str) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", **config}
    folder = write_folder(tmp_path, LIBRARIES["prepend"](), tokenizer_config=config)
    kind = tokenizer_class(folder, TokenizerError)
    assert kind is not None
    assert prefix_scheme(folder, kind, TokenizerError) == scheme
    ours = Tokenizer.load(folder)
    he, spaced = ours.token_to_id("he"), [ours.token_to_id("▁"), ours.token_to_id("he")]
    first, second = ([he] if scheme == "never" else spaced), (spaced if scheme == "always" else [he])
    assert ours.encode("he<s>he") == [1, *first, 1, *second]


def test_a_vocabulary_that_no_class_has_is_what_its_file_says(tmp_path: pathlib.Path) -> None:
    library = metaspace()
    plain = Tokenizer.load(write_folder(tmp_path / "plain", library)).encode("a b ab")
    folder = write_folder(tmp_path / "llama", library, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    assert Tokenizer.load(folder).encode("a b ab") == plain


def test_special_tokens_in_a_text_are_split_where_the_configuration_asks(tmp_path: pathlib.Path) -> None:
    for splits in (True, False):
        folder = write_folder(tmp_path, byte_level(), tokenizer_config={"split_special_tokens": splits})
        assert (1 in Tokenizer.load(folder).encode("<s>")) is not splits


def test_digits_are_words_of_coheres_tokenizer(tmp_path: pathlib.Path) -> None:
    alphabet = {character: rank for rank, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(alphabet | {"12": 256}, [("1", "2")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, joined in (("GPT2Tokenizer", True), ("CohereTokenizer", False)):
        folder = write_folder(tmp_path / name, library, tokenizer_config={"tokenizer_class": name})
        assert (256 in Tokenizer.load(folder).encode("12")) is joined


@pytest.mark.parametrize("field", ["add_prefix_space", "legacy", "split_special_tokens", "add_bos_token"])
def test_a_switch_that_is_none_is_refused(tmp_path: pathlib.Path, field: str) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", field: "yes"}
    with pytest.raises(TokenizerError, match=f"{field} in .*tokenizer_config.json must be true or false, not 'yes'"):
        Tokenizer.load(write_folder(tmp_path, LIBRARIES["first"](), tokenizer_config=config))
