"""Shapes at which kernels and peers are timed: layers of Llama-3.1-8B, DeepSeek-V2 and others."""

from __future__ import annotations

from typing import Literal, NamedTuple

L2_BYTES = 50_000_000  # L2 cache of an H100; an H200 has the same


class Decode(NamedTuple):
    """Decode with one query for each of ``rows`` sequences of ``context`` keys, 16 bits a number."""

    rows: int
    context: int
    page: int = 64
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"decode, {self.rows} rows, {self.context} keys, page {self.page}"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values (read once), queries and results."""
        return 4 * self.rows * self.head_dim * (self.context * self.kv_heads + self.heads)


class Prefill(NamedTuple):
    """Causal prefill of the last ``chunk`` of ``context`` tokens in each of ``sequences`` prompts, 16 bits a number."""

    sequences: int
    chunk: int
    context: int
    page: int = 64
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"prefill, {self.sequences} x {self.chunk} of {self.context} tokens, page {self.page}"

    @property
    def operations(self) -> int:
        """Floating-point operations of both products; masked positions do not count."""
        before = self.context - self.chunk
        seen = self.chunk * before + self.chunk * (self.chunk + 1) // 2
        return 4 * self.sequences * self.heads * self.head_dim * seen


class Latent(NamedTuple):
    """MLA decode: one latent of 512 numbers and 64 rotated numbers per token, shared by all heads."""

    rows: int
    context: int
    heads: int
    page: int = 64
    rank: int = 512
    rope: int = 64

    def __str__(self) -> str:
        return f"MLA decode, {self.rows} rows, {self.context} keys, {self.heads} heads, page {self.page}"

    @property
    def bytes(self) -> int:
        latent = self.rank + self.rope
        return 2 * self.rows * (self.context * latent + self.heads * (latent + self.rank))


class Product(NamedTuple):
    """A product of ``rows`` with a weight of ``bits`` a number, in groups of 128 with 16-bit scales."""

    rows: int
    inputs: int
    channels: int
    bits: int

    def __str__(self) -> str:
        return f"int{self.bits} matmul, {self.rows} rows, {self.inputs} x {self.channels}"

    @property
    def bytes(self) -> int:
        weight = self.inputs * self.channels
        return weight * self.bits // 8 + weight // 128 * 2 + 2 * self.rows * (self.inputs + self.channels)

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inputs * self.channels


class Dense(NamedTuple):
    """A product of ``rows`` with a 16-bit weight; ``gated``: with gate and up projections, ``columns`` each."""

    rows: int
    inputs: int
    columns: int
    layout: Literal["in first", "in last"] = "in first"
    gated: bool = False

    def __str__(self) -> str:
        return f"matmul, {self.rows} rows, {self.inputs} x {'2 x ' * self.gated}{self.columns}"

    @property
    def weights(self) -> int:
        return self.inputs * self.columns * (1 + self.gated)

    @property
    def bytes(self) -> int:
        return 2 * (self.weights + self.rows * (self.inputs + self.columns))

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.weights


class Mixture(NamedTuple):
    """A product with experts: ``tokens`` with ``top_k`` of ``experts`` each, evenly routed, 16 bits a number.

    ``mxfp4``: weights are stored in MXFP4, with one exponent byte per 32 of them.
    """

    tokens: int
    experts: int
    top_k: int
    inputs: int
    channels: int
    mxfp4: bool = False

    def __str__(self) -> str:
        chosen = f"{self.top_k} of {self.experts} experts{' in MXFP4' * self.mxfp4}"
        return f"grouped matmul, {self.tokens} tokens with {chosen}, {self.inputs} x {self.channels}"

    @property
    def rows(self) -> int:
        """Rows of each active expert."""
        return -(-self.tokens * self.top_k // self.experts)

    @property
    def operations(self) -> int:
        return 2 * self.tokens * self.top_k * self.inputs * self.channels

    @property
    def bytes(self) -> int:
        """Bytes of the weights of active experts (read once), and of each entry's row and result."""
        entries = self.tokens * self.top_k
        active = min(self.experts, entries)
        weights = active * self.inputs * self.channels
        return (weights * 17 // 32 if self.mxfp4 else 2 * weights) + 2 * entries * (self.inputs + self.channels)


class Write(NamedTuple):
    """A write of new keys and values of ``sequences`` x ``tokens`` into pages of 64."""

    sequences: int
    tokens: int
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64

    def __str__(self) -> str:
        return f"kv_write, {self.sequences} x {self.tokens} tokens"

    @property
    def bytes(self) -> int:
        return 2 * 4 * self.sequences * self.tokens * self.kv_heads * self.head_dim


class Copy(NamedTuple):
    """A copy of pages of 64 tokens to other pages of one layer's pool."""

    pages: int
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64

    def __str__(self) -> str:
        return f"kv_copy, {self.pages} pages of {self.page}"

    @property
    def bytes(self) -> int:
        return 2 * 4 * self.pages * self.page * self.kv_heads * self.head_dim


class States(NamedTuple):
    """Linear attention with the delta rule, as in Qwen3-Next: tokens of ``rows`` sequences continue from states."""

    rows: int
    tokens: int = 1
    k_heads: int = 16
    heads: int = 32
    key: int = 128
    value: int = 128

    def __str__(self) -> str:
        return f"linear attention, {self.rows} x {self.tokens} tokens"

    @property
    def bytes(self) -> int:
        """Bytes of states (read and written once), of 16-bit inputs and of 32-bit results."""
        token = 2 * (2 * self.k_heads * self.key + self.heads * self.value) + 4 * self.heads * self.value
        return self.rows * (8 * self.heads * self.key * self.value + self.tokens * token)


Workload = Decode | Prefill | Latent | Product | Dense | Mixture | Write | Copy | States

# The most informative first: those that the time does not suffice for are skipped from the end.
DECODES = (
    Decode(64, 4096),
    Decode(64, 2048),
    Decode(64, 4096, page=16),
    Decode(8, 4096),
    Decode(1, 4096),
    Decode(256, 512),
    Decode(64, 512),
)
PREFILLS = (Prefill(1, 8192, 8192), Prefill(4, 2048, 2048), Prefill(1, 2048, 8192))
# QKV projection, gate with up, down, and LM head of Llama-3.1-8B (in another order).
FEW_ROWS = (
    Dense(64, 14336, 4096),
    Dense(64, 4096, 14336, "in last", gated=True),
    Dense(1, 4096, 6144),
    Dense(8, 4096, 128256, "in last"),
)
MANY_ROWS = (
    Dense(2048, 4096, 14336, "in last", gated=True),
    Dense(2048, 4096, 6144),
    Dense(8192, 14336, 4096),
)
# Shapes with a goal whose weights are not dense: int4 with few rows and many, experts, latents.
STORED, PREFILLED = Product(16, 4096, 28672, 4), Product(2048, 4096, 28672, 4)
EXPERTS, FLOAT4 = Mixture(64, 8, 2, 4096, 28672), Mixture(64, 32, 4, 2880, 5760, mxfp4=True)
LATENTS = Latent(64, 4096, 128)
OTHERS: tuple[Workload, ...] = (
    STORED,
    *FEW_ROWS[:2],
    *MANY_ROWS[:1],
    LATENTS,
    EXPERTS,
    FLOAT4,
    PREFILLED,
    Product(1, 4096, 28672, 4),
    Latent(64, 4096, 16),
    Write(64, 1),
    Write(1, 2048),
    Copy(64),
    States(64),
    States(1, 2048),
    Product(64, 4096, 28672, 4),
    Product(16, 4096, 28672, 8),
    Mixture(1, 32, 4, 2880, 5760, mxfp4=True),
    Mixture(2048, 32, 4, 2880, 5760, mxfp4=True),
    Mixture(1, 8, 2, 4096, 28672),
    Mixture(64, 128, 8, 2048, 1536),
    Mixture(512, 8, 2, 4096, 28672),
    *FEW_ROWS[2:],
    *MANY_ROWS[1:],
)
QUICK_SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 64}
QUICK_DECODES = (Decode(2, 128, **QUICK_SHAPE),)
QUICK_PREFILLS = (Prefill(1, 64, 64, **QUICK_SHAPE), Prefill(1, 64, 128, **QUICK_SHAPE))
QUICK_OTHERS: tuple[Workload, ...] = (
    Product(2, 256, 128, 4),
    Latent(2, 128, 4),
    Mixture(2, 4, 2, 64, 128),
    Mixture(2, 4, 2, 64, 128, mxfp4=True),
    Write(2, 1, kv_heads=2, head_dim=64),
    Copy(2, kv_heads=2, head_dim=64),
    States(2, k_heads=1, heads=2, key=64, value=32),
    States(1, 64, k_heads=1, heads=2, key=64, value=32),
    Dense(3, 64, 32, "in last", gated=True),
)


def attention(*, quick: bool) -> tuple[Decode | Prefill, ...]:
    """Return the shapes that peers are timed at, too; the longest decode and prefill first."""
    decodes, prefills = (QUICK_DECODES, QUICK_PREFILLS) if quick else (DECODES, PREFILLS)
    return (*decodes[:1], *prefills[:1], *decodes[1:], *prefills[1:])


def others(*, quick: bool) -> tuple[Workload, ...]:
    """Return the shapes that have no peer here."""
    return QUICK_OTHERS if quick else OTHERS


def variants(moved: int) -> int:
    """Return how many operand sets make every call read from memory: four times the L2 cache, at most 16 sets."""
    return max(1, min(16, -(-4 * L2_BYTES // moved)))
