"""What the fused strategy can take: from what all ranks share, so alike on every rank.

Limits are those that torch_npu 2.13 documents for npu_moe_distribute_dispatch_v2 and combine_v2 with comm_alg "" (full
mesh, the one that takes inactive tokens on Atlas A2 too).

Symbols: R ranks; M tokens of the fullest rank; K top-k; E experts of the group; E_l = E / R; H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_ascend_moe.errors import CapacityError, ConfigError, InvalidValueError, PlacementError, ShapeError

MAX_TOP_K, MAX_EXPERTS, HIDDEN_UNIT = 16, 1024, 32
DEFAULT_BUFFER_MIB = 200  # of HCCL, where HCCL_BUFFSIZE is not set
_MIB = 1 << 20
_ADVICE = "Use another strategy."


def _aligned(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _buffer_a2(tokens: int, ranks: int, local_experts: int, top_k: int, hidden_size: int) -> int:
    """Two buffers of M * R * min(E_l, K) rows of 16-bit values, and 2 MiB each."""
    return 2 * (tokens * ranks * min(local_experts, top_k) * hidden_size * 2 + 2 * _MIB)


def _buffer_a3(tokens: int, ranks: int, local_experts: int, top_k: int, hidden_size: int) -> int:
    """Two buffers of a row for each token of a rank and expert here, and of the rows that come back."""
    out = _aligned(_aligned(2 * hidden_size, 32) + 64, 512)
    return 2 * tokens * (local_experts * ranks * out + top_k * _aligned(2 * hidden_size, 512))


@dataclass(frozen=True, kw_only=True)
class Product:
    """What the operators take on one kind of NPU. ``buffer_bytes``: of M, R, E_l, K and H."""

    name: str
    ranks: frozenset[int]
    max_tokens: int
    hidden_sizes: tuple[int, int]
    buffer_bytes: Callable[[int, int, int, int, int], int]


# By the name of the link.
PRODUCTS: dict[str, Product] = {
    "atlas-a2": Product(
        name="Atlas A2",
        ranks=frozenset({2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256}),
        max_tokens=256,
        hidden_sizes=(32, 7168),
        buffer_bytes=_buffer_a2,
    ),
    "atlas-a3": Product(
        name="Atlas A3",
        ranks=frozenset(range(2, 769)),
        max_tokens=512,
        hidden_sizes=(1024, 8192),
        buffer_bytes=_buffer_a3,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the limits are of, the same on every rank. ``splits``: groups that share all ``num_experts`` experts."""

    ranks: int
    num_experts: int
    max_tokens: int
    hidden_size: int
    top_k: int
    splits: int = 1

    @property
    def experts(self) -> int:
        """E of this group."""
        return self.num_experts // self.splits

    def buffer_mib(self, product: Product) -> int:
        """HCCL_BUFFSIZE in MiB that the operators need.

        >>> Sizes(ranks=16, num_experts=256, max_tokens=128, hidden_size=7168, top_k=8).buffer_mib(PRODUCTS["atlas-a2"])
        452
        """
        local = self.experts // self.ranks
        needed = product.buffer_bytes(self.max_tokens, self.ranks, local, self.top_k, self.hidden_size)
        return _aligned(needed, _MIB) // _MIB


def fault_of(sizes: Sizes, product: Product, buffer_mib: int) -> InvalidValueError | None:
    """The error that says what is out of the limits, or None."""
    low, high = product.hidden_sizes
    if sizes.ranks not in product.ranks:
        known = f"{_text(product.ranks)} on {product.name}"
        return InvalidValueError("ranks", sizes.ranks, known, _ADVICE)
    if not 0 < sizes.experts <= MAX_EXPERTS or sizes.num_experts % (sizes.ranks * sizes.splits):
        limit = f"as many on each of {sizes.ranks * sizes.splits} ranks, {MAX_EXPERTS} in a group at most"
        return PlacementError("num_experts", sizes.num_experts, limit, "Use all_to_all, which takes any.")
    if not 1 <= sizes.top_k <= min(MAX_TOP_K, sizes.experts):
        return ShapeError("top_k", sizes.top_k, f"1 to {min(MAX_TOP_K, sizes.experts)}", _ADVICE)
    if sizes.hidden_size % HIDDEN_UNIT or not low <= sizes.hidden_size <= high:
        limit = f"a multiple of {HIDDEN_UNIT} from {low} to {high} on {product.name}"
        return ShapeError("hidden_size", sizes.hidden_size, limit, _ADVICE)
    if not 1 <= sizes.max_tokens <= product.max_tokens:
        limit = f"1 to {product.max_tokens} on {product.name}"
        action = 'Set max_tokens_in_flight or over_capacity = "rows", or use another strategy.'
        return CapacityError("tokens of a rank", sizes.max_tokens, limit, action)
    needed = sizes.buffer_mib(product)
    if buffer_mib < needed:
        limit = f"at least {needed} (MiB) for {sizes.max_tokens} tokens on each of {sizes.ranks} ranks"
        action = f"Set HCCL_BUFFSIZE={needed} on every rank, or send fewer tokens at a time."
        return ConfigError("HCCL_BUFFSIZE", buffer_mib, limit, action)
    return None


def buffer_mib_given() -> int:
    """HCCL_BUFFSIZE in MiB as this process has it; HCCL reads it too.

    Raises:
        ConfigError: it is not a number.
    """
    text = os.environ.get("HCCL_BUFFSIZE", str(DEFAULT_BUFFER_MIB))
    if not text.isdecimal():
        raise ConfigError("HCCL_BUFFSIZE", text, "a number of MiB", "Correct the environment variable.")
    return int(text)


def _text(ranks: frozenset[int]) -> str:
    first, *others = sorted(ranks)
    if len(ranks) == others[-1] - first + 1:
        return f"{first} to {others[-1]}"
    return f"one of {', '.join(map(str, sorted(ranks)))}"


def most_tokens(sizes: Sizes, product: Product, buffer_mib: int) -> int:
    """The most tokens of a rank that the operators and the buffer take; at least 1."""
    fits = (
        tokens
        for tokens in range(product.max_tokens, 1, -1)
        if replace(sizes, max_tokens=tokens).buffer_mib(product) <= buffer_mib
    )
    return next(fits, 1)
