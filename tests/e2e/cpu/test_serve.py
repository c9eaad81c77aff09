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
    """One ``vllm serve`` in a process group of its own."""

    def __init__(self, model: str, log: Path) -> None:
        self.log, self.port, self.model = log, free_port(), model
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-model-len", "512"),
            *("--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(2**28), "--max-num-seqs", "16"),
            # Without it vLLM kills its engines at once, and its own front end reports them as dead.
            *("--shutdown-timeout", "30"),
            *("--additional-config", '{"ascend_moe": {"comm": "padded_allgather"}}'),
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

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def server(model_path: Callable[[str, str], str], tmp_path: Path) -> Iterator[Server]:
    started = Server(model_path("qwen3_moe", "float32"), tmp_path / "serve.log")
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.kill()


def test_serves_concurrent_uneven_requests_then_one_then_stops(
    server: Server, single_engine: Callable[[str, str], list[Generated]]
) -> None:
    expected = [result.tokens for result in single_engine("qwen3_moe", "float32")]
    uneven = make_requests(0)
    with ThreadPoolExecutor(len(uneven)) as pool:
        assert list(pool.map(server.complete, uneven)) == expected
    # One short request alone: the other rank is idle and must take part all the same.
    assert server.complete(uneven[2]) == expected[2]

    workers = psutil.Process(server.process.pid).children(recursive=True)
    assert len(workers) >= 2
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(_STOP_TIMEOUT_S)
    _, alive = psutil.wait_procs(workers, timeout=_STOP_TIMEOUT_S)
    assert alive == [], f"left behind: {[p.cmdline() for p in alive if p.is_running()]}"
    log = server.log.read_text()
    assert code == 0, log[-4000:]
    assert "Traceback" not in log, log[log.find("Traceback") :][:4000]
