"""``vllm serve`` as a process, for the serving tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import requests

from vllm_ascend_moe.integration.generate import Request
from vllm_ascend_moe.testing.launch import free_port

START_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60


class Server:
    """One ``vllm serve`` in a process group of its own, as part of two data-parallel engines.

    Args:
        model: folder.
        log: file for its output.
        more: further arguments: none makes this server start both engines.
        comm: strategy.
        env: further variables.
    """

    def __init__(self, model: str, log: Path, *more: str, comm: str = "padded_allgather", **env: str) -> None:
        self.log, self.port, self.model = log, free_port(), model
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-model-len", "512"),
            *("--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager"),
            # So small that one burst writes all of it: pages that are touched later would look like a leak.
            *("--kv-cache-memory-bytes", str(2**23), "--max-num-seqs", "16"),
            # Without it vLLM kills its engines at once, and its own front end reports them as dead.
            *("--shutdown-timeout", "30"),
            *("--additional-config", json.dumps({"ascend_moe": {"comm": comm}})),
            *more,
        ]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **env}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            try:
                if requests.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise AssertionError(f"not ready in {START_TIMEOUT_S} s:\n{self.log.read_text()[-6000:]}")

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

    def workers(self) -> list[psutil.Process]:
        """The processes that hold the model, by rank."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sorted((p for p in children if "Worker" in p.cmdline()[0]), key=lambda p: p.cmdline())

    def worker_bytes(self) -> list[int]:
        """Memory of each worker that no other process shares."""
        return [worker.memory_full_info().uss for worker in self.workers()]

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
        code = self.process.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(workers, timeout=STOP_TIMEOUT_S)
        assert alive == [], f"left behind: {[p.cmdline() for p in alive if p.is_running()]}"
        log = self.log.read_text()
        assert code == 0, log[-4000:]
        reports = [x for x in log.splitlines() if "Traceback" in x and not x.lower().startswith("(apiserver")]
        assert not alone or reports == [], log[log.find(reports[0]) :][:4000]

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
