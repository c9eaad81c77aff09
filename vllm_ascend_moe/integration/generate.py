"""Greedy generation through a real vLLM engine in a process of its own; what the demo and the engine tests share.

A process per engine, since vLLM chooses plugins and platform once per process: one runs stock vLLM, the next ours.
Run as ``python -m vllm_ascend_moe.integration.generate SPEC RESULT`` with two paths of JSON files.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_ascend_moe.errors import AscendMoEError
from vllm_ascend_moe.integration import ask_for_amx

# Two engines, four workers and this process share the memory of one machine.
_KV_CACHE_BYTES = 256 * 2**20


class EngineFailedError(AscendMoEError, RuntimeError):
    """The engine's process failed or took too long; the message holds the end of its output."""


@dataclass(frozen=True)
class Request:
    """One prompt, and the DP rank that serves it (None: vLLM's load balancer decides)."""

    prompt: list[int]
    max_tokens: int = 12
    dp_rank: int | None = None


@dataclass(frozen=True)
class EngineSpec:
    """What to run. ``stock`` switches this plugin off, so that the result is vLLM's own."""

    model: str
    requests: list[Request]
    stock: bool = False
    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    enforce_eager: bool = True
    dtype: str = "float32"
    additional_config: dict[str, Any] = field(default_factory=dict)
    engine_args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    # Waves of request indices: a wave starts when the one before it is done. None: all at once.
    waves: list[list[int]] | None = None


@dataclass(frozen=True)
class Generated:
    """Tokens of one request, and at each step the logprob distance of the best token to the second."""

    tokens: list[int]
    margins: list[float]


def generate(spec: EngineSpec, *, timeout_s: float = 240.0) -> list[Generated]:
    """Runs one engine in a new process group and returns the outputs in request order.

    Raises:
        EngineFailedError: the process failed, or did not end in time (then everything it started is killed).
    """
    with tempfile.TemporaryDirectory() as folder:
        spec_path, result_path, log_path = (Path(folder) / name for name in ("spec.json", "result.json", "log.txt"))
        spec_path.write_text(json.dumps(asdict(spec)))
        command = [sys.executable, "-m", "vllm_ascend_moe.integration.generate", str(spec_path), str(result_path)]
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, env=_environment(spec), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process.pid)
        if code != 0 or not result_path.exists():
            what = f"did not end in {timeout_s:.0f} s" if code is None else f"ended with code {code}"
            raise EngineFailedError(f"{spec} {what}:\n{_causes(log_path)}")
        return [Generated(**item) for item in json.loads(result_path.read_text())]


# A line that names an exception, behind whatever a worker's log puts before it.
_EXCEPTION_LINE = re.compile(r"^(?:\(.*?\) .*?\] )?[\w.]*(?:Error|Exception|Unsupported)\b.*$", re.MULTILINE)


def _causes(path: Path, chars: int = 6000) -> str:
    """The part of the output that says why: the end of the first traceback. Workers report first; the processes above
    them repeat it less well."""
    text = path.read_text(errors="replace")
    first = text.find("Traceback (most recent call last)")
    if first < 0:
        return text[-chars:]
    named = _EXCEPTION_LINE.search(text, first)
    end = min(named.end() + 1500, len(text)) if named else len(text)
    return text[max(first, end - chars) : end]


def _kill_group(pid: int) -> None:
    # Workers that outlive a crashed engine would hold memory and ports.
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _environment(spec: EngineSpec) -> dict[str, str]:
    env = {
        **os.environ,
        "ASCEND_MOE_ENABLE": "0" if spec.stock else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    }
    return {**env, **spec.env}


async def _run(spec: EngineSpec) -> list[Generated]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        **{
            "model": spec.model,
            "dtype": spec.dtype,
            "tensor_parallel_size": spec.tp,
            "data_parallel_size": spec.dp,
            "enable_expert_parallel": spec.expert_parallel,
            "enforce_eager": spec.enforce_eager,
            "additional_config": spec.additional_config,
            "kv_cache_memory_bytes": _KV_CACHE_BYTES,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            **_mla_backend(spec),
            **spec.engine_args,
        }
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        results: dict[int, Generated] = {}
        for wave in spec.waves or [list(range(len(spec.requests)))]:
            done = await asyncio.gather(*(_one(engine, i, spec.requests[i], spec.dp) for i in wave))
            results.update(zip(wave, done, strict=True))
        return [results[i] for i in range(len(spec.requests))]
    finally:
        engine.shutdown()


def _mla_backend(spec: EngineSpec) -> dict[str, str]:
    """What a stock engine must be told, and our platform knows: vLLM's AMX kernels for MLA are for bfloat16 alone."""
    config = Path(spec.model) / "config.json"
    if not spec.stock or spec.dtype == "bfloat16" or not config.exists():
        return {}
    return {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in json.loads(config.read_text()) else {}


async def _one(engine: Any, index: int, request: Request, dp: int) -> Generated:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, logprobs=2)
    rank = request.dp_rank if dp > 1 else None
    final = None
    async for output in engine.generate(
        {"prompt_token_ids": request.prompt}, params, request_id=f"request-{index}", data_parallel_rank=rank
    ):
        final = output
    assert final is not None
    completion = final.outputs[0]
    return Generated(list(completion.token_ids), [_margin(step) for step in completion.logprobs])


def _margin(step: dict[int, Any]) -> float:
    best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return best - second


def main() -> None:
    """Reads the specification, runs the engine, writes the result."""
    ask_for_amx()
    spec_path, result_path = sys.argv[1:3]
    raw = json.loads(Path(spec_path).read_text())
    spec = EngineSpec(**{**raw, "requests": [Request(**item) for item in raw["requests"]]})
    Path(result_path).write_text(json.dumps([asdict(item) for item in asyncio.run(_run(spec))]))


# Spawned processes of a stock engine import this module under this name; nothing else asks for them.
if __name__ == "__mp_main__":
    ask_for_amx()
if __name__ == "__main__":
    main()
