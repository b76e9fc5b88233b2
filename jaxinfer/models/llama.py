"""Alias of `jaxinfer.models.families.llama`, for families in files of their own that import it from here."""

from jaxinfer.models.families.llama import LLAMA, Llama, LlamaBlock, LlamaConfig, param_specs

__all__ = ["LLAMA", "Llama", "LlamaBlock", "LlamaConfig", "param_specs"]
