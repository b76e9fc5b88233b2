"""The multi-token prediction layer of DeepSeek-V3, built from transformers' modules.

transformers has no such layer: it leaves its tensors unread. It has all the modules, which are combined as in the
report (arXiv 2412.19437, section 2.2), with vLLM 0.33.0's choices where published weights or the report leave it open:
the embedding is the first half of the input of ``eh_proj`` (the report writes it second) and is zero at position 0; the
state after ``shared_head.norm`` is fed back.
"""

from __future__ import annotations

import torch
import transformers

from tools.oracle.cases.heads import HeadCase
from tools.oracle.head_models import Shapes, Tensors
from tools.oracle.run import build, checkpoint_shapes, read_checkpoint


class DeepseekMTP:
    """A target of N layers and an MTP layer as its layer N. A checkpoint holds both."""

    def __init__(self, sources: object, case: HeadCase) -> None:
        layers = case.config["num_hidden_layers"]
        self._config = case.config | {"num_hidden_layers": layers + 1}
        self._model = build(self._config, torch.get_default_dtype())
        self._layer = self._model.model.layers[layers]
        self._layer.self_attn.layer_idx = 0  # index in its own cache
        self._prefix = f"model.layers.{layers}."
        hidden, vocabulary, norm = case.config["hidden_size"], case.config["vocab_size"], self._model.model.norm
        norms = {name: type(norm)(hidden, norm.variance_epsilon) for name in ("enorm", "hnorm", "norm")}
        self._parts = torch.nn.ModuleDict(norms)
        self._parts["eh_proj"] = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self._parts["embed_tokens"] = torch.nn.Embedding(vocabulary, hidden)
        self._parts["head"] = torch.nn.Linear(hidden, vocabulary, bias=False)
        self.width = hidden

    def _name(self, part: str) -> str:
        return f"{self._prefix}{'shared_head.' if part in ('norm', 'head') else ''}{part}.weight"

    def shapes(self) -> Shapes:
        own = {self._name(part): tuple(module.weight.shape) for part, module in self._parts.items()}
        return checkpoint_shapes(self._model) | own

    def load(self, tensors: Tensors) -> None:
        own = {self._name(part): f"{part}.weight" for part in self._parts}
        self._parts.load_state_dict({name: tensors[stored] for stored, name in own.items()})
        others = {name: tensor.numpy() for name, tensor in tensors.items() if name not in own}
        self._model.load_state_dict(read_checkpoint(self._config, others))

    def _states(
        self, features: torch.Tensor, tokens: torch.Tensor, start: int, cache: transformers.DynamicCache
    ) -> torch.Tensor:
        """Return post-norm states [t, H] of pairs at positions ``start``, ``start`` + 1, ..."""
        parts, length = self._parts, len(tokens)
        positions = torch.arange(start, start + length)
        embedded = parts["embed_tokens"](tokens)
        embedded = torch.where(positions[:, None] == 0, torch.zeros_like(embedded), embedded)
        both = torch.cat([parts["enorm"](embedded), parts["hnorm"](features)], dim=-1)
        state = parts["eh_proj"](both)[None]
        mask = torch.full((length, start + length), -torch.inf).triu(start + 1)
        state = self._layer(
            state,
            attention_mask=mask[None, None],
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self._model.model.rotary_emb(state, positions[None]),
        )
        return parts["norm"](state[0])

    def answer(self, features: torch.Tensor, tokens: torch.Tensor, chain_tokens: torch.Tensor) -> Tensors:
        cache = transformers.DynamicCache()
        hidden = self._states(features, tokens, 0, cache)
        chain, last = [], hidden[-1:]
        for step, token in enumerate(chain_tokens):
            last = self._states(last, token[None], len(tokens) + step, cache)
            chain.append(last[0])
        chained, head = torch.stack(chain), self._parts["head"]
        return {"hidden": hidden, "logits": head(hidden), "chain_hidden": chained, "chain_logits": head(chained)}

    def tree(self, features: torch.Tensor, tokens: torch.Tensor) -> Tensors:
        raise NotImplementedError("trees are drawn by cnets.py and cnets1.py")
