"""All cases, by family."""

from tools.oracle.cases import deepseek, gemma, llama, moe, phi3
from tools.oracle.cases.case import Case

_FAMILIES = (llama, moe, gemma, phi3, deepseek)

ARCHITECTURES: dict[str, str] = {kind: name for family in _FAMILIES for kind, name in family.ARCHITECTURES.items()}
CASES: tuple[Case, ...] = tuple(case for family in _FAMILIES for case in family.CASES)

__all__ = ["ARCHITECTURES", "CASES", "Case"]
