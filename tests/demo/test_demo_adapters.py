"""The adapters shipped for the demo model: their format, and that they learnt their authors."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.config.aliases import DEMO_ADAPTERS, demo_adapter
from jaxinfer.generate import main
from jaxinfer.loading import load_model
from jaxinfer.lora.merge import declared
from jaxinfer.lora.peft.read import read_adapter
from jaxinfer.models.model import Model
from tools.train_demo.styles import STYLES

# From the last twentieth of each book, on which no adapter was trained.
HELD_OUT = {
    "austen": "With the Gardiners, they were always on the most intimate terms. Darcy, as well as Elizabeth, really"
    " loved them; and they were both ever sensible of the warmest gratitude towards the persons who, by bringing her"
    " into Derbyshire, had been the means of uniting them.",
    "melville": "Buoyed up by that coffin, for almost one whole day and night, I floated on a soft and dirgelike main."
    " The unharming sharks, they glided by as if with padlocks on their mouths; the savage sea-hawks sailed with"
    " sheathed beaks.",
}
GAIN = 0.5  # nats per token


def folder(name: str) -> pathlib.Path:
    found = demo_adapter("demo", name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("demo", "float32", show_progress=False)


def loss(model: Model, text: str) -> float:
    tokens = jnp.asarray([model.tokenizer.encode(text)])
    logprobs = jax.nn.log_softmax(model(tokens[:, :-1]))[0]
    return -float(np.asarray(logprobs)[np.arange(tokens.shape[1] - 1), tokens[0, 1:]].mean())


def test_both_are_within_the_package_and_its_size_limit():
    assert DEMO_ADAPTERS.keys() == STYLES.keys() == HELD_OUT.keys()
    root = pathlib.Path(jaxinfer.__file__).parent
    assert all(folder(name).is_relative_to(root) for name in DEMO_ADAPTERS)
    files = [file for name in DEMO_ADAPTERS for file in folder(name).iterdir()]
    assert {file.name for file in files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(file.stat().st_size for file in files) <= 1_000_000


def test_other_names_and_other_models_have_none():
    assert demo_adapter("demo", "../target") is None
    assert demo_adapter("demo-draft", "austen") is None


def test_each_learnt_its_author_and_not_the_other(model: Model):
    adapted = {name: model.with_lora(read_adapter(folder(name), declared(model), max_rank=8)) for name in DEMO_ADAPTERS}
    for name, text in HELD_OUT.items():
        (other,) = DEMO_ADAPTERS.keys() - {name}
        own = loss(adapted[name], text)
        assert own < loss(model, text) - GAIN, name
        assert own < loss(adapted[other], text), name


def test_the_command_line_knows_them_by_name(capsys: pytest.CaptureFixture[str]):
    prompts = ["--prompt", "The sea", "--prompt", "The sea"]
    flags = ["--model", "demo", *prompts, "--lora", "austen", "--lora", "melville"]
    engine = ["--max-model-len", "128", "--max-num-seqs", "2", "--max-tokens", "24", "--temperature", "0", "--json"]
    assert main([*flags, *engine]) == 0
    texts = [json.loads(line)["outputs"][0]["text"] for line in capsys.readouterr().out.splitlines()]
    assert len(set(texts)) == 2
    assert all(":\n" not in text for text in texts)  # prose: no speaker names as in a play
