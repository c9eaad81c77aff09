"""The contract of token communication: dispatch tokens to experts, combine their outputs.

Symbols: T_r tokens of this rank; R ep_size; M max_local_size; H hidden size; K top-k; E experts; E_l local experts;
C capacity. Every rank enters every collective, also with 0 tokens. A topk id outside [0, E) means "not routed": it
adds exactly 0, and whatever its slot holds (NaN too) never reaches a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from vllm_ascend_moe.layout import TokenLayout


class ActivationFormat(Enum):
    """The shape in which experts get their tokens."""

    ROWS = "rows"  # hidden [rows, H], topk_ids and topk_weights [rows, K]
    BATCHED = "batched"  # hidden [E_l, C*R, H], expert_num_tokens [E_l]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What experts work on. ``handle`` is for the combine of the same strategy alone."""

    format: ActivationFormat
    hidden: torch.Tensor
    topk_weights: torch.Tensor | None = None  # ROWS: fp32 [rows, K]
    topk_ids: torch.Tensor | None = None  # ROWS: int32 or int64 [rows, K], global ids; pad rows hold -1
    expert_num_tokens: torch.Tensor | None = None  # BATCHED: int32 [E_l]
    scales: torch.Tensor | None = None  # fp32 per-token scales of a quantised payload, leading shape of hidden
    handle: object


class TokenComm(Protocol):
    """One strategy. Holds a group and configuration, no state between dispatch and combine.

    A rank whose inputs are wrong raises before rows move; a backend that fails raises CommError. What the others see
    of a rank that raised, an error of their own or their group's timeout, each strategy says.
    """

    format: ActivationFormat

    def dispatch(
        self,
        hidden: torch.Tensor,  # [T_r, H], or [T_r, H] quantised with scales
        topk_weights: torch.Tensor,  # fp32 [T_r, K]
        topk_ids: torch.Tensor,  # [T_r, K]
        *,
        num_experts: int,
        layout: TokenLayout,
        scales: torch.Tensor | None = None,  # fp32 [T_r] or [T_r, groups]
    ) -> Dispatched: ...

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor: ...  # -> [T_r, H]
