"""``vllm serve`` over HTTP with two engines that share experts: uneven load, then an idle rank, then a clean end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from tests.e2e.cpu.conftest import BURST, make_burst, make_requests
from tests.e2e.cpu.server import STOP_TIMEOUT_S, Server
from vllm_ascend_moe.integration.generate import Generated, Request
from vllm_ascend_moe.testing.launch import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
def serve(model_path: Callable[[str, str], str], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """serve(*more, **keywords) -> a server that starts; all are killed at the end, also after a failure."""
    servers: list[Server] = []

    def start(*more: str, **keywords: str) -> Server:
        log = tmp_path / f"serve-{len(servers)}.log"
        servers.append(Server(model_path("qwen3_moe", "float32"), log, *more, **keywords))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


# Without these, memory grows by 10 MiB a burst for as long as steps have shapes that oneDNN has not seen (it keeps 1024
# compiled products). With them it is flat after some bursts.
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "MALLOC_ARENA_MAX": "1"}


def check_burst(server: Server, expected: list[list[int]]) -> None:
    """BURST requests of random length at once: every answer is right."""
    with ThreadPoolExecutor(BURST) as pool:
        assert list(pool.map(server.complete, make_burst())) == expected


@pytest.mark.parametrize(
    "comm", ["padded_allgather", pytest.param("all_to_all", marks=pytest.mark.long), "batched_all_to_all"]
)
def test_serves_many_uneven_requests_then_one_in_flat_memory_then_stops(
    comm: str, serve: Callable[..., Server], single_engine: Callable[[str, str], list[Generated]]
) -> None:
    results, uneven = single_engine("qwen3_moe", "float32"), make_requests(0)
    # In which steps requests meet is chance, and with it the order of some sums.
    assert min(margin for result in results[len(uneven) :] for margin in result.margins) > 1e-3, "choose other prompts"
    expected = [result.tokens for result in results]
    server = serve(comm=comm, **SMALL_CACHES)
    server.wait_until_ready()
    # One short request alone: the other rank is idle and must take part all the same.
    assert server.complete(uneven[2]) == expected[2]
    # A leak grows with every burst; caches grow until they are full. One burst that leaves nothing behind is enough.
    grown = []
    for _ in range(12):
        before = server.worker_bytes()
        assert len(before) == 2
        check_burst(server, expected[len(uneven) :])
        grown.append(max(after - earlier for earlier, after in zip(before, server.worker_bytes(), strict=True)))
        if grown[-1] < 4 << 20:
            break
    assert grown[-1] < 4 << 20, f"{BURST} more requests cost {grown} bytes, burst after burst"
    server.stop(alone=True)
    log = server.log.read_text()
    assert log.count(f"Token communication: {comm}, configured") == 2
    # Capacity and memory: expected at start, and what it was at the end, of each worker.
    batched = comm == "batched_all_to_all"
    assert ("MiB of buffers a rank" in log) is batched
    assert log.count("Closing. Buffers of dispatch, group dp:") == 2 * batched


def test_a_worker_that_dies_ends_its_requests_and_the_server(serve: Callable[..., Server]) -> None:
    """The other worker waits for the dead one in a collective. Nothing may hang, and the log must say what happened:
    vLLM sees the death first, and ends the rest."""
    server = serve(comm="all_to_all")
    server.wait_until_ready()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(server.complete, Request([1, 2, 3], max_tokens=500)) for _ in range(4)]
        time.sleep(1)
        killed, *others = server.workers()
        killed.kill()
        for answer in answers:
            error = answer.exception(timeout=STOP_TIMEOUT_S)
            assert isinstance(error, (AssertionError, requests.RequestException)), server.log.read_text()[-4000:]
    server.process.wait(STOP_TIMEOUT_S)
    _, alive = psutil.wait_procs(others, timeout=STOP_TIMEOUT_S)
    assert alive == [], server.log.read_text()[-4000:]
    assert "died unexpectedly" in server.log.read_text(), server.log.read_text()[-4000:]


@pytest.mark.long
def test_two_servers_behind_an_external_load_balancer(
    serve: Callable[..., Server], single_engine: Callable[[str, str], list[Generated]]
) -> None:
    """One server per data-parallel rank, each with an address of its own (vLLM's --data-parallel-rank)."""
    expected = [result.tokens for result in single_engine("qwen3_moe", "float32")]
    uneven, port = make_requests(0), str(free_port())
    address = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port)
    servers = [serve("--data-parallel-rank", str(rank), *address) for rank in range(2)]
    for server in servers:
        server.wait_until_ready()
    with ThreadPoolExecutor(len(uneven)) as pool:
        answers = list(pool.map(lambda i: servers[i % 2].complete(uneven[i]), range(len(uneven))))
    assert answers == expected[: len(uneven)]
    assert servers[1].complete(uneven[2]) == expected[2]
    # Together: a rank that waits for a peer which is gone could not finish.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda server: server.stop(alone=False), servers))
