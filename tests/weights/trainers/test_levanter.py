"""Levanter's names: trees as its modules have them, made here from the tensors that its `state_dict` keeps."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.models.model import Model
from jaxinfer.weights import WeightsError, named_parameters, params_from
from tests.weights.trainers.models import assert_equal, random_model
from tools.oracle.trainers import TUNIX


@dataclasses.dataclass
class NamedArray:
    """Stands in for `haliax.NamedArray`, whose ``shape`` is a dict."""

    array: Any

    @property
    def shape(self) -> dict[str, int]:
        return {f"axis {index}": size for index, size in enumerate(self.array.shape)}


def modules(model: Model, scanned: bool) -> Any:
    """Return the parameters as a pytree of modules, like those of `equinox`."""
    heads, kv_heads, dim = model.config.heads, model.config.kv_heads, model.config.head_dim
    tensors = dict(named_parameters(model))
    forms = {"q": (kv_heads, heads // kv_heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim)}
    layers: list[dict[str, Any]] = [{} for _ in model.config.layers]
    tree: dict[str, Any] = {
        "embeddings": {"token_embeddings": {"weight": NamedArray(tensors.pop("model.embed_tokens.weight"))}},
        "transformer": {"norm": {"weight": NamedArray(tensors.pop("model.norm.weight"))}},
        "lm_head": {"weight": NamedArray(tensors.pop("lm_head.weight"))} if "lm_head.weight" in tensors else None,
    }
    for name, value in tensors.items():
        _, _, layer, part, *module, kind = name.split(".")
        if part == "self_attn" and module[0].endswith("_proj"):
            which = module[0][0]
            value = value.reshape(-1, heads, dim) if which == "o" else value.reshape(*forms[which], *value.shape[1:])
        node = layers[int(layer)].setdefault(part, {})
        for key in module:
            node = node.setdefault(key, {})
        node[kind] = value
    if scanned:
        stacked = jax.tree.map(lambda *each: NamedArray(np.stack(each)), *layers)
        tree["transformer"]["layers"] = {"stacked": stacked}
    else:
        tree["transformer"]["layers"] = {"blocks": [jax.tree.map(NamedArray, layer) for layer in layers]}
    return tree


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("case", TUNIX)
def test_modules_are_read(case: str, scanned: bool):
    model = random_model(TUNIX[case])
    assert_equal(params_from(model, modules(model, scanned)), model.params)


def test_the_list_of_layers_is_found_by_pairs():
    model = random_model(TUNIX["llama"])
    blocks = modules(model, scanned=False)["transformer"]["layers"]["blocks"]
    name = "transformer.layers.blocks.0.input_layernorm.weight"
    pairs = [(name, blocks[0]["input_layernorm"]["weight"].array)]
    made = params_from(model, iter(pairs), partial=True)
    assert_equal(made["layers_0"]["attention_norm"], model.params["layers_0"]["attention_norm"])


def test_a_wrong_shape_is_that_of_levanter():
    model = random_model(TUNIX["qwen3"])
    tree = modules(model, scanned=True)
    weight = tree["transformer"]["layers"]["stacked"]["self_attn"]["q_proj"]["weight"]
    weight.array = weight.array.reshape(2, 4, 4, 8)
    with pytest.raises(WeightsError) as error:
        params_from(model, tree)
    found = error.value.name, error.value.expected, error.value.given
    assert found == ("transformer.layers.stacked.self_attn.q_proj.weight", (2, 2, 2, 4, 8), (2, 4, 4, 8))
