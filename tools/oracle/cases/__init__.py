"""All cases, by family."""

from tools.oracle.cases import deepseek, dense, gemma, gemma4, gpt, hybrid, llama, mixtures, moe, phi3, plain, wrapped
from tools.oracle.cases.case import Case

_FAMILIES = (llama, moe, mixtures, gemma, gemma4, phi3, deepseek, gpt, wrapped, dense, hybrid, plain)

ARCHITECTURES: dict[str, str] = {kind: name for family in _FAMILIES for kind, name in family.ARCHITECTURES.items()}
CASES: tuple[Case, ...] = tuple(case for family in _FAMILIES for case in family.CASES)
# Defaults of config.json for all cases, by model type; families without an entry use Llama's field names.
COMMON: dict[str, dict] = gpt.COMMON | wrapped.COMMON | dense.COMMON | hybrid.COMMON | gemma4.COMMON

__all__ = ["ARCHITECTURES", "CASES", "COMMON", "Case"]
