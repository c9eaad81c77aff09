"""ExpertPlacement: which rank holds which expert, as pure arithmetic.

Symbols: E experts; R ep_size, the number of ranks; E_l experts of one rank. Where experts are replicated (EPLB), an
"expert" here is a physical one: the ids that routers hand to dispatch are physical ids, and E counts replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from vllm_ascend_moe.errors import PlacementError

# A placement is a few kilobytes; EPLB makes a new one at each rebalancing, and old ones are dropped.
_CACHED_PLACEMENTS = 256


@dataclass(frozen=True)
class ExpertPlacement:
    """Rank and slot of every expert of one group. Frozen and hashable; build it with one of the constructors.

    Args:
        ranks: the group rank every expert lives on; -1 where it lives on no rank of this group.
        slots: its slot on that rank, the index into the rank's weights; -1 where ``ranks`` is -1.
        ep_size: R.

    Raises:
        PlacementError: no experts, a rank outside -1..R-1, or slots of a rank that are not 0..E_l-1, each once.

    >>> placement = ExpertPlacement.linear(num_experts=5, ep_size=2)
    >>> placement.ranks, placement.slots, placement.local_counts
    ((0, 0, 0, 1, 1), (0, 1, 2, 0, 1), (3, 2))
    >>> placement.experts_of(1), placement.expert_map(1).tolist()
    ([3, 4], [-1, -1, -1, 0, 1])
    """

    ranks: tuple[int, ...]
    slots: tuple[int, ...]
    ep_size: int
    local_counts: tuple[int, ...] = field(init=False, compare=False)
    """E_l of each rank."""
    _hash: int = field(init=False, compare=False, repr=False)
    _tensors: dict[tuple[int, torch.device], torch.Tensor] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.ep_size < 1:
            raise PlacementError("ep_size", self.ep_size, "1 or more", "Pass the size of the group.")
        if not self.ranks or len(self.slots) != len(self.ranks):
            raise PlacementError(
                "(len(ranks), len(slots))",
                (len(self.ranks), len(self.slots)),
                "the number of experts, 1 or more, twice",
                "Pass one rank and one slot per expert.",
            )
        by_rank: list[list[int]] = [[] for _ in range(self.ep_size)]
        for expert, (rank, slot) in enumerate(zip(self.ranks, self.slots, strict=True)):
            if not -1 <= rank < self.ep_size:
                raise PlacementError(
                    f"ranks[{expert}]", rank, f"an integer from -1 to {self.ep_size - 1}", "Pass ranks in the group."
                )
            if rank >= 0:
                by_rank[rank].append(slot)
            elif slot != -1:
                raise PlacementError(f"slots[{expert}]", slot, "-1", "An expert without a rank has no slot.")
        for rank, slots in enumerate(by_rank):
            if sorted(slots) != list(range(len(slots))):
                raise PlacementError(
                    f"slots of rank {rank}", slots, f"0 to {len(slots) - 1}, each once", "Number them without gaps."
                )
        object.__setattr__(self, "local_counts", tuple(map(len, by_rank)))
        object.__setattr__(self, "_hash", hash((self.ranks, self.slots, self.ep_size)))

    def __hash__(self) -> int:
        return self._hash  # placements are keys of caches on the hot path

    # -- construction ------------------------------------------------------------------------------------------

    @staticmethod
    def linear(num_experts: int, ep_size: int) -> ExpertPlacement:
        """Consecutive experts on each rank; the first E % R ranks hold one more. vLLM's ``linear``. Cached."""
        return _linear(num_experts, ep_size)

    @staticmethod
    def round_robin(num_experts: int, ep_size: int) -> ExpertPlacement:
        """Expert e on rank e % R. vLLM's ``round_robin``. Cached."""
        return _round_robin(num_experts, ep_size)

    @staticmethod
    def of(ranks: Iterable[int], ep_size: int, slots: Iterable[int] | None = None) -> ExpertPlacement:
        """Any placement, physical experts of EPLB included. Cached.

        Args:
            ranks: as for the class.
            slots: as for the class; None numbers each rank's experts in the order of their ids.

        >>> ExpertPlacement.of([1, 0, 1, -1], ep_size=2).slots
        (0, 0, 1, -1)
        """
        return _of(tuple(ranks), ep_size, None if slots is None else tuple(slots))

    def restrict(self, group_ranks: Sequence[int]) -> ExpertPlacement:
        """The same experts and slots as a subgroup sees them: experts of ranks outside of it live on rank -1.

        Args:
            group_ranks: the members' ranks in this placement, in the order of their ranks in the subgroup.

        >>> ExpertPlacement.linear(6, 3).restrict([2, 0]).ranks
        (1, 1, -1, -1, 0, 0)
        """
        new = {rank: position for position, rank in enumerate(group_ranks)}
        if len(new) != len(group_ranks) or not all(0 <= rank < self.ep_size for rank in new):
            raise PlacementError(
                "group_ranks",
                tuple(group_ranks),
                f"different integers from 0 to {self.ep_size - 1}",
                "Pass the subgroup's ranks in the group of this placement.",
            )
        kept = tuple(new.get(rank, -1) for rank in self.ranks)
        slots = tuple(-1 if rank < 0 else slot for rank, slot in zip(kept, self.slots, strict=True))
        return _of(kept, len(group_ranks), slots)

    # -- arithmetic --------------------------------------------------------------------------------------------

    @property
    def num_experts(self) -> int:
        """E, replicas included."""
        return len(self.ranks)

    def experts_of(self, rank: int) -> list[int]:
        """Ids of the experts of ``rank`` in slot order, E_l of them."""
        self._check_rank(rank)
        mine = [(slot, expert) for expert, slot in enumerate(self.slots) if self.ranks[expert] == rank]
        return [expert for _, expert in sorted(mine)]

    def expert_map(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """int32 [E]: the expert's slot on ``rank``, or -1 where it lives elsewhere. Cached: do not write to it."""
        self._check_rank(rank)
        return self._cached(rank, device)

    def rank_of(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int32 [E]: ``ranks`` on a device. Cached: do not write to it."""
        return self._cached(-1, device)

    def _cached(self, rank: int, device: torch.device | str) -> torch.Tensor:
        key = (rank, torch.device(device))
        tensor = self._tensors.get(key)
        if tensor is None:
            pairs = zip(self.ranks, self.slots, strict=True)
            values = self.ranks if rank < 0 else [slot if owner == rank else -1 for owner, slot in pairs]
            tensor = self._tensors[key] = torch.tensor(values, dtype=torch.int32, device=device)
        return tensor

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ep_size:
            raise PlacementError("rank", rank, f"an integer from 0 to {self.ep_size - 1}", "Pass a rank of this group.")


@lru_cache(maxsize=_CACHED_PLACEMENTS)
def _of(ranks: tuple[int, ...], ep_size: int, slots: tuple[int, ...] | None) -> ExpertPlacement:
    if slots is None:
        seen: dict[int, int] = {}
        numbered = []
        for rank in ranks:
            seen[rank] = seen.get(rank, -1) + 1
            numbered.append(seen[rank] if rank >= 0 else -1)
        slots = tuple(numbered)
    return ExpertPlacement(ranks, slots, ep_size)


@lru_cache(maxsize=_CACHED_PLACEMENTS)
def _linear(num_experts: int, ep_size: int) -> ExpertPlacement:
    _check_sizes(num_experts, ep_size)
    base, more = divmod(num_experts, ep_size)
    return _of(tuple(rank for rank in range(ep_size) for _ in range(base + (rank < more))), ep_size, None)


@lru_cache(maxsize=_CACHED_PLACEMENTS)
def _round_robin(num_experts: int, ep_size: int) -> ExpertPlacement:
    _check_sizes(num_experts, ep_size)
    return _of(tuple(expert % ep_size for expert in range(num_experts)), ep_size, None)


def _check_sizes(num_experts: int, ep_size: int) -> None:
    for name, value in (("num_experts", num_experts), ("ep_size", ep_size)):
        if value < 1:
            raise PlacementError(name, value, "1 or more", "Pass the global number, not this rank's.")
