"""Draft heads give the states and logits of their authors' programs, from folders as published."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.draft_heads import describe_head, load_head
from jaxinfer.layers.attention import causal_attend
from jaxinfer.loading import load_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.head import shared
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling.beams import expand
from jaxinfer.weights import CheckpointError
from tests.fakes import random_head, random_model
from tests.models.parity import tokenizer_json
from tests.models.test_head_goldens import CASES, golden
from tools.oracle.heads_golden import HeadGolden, write_head_checkpoint


def target_of(case: HeadGolden, folder: pathlib.Path) -> Model:
    """Return the target model of a head: its embeddings and LM head; layers are random."""
    if case.method == "mtp":
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(128)))
        return load_model(str(folder), "float32", show_progress=False)
    config = {**case.config, **case.config.get("transformer_layer_config", {})}
    hidden = config.get("target_hidden_size") or config.get("hidden_size") or case.features.shape[1]
    model = random_model(vocab_size=128, hidden_size=hidden, num_hidden_layers=8)
    theirs = case.target_tensors()
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    tables = {own: {"table": jnp.asarray(theirs[name])} for own, name in names.items() if name in theirs}
    return model.replace(params={**model.params, **tables})


def answers(head: Model, target: Model, case: HeadGolden) -> dict[str, np.ndarray]:
    module: Any = head.module
    params = {**head.params, **shared(target.params, head.config)}

    def apply(*operands: Any, method: str | None = None) -> Any:
        return module.apply({"params": params}, *operands, method=method)

    features, tokens = jnp.asarray(case.features, jnp.float32), jnp.asarray(case.tokens)
    if not module.recurrent:
        return {"logits": np.moveaxis(np.asarray(apply(features, method="guesses")), -2, 0)}
    offsets = case.tensors().get("d2t")
    said = slice(None) if offsets is None else np.arange(len(offsets)) + offsets
    entering, count = apply(features, method="first"), len(tokens)
    states, found = [], apply(tokens, entering, jnp.arange(count), causal_attend, None)[0]
    for token in case.chain_tokens:
        entering = jnp.concatenate([entering, (states[-1] if states else found[-1])[None]])
        tokens = jnp.append(tokens, token)
        states.append(apply(tokens, entering, jnp.arange(len(tokens)), causal_attend, None)[0][-1])
    chain = jnp.stack(states)
    first, later = (np.asarray(apply(x, method="head"))[:, said] for x in (found, chain))
    return {"hidden": np.asarray(found), "logits": first, "chain_hidden": np.asarray(chain), "chain_logits": later}


@pytest.mark.parametrize("name", CASES)
def test_a_head_gives_what_its_authors_program_gives(name: str, tmp_path: pathlib.Path) -> None:
    case = golden(name)
    folder = write_head_checkpoint(tmp_path / "head", case)
    target = target_of(case, folder)
    head = load_head(str(folder), case.method, target, make_mesh())
    assert case.faults(**answers(head, target, case)) == []


def written(tmp_path: pathlib.Path, name: str = "eagle3-original", **tensors: Any) -> tuple[str, Model]:
    """Write a head's folder with replaced tensors; return it and the target model."""
    case = golden(name)
    folder = write_head_checkpoint(tmp_path / "head", case)
    save_file({**case.tensors(), **tensors}, folder / "model.safetensors")
    return str(folder), target_of(case, folder)


