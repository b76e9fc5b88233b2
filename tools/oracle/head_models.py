"""The original draft heads with a common interface: the names and shapes of their checkpoints, and their outputs."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import types
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import transformers

from tools.oracle.cases.heads import MEDUSA_HIDDEN, VOCABULARY, HeadCase
from tools.oracle.run import AllDouble, NoFloat32

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


class Head(Protocol):
    """A tiny head, empty until it is loaded.

    Attributes:
        width: width of the features that it reads.
    """

    width: int

    def shapes(self) -> Shapes:
        """Return its float32 tensors under its format's names, and borrowed tensors under its own names."""

    def load(self, tensors: Tensors) -> None:
        """Load all tensors of ``shapes``, and those that are not weights."""

    def answer(self, features: torch.Tensor, tokens: torch.Tensor, chain_tokens: torch.Tensor) -> Tensors:
        """Compute ``answers`` of `HeadGolden` for features [T, F], tokens [T], chain tokens [4]."""

    def tree(self, features: torch.Tensor, tokens: torch.Tensor) -> Tensors:
        """Compute ``tree_answers`` of `HeadGolden`."""


@contextlib.contextmanager
def building(dtype: torch.dtype) -> Iterator[None]:
    """Build modules in ``dtype``; with float64, explicit requests for float32 yield float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with AllDouble() if dtype == torch.float64 else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def running(dtype: torch.dtype) -> Iterator[None]:
    """Run without gradients; in float64, a float32 result raises."""
    with building(dtype), torch.no_grad(), NoFloat32() if dtype == torch.float64 else contextlib.nullcontext():
        yield


class Eagle:
    """EAGLE-1/2 and EAGLE-3 by their authors. ``Model.forward`` returns hidden states; the head's logits follow as in
    ``topK_genrate``."""

    def __init__(self, sources: types.SimpleNamespace, case: HeadCase) -> None:
        self._third = case.method == "eagle3"
        config = sources.Config(**case.config)
        make = sources.Eagle3 if self._third else sources.Eagle1
        self._model = make(config, bias=case.config.get("bias", True), **(case.tree or {})).eval()
        # as ea_model.py reads config.json, and deletes them
        if self._third and config.vocab_size == config.draft_vocab_size:
            del self._model.d2t, self._model.t2d
        hidden = config.hidden_size
        self._head = None if self._third else torch.nn.Linear(hidden, config.vocab_size, bias=False)
        self.width = 3 * case.config.get("target_hidden_size", hidden) if self._third else hidden

    def shapes(self) -> Shapes:
        shapes = _weight_shapes(self._model)
        return shapes if self._head is None else shapes | {"lm_head.weight": tuple(self._head.weight.shape)}

    def load(self, tensors: Tensors) -> None:
        if self._head is not None:
            self._head.load_state_dict({"weight": tensors["lm_head.weight"]})
            tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        self._model.load_state_dict(tensors)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(self._model.norm(hidden)) if self._head is None else self._head(hidden)

    def answer(self, features: torch.Tensor, tokens: torch.Tensor, chain_tokens: torch.Tensor) -> Tensors:
        self._model.reset()
        hidden, cache = self._model(features[None], input_ids=tokens[None], use_cache=True)
        chain, last = [], hidden[:, -1:]
        for token in chain_tokens:
            last, cache = self._model(last, input_ids=token[None, None], past_key_values=cache, use_cache=True)
            chain.append(last[0, 0])
        chained = torch.stack(chain)
        return {
            "hidden": hidden[0],
            "logits": self._logits(hidden[0]),
            "chain_hidden": chained,
            "chain_logits": self._logits(chained),
        }

    def tree(self, features: torch.Tensor, tokens: torch.Tensor) -> Tensors:
        self._model.init_tree()
        first = torch.zeros(1, dtype=torch.long)  # the text's first token: it is in no pair
        found = self._model.topK_genrate(features[None], torch.cat([first, tokens])[None], self._head, None)
        tokens_of_tree, retrieve, mask, positions = found
        return {
            "draft_tokens": tokens_of_tree[0],
            "retrieve_indices": retrieve,
            "tree_mask": mask[0, 0].bool(),
            "tree_position_ids": positions,
        }


class _AtOnce:
    """A head as its trainer runs it: T + 4 positions at a time, each of which drafts on independently.

    In pass k, position i is fed its own hidden state of pass k - 1 and the token at i + 1 + k; it attends to positions
    up to i in pass 0, and to itself in the passes since. At the last pair, that is the chain.
    """

    width: int

    def load(self, tensors: Tensors) -> None:
        raise NotImplementedError

    def passes(self, features: torch.Tensor, tokens: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        """Return hidden states and logits [1, T + 4, .] of each pass over features [1, T + 4, F]; ``tokens``: ids [1, T
        + 4] of each pass."""
        raise NotImplementedError

    def answer(self, features: torch.Tensor, tokens: torch.Tensor, chain_tokens: torch.Tensor) -> Tensors:
        pairs, more = len(tokens), len(chain_tokens)
        padded = torch.cat([features, features.new_zeros(more, self.width)])[None]
        ids = torch.cat([tokens, chain_tokens, tokens.new_zeros(more)])
        shifted = [ids[step : step + pairs + more][None] for step in range(more + 1)]
        hidden, logits = self.passes(padded, shifted)
        return {
            "hidden": hidden[0][0, :pairs],
            "logits": logits[0][0, :pairs],
            "chain_hidden": torch.stack([states[0, pairs - 1] for states in hidden[1:]]),
            "chain_logits": torch.stack([scores[0, pairs - 1] for scores in logits[1:]]),
        }

    def tree(self, features: torch.Tensor, tokens: torch.Tensor) -> Tensors:
        raise NotImplementedError("trees are drawn by cnets.py and cnets1.py")


def _weight_shapes(model: torch.nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


class SpecForge(_AtOnce):
    """EAGLE-3 as SpecForge's `OnlineEagle3Model` runs it in training."""

    def __init__(self, sources: types.SimpleNamespace, case: HeadCase) -> None:
        config = transformers.LlamaConfig(**case.config)
        self._model = sources.Model(config, attention_backend="sdpa").eval()
        self.width = 3 * self._model.target_hidden_size

    def shapes(self) -> Shapes:
        return _weight_shapes(self._model)

    def load(self, tensors: Tensors) -> None:
        self._model.load_state_dict(tensors)

    def passes(self, features: torch.Tensor, tokens: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        model, length = self._model, features.shape[1]
        state = model.project_hidden_states(features)
        cache: list[list[torch.Tensor]] = [[], []]
        everywhere = torch.ones(1, length, dtype=torch.bool)
        mask = model.prepare_decoder_attention_mask(everywhere, state, 1, length, 0)
        hidden = []
        for ids in tokens:
            embedded, positions = model.embed_input_ids(ids), torch.arange(length)[None]
            state = model.backbone(embedded, state, cache, mask, positions)
            hidden.append(state)
        return hidden, [model.compute_logits(state) for state in hidden]


class Speculators(_AtOnce):
    """EAGLE-3 in the package speculators: its own forward, with hooks on its head and norm."""

    def __init__(self, sources: types.SimpleNamespace, case: HeadCase) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(case.config))
            config = sources.Config.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        self._model = sources.Model(config).eval()
        self._fed_back_normed = config.norm_output
        self.width = 3 * config.transformer_layer_config.hidden_size

    def shapes(self) -> Shapes:
        shapes = _weight_shapes(self._model)
        return {name: shape for name, shape in shapes.items() if not name.startswith("verifier_")}

    def load(self, tensors: Tensors) -> None:
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        if unexpected or any(not name.startswith("verifier_") for name in missing):
            raise ValueError(f"the head does not fit: {missing} are missing, {unexpected} unexpected")

    def passes(self, features: torch.Tensor, tokens: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        hidden: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []

        def norm(module: torch.nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            hidden.append(result if self._fed_back_normed else given[0])

        def head(module: torch.nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            logits.append(result)

        hooks = [self._model.norm.register_forward_hook(norm), self._model.lm_head.register_forward_hook(head)]
        one_document = torch.zeros_like(tokens[0])
        self._model(features, tokens[0], one_document, ttt_steps=len(tokens))  # shifts the tokens itself
        for hook in hooks:
            hook.remove()
        return hidden, logits


class Medusa:
    """Medusa heads over given last hidden states.

    The original's ``[ResBlock(...)] * layers`` applies one block several times: a checkpoint has a copy per layer, and
    loading keeps the last. For blocks that differ, as other engines read them, they are separate objects.
    """

    def __init__(self, sources: types.SimpleNamespace, case: HeadCase) -> None:
        self.width = MEDUSA_HIDDEN
        config: Any = types.SimpleNamespace(
            **case.config, hidden_size=MEDUSA_HIDDEN, vocab_size=VOCABULARY, _name_or_path="target"
        )
        self._model = sources.Model(config).eval()
        if not case.shared_blocks:
            for head in self._model.medusa_head:
                for index in range(config.medusa_num_layers):
                    head[index] = sources.ResBlock(MEDUSA_HIDDEN)

    def shapes(self) -> Shapes:
        return {name: tuple(tensor.shape) for name, tensor in self._model.medusa_head.state_dict().items()}

    def load(self, tensors: Tensors) -> None:
        self._model.medusa_head.load_state_dict(tensors)

    def answer(self, features: torch.Tensor, tokens: torch.Tensor, chain_tokens: torch.Tensor) -> Tensors:
        return {"logits": self._model(features, medusa_forward=True)}

    def tree(self, features: torch.Tensor, tokens: torch.Tensor) -> Tensors:
        raise NotImplementedError("Medusa's tree is a list of paths, not computed")
