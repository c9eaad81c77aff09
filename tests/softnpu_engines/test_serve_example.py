"""examples/serve_atlas_a2.sh as it is, on the soft NPU with a tiny DeepSeek-V3: starts, answers over HTTP, stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from tests.softnpu_engines.engine import REPOSITORY, npu_environment
from vllm_ascend_moe.testing.launch import free_port

pytestmark = pytest.mark.timeout(2400)

_START_S = 1800
# What a tiny model on two cores needs otherwise than the script says.
_FLAGS = (
    *(
        "--tensor-parallel-size",
        "2",
        "--max-model-len",
        "512",
        "--max-num-batched-tokens",
        "512",
        "--max-num-seqs",
        "8",
    ),
    *("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", str(2**28), "--enforce-eager"),
)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(2)
    raise AssertionError(f"not ready in {_START_S} s:\n{log.read_text()[-4000:]}")


def complete(url: str, model: str, prompt: list[int]) -> int:
    """Number of tokens of one answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def test_the_a2_example_serves(model_path: Callable[[str], str], tmp_path: Path) -> None:
    model, port, log = model_path("deepseek_v3"), free_port(), tmp_path / "serve.log"
    env = {
        **os.environ,
        **npu_environment(ours=True, sequence_parallel=True),
        "QUANTIZATION": "",
        "HF_HUB_OFFLINE": "1",
    }
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    command = ["bash", str(REPOSITORY / "examples" / "serve_atlas_a2.sh"), model, *_FLAGS, "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        prompts = [list(range(1, 1 + length)) for length in (1, 40, 3, 90)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(lambda prompt: complete(url, model, prompt), prompts)) == [4] * len(prompts)
        # One alone: the other engine is idle and must take part all the same.
        assert complete(url, model, [7, 8, 9]) == 4
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "replaced in vllm-ascend 0.23.0.post1" in log.read_text()