def test_a_reduced_vocabulary_names_each_token_once(tmp_path: pathlib.Path) -> None:
    folder, target = written(tmp_path, d2t=np.full(48, 90, np.int64))
    with pytest.raises(CheckpointError, match=r"tensor 'd2t' of .* names tokens twice, or beyond 128"):
        load_head(folder, "eagle3", target, make_mesh())


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("eagle3", {"hidden_size": 64}, r"eagle3: config.json: target_hidden_size = None must be 64, the model's"),
        ("mtp", {}, "mtp: only models of DeepSeek-V3's family"),
        ("medusa", {}, "medusa: no tensor is named 0.0.linear.weight"),
    ],
)
def test_what_does_not_fit_is_refused(
    method: str, changes: dict[str, Any], reason: str, tmp_path: pathlib.Path
) -> None:
    folder, target = written(tmp_path)
    target = random_model(vocab_size=128, num_hidden_layers=8, **changes) if changes else target
    with pytest.raises(ConfigError, match=reason):
        describe_head(folder, method, target)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ("mc_sim_7b_63", "must be a list of lists of ranks"),
        ([[0], []], "must be a list of lists of ranks"),
        ([[0], [-1]], "must have ranks from 0 to 63"),
        ([[0], [64]], "must have ranks from 0 to 63"),
        ([[0], [True]], "must have ranks from 0 to 63"),
        ([[0], [0]], "names a path twice"),
        ([[0], [1, 0]], "lacks the beginning of a path"),
        ([[0] * depth for depth in range(1, 6)], "has paths of more than 4 heads"),
    ],
)
def test_a_static_tree_that_is_none_is_refused(choices: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"medusa_choices = .* {reason}"):
        random_head("medusa", random_model(), medusa_choices=choices)


def test_pickles_are_refused_with_what_converts_them(tmp_path: pathlib.Path) -> None:
    folder, target = written(tmp_path)
    (tmp_path / "head/model.safetensors").unlink()
    (tmp_path / "head/pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(CheckpointError, match=r"holds pytorch_model.bin, a pickle, .* tools.oracle.unpickle "):
        describe_head(folder, "eagle3", target)


TREES = [name for name in CASES if golden(name).tree]


@pytest.mark.parametrize("name", TREES)
def test_paths_are_those_of_eagles_dynamic_tree(name: str, tmp_path: pathlib.Path) -> None:
    """The nodes that EAGLE-2's search keeps at a depth are the likeliest there: paths of its expanded beam."""
    case = golden(name)
    target = target_of(case, write_head_checkpoint(tmp_path / "head", case))
    head = load_head(str(tmp_path / "head"), case.method, target, make_mesh())
    assert case.tree is not None
    width, parents = case.tree["top_k"], case.tree_answers["tree_mask"].astype(bool)
    tokens, depths = case.tree_answers["draft_tokens"], case.tree_answers["tree_position_ids"]
    kept: dict[int, set[tuple[int, ...]]] = {}
    for node, mask in enumerate(parents):
        path = sorted(np.flatnonzero(mask), key=lambda at: depths[at])
        kept.setdefault(int(depths[node]), set()).add(tuple(int(tokens[at]) for at in path[1:]))
    beams = beams_of(head, target, case, width, max(kept))
    for depth, nodes in kept.items():
        if depth:
            assert len(beams[depth] & nodes) >= min(width, len(nodes)), depth


def beams_of(head: Model, target: Model, case: HeadGolden, width: int, depth: int) -> dict[int, set[tuple[int, ...]]]:
    """Return the ``width`` likeliest paths of each depth, each computed without a cache."""
    module: Any = head.module
    params = {**head.params, **shared(target.params, head.config)}

    def apply(*operands: Any, method: str | None = None) -> Any:
        return module.apply({"params": params}, *operands, method=method)

    known, features = jnp.asarray(case.tokens), apply(jnp.asarray(case.features, jnp.float32), method="first")
    paths: list[tuple[list[int], list[Any]]] = [([], [])]
    scores, found = jnp.zeros((1, 1)), {}
    for level in range(1, depth + 1):
        states = []
        for path, fed in paths:
            following = jnp.concatenate([known, jnp.array(path, jnp.int32)])
            entering = jnp.concatenate([features, *(state[None] for state in fed)])
            states.append(apply(following, entering, jnp.arange(len(following)), causal_attend, None)[0][-1])
        logits = apply(jnp.stack(states), method="head")[None]
        above, tokens, scores = expand(logits, scores, width)
        pairs = zip(above[0].tolist(), tokens[0].tolist(), strict=True)
        paths = [([*paths[parent][0], token], [*paths[parent][1], states[parent]]) for parent, token in pairs]
        found[level] = {tuple(path) for path, _ in paths}
    return found
