"""Tests of damaged tokenizer folders: each loads and works, or is rejected with an error that names a file."""

import json
import pathlib
import random
import shutil
from typing import Any

import pytest

from jaxinfer.text import TemplateError, Tokenizer, TokenizerError, load_template
from jaxinfer.text.tokenizer import MAX_IDS
from tests.text.build import MAKERS, write_folder
from tests.text.folders import LIBRARIES, TEXTS
from tests.weights.test_hostile_folders import mutated_bytes, mutated_json

FAST, SLOW = 300, 5_000
CLASSES = (None, "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizer", "GemmaTokenizer", "Other")
FILES: dict[str, Any] = {
    "tokenizer_config": {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "image_token": "<image>",
        "additional_special_tokens": ["<a>", {"content": "<b>", "rstrip": True}],
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "400": {"content": "<new>"}},
        "add_prefix_space": False,
        "legacy": None,
        "split_special_tokens": False,
        "chat_template": [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}],
    },
    "special_tokens_map": {"eos_token": {"content": "</s>"}, "extra_special_tokens": {"eot_token": "<eot>"}},
    "added_tokens": {"<new>": 400, "<s>": 1},
    "generation_config": {"eos_token_id": [2, 3], "bos_token_id": 1, "pad_token_id": 0},
    "config": {"model_type": "llama", "eos_token_id": 2},
}
LIBRARY = {**MAKERS, **LIBRARIES}


def folder(root: pathlib.Path, rng: random.Random) -> pathlib.Path:
    """Write a valid folder with random contents."""
    shutil.rmtree(root, ignore_errors=True)
    files = {name: dict(content) for name, content in FILES.items() if rng.random() < 0.7}
    if "tokenizer_config" in files:
        files["tokenizer_config"] |= {"tokenizer_class": rng.choice(CLASSES)}
        if rng.random() < 0.5:
            del files["tokenizer_config"]["added_tokens_decoder"]
    return write_folder(root, LIBRARY[rng.choice(sorted(LIBRARY))](), **files)


def use(root: pathlib.Path) -> None:
    """Use the tokenizer and the template of a folder; raise an error if it cannot be loaded."""
    tokenizer = Tokenizer.load(root)
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text)
        except TokenizerError:  # some vocabularies cannot encode this text
            continue
        tokenizer.decode(ids)
        tokenizer.decode(ids, skip_special_tokens=False)
    template = load_template(root)
    if template is not None:
        try:
            template.render([{"role": "user", "content": "Hi"}], tools=[{}])
        except TemplateError:  # a valid template that fails
            return


def is_used(root: pathlib.Path) -> bool:
    try:
        use(root)
    except (TokenizerError, TemplateError) as error:
        said = str(error)
        assert str(root) in said or "the chat template" in said, said
        assert len(said) < 1000, said
        assert said.isprintable(), said
        return False
    return True


@pytest.mark.parametrize("count", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_mutated_folders_load_or_are_refused(tmp_path: pathlib.Path, count: int, seed: int) -> None:
    used = 0
    for number in range(seed, seed + count):
        rng = random.Random(number)
        root = folder(tmp_path / "model", rng)
        file = rng.choice(sorted(root.iterdir()))
        raw = file.read_bytes()
        changed = mutated_json(raw.decode(), rng).encode() if rng.random() < 0.9 else mutated_bytes(raw, rng)
        file.write_bytes(changed)
        try:
            used += is_used(root)
        except BaseException as error:  # panics of the tokenizers library are no Exceptions
            error.add_note(f"--seed {number}, {file.name}: {changed[-4000:]!r}")
            raise
    assert 0 < used < count


WRONG = (
    *(("tokenizer_config", "bos_token", value) for value in (1, True, ["<s>"], {"content": 3}, {})),
    *(("tokenizer_config", "additional_special_tokens", value) for value in ("<a>", 3, [1], [None], {"a": "<a>"})),
    *(("tokenizer_config", "extra_special_tokens", value) for value in ("<a>", 3, [[]], {"a_token": 1})),
    *(
        ("tokenizer_config", "added_tokens_decoder", value)
        for value in ([], "x", {"x": {"content": "y"}}, {"1": "<s>"})
    ),
    ("tokenizer_config", "added_tokens_decoder", {"1": {"content": "y", "lstrip": "no"}}),
    ("tokenizer_config", "added_tokens_decoder", {"99999999999": {"content": "y"}}),
    *(("tokenizer_config", "tokenizer_class", value) for value in (1, ["GPT2Tokenizer"], {})),
    *(("tokenizer_config", "split_special_tokens", value) for value in ("no", 1)),
    *(("tokenizer_config", "add_prefix_space", value) for value in ("no", 0, [])),
    *(("special_tokens_map", "eos_token", value) for value in (2, ["</s>"], {"content": None})),
    *(("special_tokens_map", "additional_special_tokens", value) for value in ({"a": "b"}, [{"text": "x"}])),
    *(("added_tokens", "<new>", value) for value in ("400", -1, None, 1.5, True)),
    *(("generation_config", "eos_token_id", value) for value in ("</s>", [2, "x"], 2.5, True, {})),
    *(("config", "bos_token_id", value) for value in ("<s>", [[1]])),
)


@pytest.mark.parametrize(("file", "field", "value"), WRONG)
def test_a_field_that_is_wrong_is_named_with_its_file(
    tmp_path: pathlib.Path, file: str, field: str, value: Any
) -> None:
    files = {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}}
    files[file] = {**files.get(file, {}), field: value}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(write_folder(tmp_path, LIBRARIES["bytes"](), **files))
    assert f"{file}.json" in str(caught.value)
    assert field in str(caught.value)


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    return json.loads(LIBRARIES["bos"]().to_str()) | changes


def test_a_post_processor_without_its_token_is_refused(tmp_path: pathlib.Path) -> None:
    content = tokenizer_json()
    content["post_processor"]["special_tokens"] = {}
    with pytest.raises(TokenizerError, match=r"tokenizer.json has a post_processor without the special token '<s>'"):
        Tokenizer.load(write_folder(tmp_path, tokenizer=content))


def test_ids_with_gaps_are_all_known(tmp_path: pathlib.Path) -> None:
    content = tokenizer_json(post_processor=None)
    content["model"]["vocab"]["a"] = 5000
    ours = Tokenizer.load(write_folder(tmp_path, tokenizer=content))
    assert ours.vocab_size == 5001
    assert ours.decode(ours.encode("banana")) == "banana"
    content["model"]["vocab"]["a"] = MAX_IDS
    with pytest.raises(TokenizerError, match=rf"tokenizer.json: the vocabulary has 'a' as token {MAX_IDS}"):
        Tokenizer.load(write_folder(tmp_path, tokenizer=content))
