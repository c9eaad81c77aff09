"""``vllm serve`` over HTTP with two engines that share experts: uneven load, then an idle rank, then a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from tests.e2e.cpu.conftest import make_requests
from vllm_ascend_moe.integration.generate import Generated, Request
from vllm_ascend_moe.testing.launch import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
_START_TIMEOUT_S = 240
_STOP_TIMEOUT_S = 60


class Server:
    """One ``vllm serve`` in a process group of its own, as part of two data-parallel engines.

    Args:
        model: folder.
        log: file for its output.
        more: further arguments: none makes this server start both engines.
    """

    def __init__(self, model: str, log: Path, *more: str) -> None:
        self.log, self.port, self.model = log, free_port(), model
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-model-len", "512"),
            *("--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(2**28), "--max-num-seqs", "16"),
            # Without it vLLM kills its engines at once, and its own front end reports them as dead.
            *("--shutdown-timeout", "30"),
            *("--additional-config", '{"ascend_moe": {"comm": "padded_allgather"}}'),
            *more,
        ]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            try:
                if requests.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise AssertionError(f"not ready in {_START_TIMEOUT_S} s:\n{self.log.read_text()[-6000:]}")

    def complete(self, request: Request) -> list[int]:
        """Greedy token ids for one prompt."""
        answer = requests.post(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json={
                "model": self.model,
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def stop(self, *, alone: bool) -> None:
        """Ends it as an operator would; it must end well and leave nothing behind.

        Nothing may have been reported before. After, engines and workers must report nothing where the server is
        ``alone``: with a peer, vLLM's engines report the one that is gone first. Its front ends may report an engine
        that ended before they did."""
        running = self.log.read_text()
        assert "Traceback" not in running, running[running.find("Traceback") :][:4000]
        workers = psutil.Process(self.process.pid).children(recursive=True)
        assert workers
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(_STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(workers, timeout=_STOP_TIMEOUT_S)
        assert alive == [], f"left behind: {[p.cmdline() for p in alive if p.is_running()]}"
        log = self.log.read_text()
        assert code == 0, log[-4000:]
        reports = [x for x in log.splitlines() if "Traceback" in x and not x.lower().startswith("(apiserver")]
        assert not alone or reports == [], log[log.find(reports[0]) :][:4000]

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def serve(model_path: Callable[[str, str], str], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """serve(*more) -> a server that starts; all are killed at the end, also after a failure."""
    servers: list[Server] = []

    def start(*more: str) -> Server:
        servers.append(Server(model_path("qwen3_moe", "float32"), tmp_path / f"serve-{len(servers)}.log", *more))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def test_serves_concurrent_uneven_requests_then_one_then_stops(
    serve: Callable[..., Server], single_engine: Callable[[str, str], list[Generated]]
) -> None:
    expected = [result.tokens for result in single_engine("qwen3_moe", "float32")]
    uneven = make_requests(0)
    server = serve()
    server.wait_until_ready()
    with ThreadPoolExecutor(len(uneven)) as pool:
        assert list(pool.map(server.complete, uneven)) == expected
    # One short request alone: the other rank is idle and must take part all the same.
    assert server.complete(uneven[2]) == expected[2]
    server.stop(alone=True)


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
    assert answers == expected
    assert servers[1].complete(uneven[2]) == expected[2]
    # Together: a rank that waits for a peer which is gone could not finish.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda server: server.stop(alone=False), servers))
