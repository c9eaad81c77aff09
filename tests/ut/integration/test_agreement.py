"""Ranks that were configured differently all stop at start, and say in what; ranks that were not ask once."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from vllm_ascend_moe.errors import ConfigError
from vllm_ascend_moe.integration.agreement import check_agreement
from vllm_ascend_moe.testing.launch import launch

pytestmark = pytest.mark.multiprocess


def ask(rank: int, ranks: int) -> list[str]:
    group, said = dist.group.WORLD, []
    assert group is not None
    for capacity in (16 + (rank == 2), 16):
        try:
            first = check_agreement(group, {"comm": "auto", "capacity": capacity})
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append(f"first: {first}")
    # Only one rank calls it: with a collective inside, this would hang.
    if rank == 0:
        said.append(f"first: {check_agreement(group, {'comm': 'auto'})}")
    return said


def test_a_difference_is_named_on_every_rank_and_agreement_costs_one_collective() -> None:
    results = launch(3, ask, timeout_s=30)
    for said in results:
        assert "capacity by rank = [16, 16, 17], but it must be equal on all ranks" in said[0]
        assert said[1] == "first: True"
    assert results[0][2] == "first: False"
