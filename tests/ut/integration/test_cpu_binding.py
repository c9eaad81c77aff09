"""Cores are dealt out where vLLM's automatic binding would stop, and only there. The machine is replaced by a list of
cores and NUMA nodes; that bound workers run is tested with real engines."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from vllm_ascend_moe.integration import cpu_binding
from vllm_ascend_moe.integration.cpu_binding import bind_workers, deal_cores

NAME = "VLLM_CPU_OMP_THREADS_BIND"


def config(dp_local: int = 1, workers: int = 1, local_rank: int | None = None) -> SimpleNamespace:
    """The three fields of vLLM's ParallelConfig that are read."""
    return SimpleNamespace(
        data_parallel_size_local=dp_local, local_world_size=workers, data_parallel_rank_local=local_rank
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch):
    """machine(cores, nodes); nothing is bound before or after a test."""
    import vllm.utils.cpu_resource_utils as resources

    def replace(cores: int, nodes: int) -> None:
        monkeypatch.setattr(
            resources, "get_allowed_cpu_list", lambda: [SimpleNamespace(id=core) for core in range(cores)]
        )
        monkeypatch.setattr(resources, "get_visible_memory_node", lambda: list(range(nodes)))

    monkeypatch.setenv(NAME, "auto")
    monkeypatch.delenv(NAME)
    monkeypatch.setattr(cpu_binding, "_ours", {})
    replace(4, 1)
    return replace


@pytest.mark.parametrize(
    ("cores", "workers", "dealt"),
    [(4, 2, "0,1|2,3"), (2, 4, "0|1|0|1"), (5, 2, "0,1|2,3"), (1, 3, "0|0|0")],
    ids=["even", "more-workers-than-cores", "rest-unused", "one-core"],
)
def test_cores_are_dealt_evenly(cores: int, workers: int, dealt: str) -> None:
    assert deal_cores(range(cores), workers) == dealt


def test_bound_where_workers_outnumber_nodes() -> None:
    bind_workers(config(dp_local=2))
    assert os.environ[NAME] == "0,1|2,3"


def test_left_to_vllm_where_nodes_suffice_or_one_worker_runs(machine) -> None:
    bind_workers(config())
    machine(4, 2)
    bind_workers(config(workers=2))
    assert NAME not in os.environ


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "0-1|2-3")
    bind_workers(config(workers=4))
    assert os.environ[NAME] == "0-1|2-3"


def test_a_second_engine_does_not_take_our_value_for_the_users() -> None:
    bind_workers(config(workers=2))
    bind_workers(config(workers=4))
    assert os.environ[NAME] == "0|1|2|3"
    bind_workers(config())
    assert NAME not in os.environ


def test_one_process_per_dp_rank_gets_a_list_for_each_local_rank() -> None:
    """vLLM takes the lists from local rank 1 on, though this process sees one engine."""
    bind_workers(config(workers=2, local_rank=1))
    assert os.environ[NAME] == "0|1|2|3"
