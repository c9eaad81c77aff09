"""Ranks that were configured differently all stop at start, and say in what; ranks that were not ask once."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from vllm_ascend_moe.errors import AscendMoEError, ConfigError, UnsupportedError
from vllm_ascend_moe.integration.agreement import check_agreement, told_to_others
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


def fail_alone(rank: int, ranks: int) -> str:
    """Rank 1 finds an error of its own before it would come to the comparison."""
    group = dist.group.WORLD
    assert group is not None
    try:
        with told_to_others(group):
            if rank == 1:
                raise UnsupportedError("comm = 'mc2' cannot work here")
        check_agreement(group, {"comm": "auto"})
    except AscendMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_an_error_of_one_rank_alone_stops_all_with_its_text() -> None:
    first, second, third = launch(3, fail_alone, timeout_s=20)
    assert second == "UnsupportedError: comm = 'mc2' cannot work here"
    assert first == third
    assert first.startswith("ConfigError: errors by rank = {1: \"comm = 'mc2' cannot work here\"}, but it must be none")


def fail_last(rank: int, ranks: int) -> str:
    """Rank 0 has gone when rank 1 finds its error."""
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        return "gone"
    try:
        with told_to_others(group):
            raise UnsupportedError("my own")
    except UnsupportedError as error:
        return str(error)


def test_where_others_have_ended_a_rank_shows_its_own_error() -> None:
    assert launch(2, fail_last, timeout_s=5) == ["gone", "my own"]
