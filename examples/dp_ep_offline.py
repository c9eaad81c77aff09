"""Two vLLM engines share the experts of one MoE model on this CPU, and must generate what one engine generates.

Builds a tiny model with random weights, runs stock vLLM on it, then vLLM with data parallelism and expert parallelism
through this plugin, and compares every token. Ends with code 0 only where all prompts agree.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from vllm_ascend_moe.comm.cost_model import STRATEGIES
from vllm_ascend_moe.integration.generate import EngineSpec, Generated, Request, generate
from vllm_ascend_moe.testing.tiny_models import MODELS, make_tiny_model
from vllm_ascend_moe.tools.trace import LayerStep, most_uneven, read_trace, sum_by_layer

PROMPT_LENGTHS = (5, 33, 1, 17, 64, 3)


def make_requests(dp: int, seed: int) -> list[Request]:
    """Random prompts of very different lengths, dealt to the DP ranks in turn."""
    rng = random.Random(seed)
    return [
        Request([rng.randrange(256) for _ in range(length)], dp_rank=index % dp)
        for index, length in enumerate(PROMPT_LENGTHS)
    ]


def show_tokens(requests: list[Request], single: list[Generated], shared: list[Generated]) -> int:
    """Prints the tokens side by side; returns how many prompts agree."""
    print(f"\n{'prompt':>6} {'rank':>4} {'length':>6}  tokens")
    same = 0
    for index, (request, one, two) in enumerate(zip(requests, single, shared, strict=True)):
        agree = one.tokens == two.tokens
        same += agree
        head = f"{index:6} {request.dp_rank!s:>4} {len(request.prompt):6}  "
        print(f"{head}one engine   {' '.join(f'{token:3}' for token in one.tokens)}")
        verdict = "=" if agree else "DIFFERENT"
        print(f"{' ' * len(head)}DP + EP      {' '.join(f'{token:3}' for token in two.tokens)}  {verdict}")
    return same


def show_trace(steps: list[LayerStep]) -> None:
    """Prints one step's layout, and what each layer sent."""
    step = most_uneven(steps)
    if step is not None:
        print(f"\nThe most uneven step, as rank {step.rank} saw it in {step.layer}:\n{step.layout()}")
    print("\nPer layer and rank, over all steps (counted where PyTorch dispatches collectives):")
    columns = f"{'gathers':>8} {'reduce-scatters':>16} {'all-to-alls':>12} {'KiB':>9}"
    print(f"{'layer':34} {'rank':>4} {'steps':>6} {columns}   each per step")
    for row in sum_by_layer(steps):
        print(
            f"{row.layer:34} {row.rank!s:>4} {row.steps:6} {row.gathers / row.steps:8.2f} "
            f"{row.reduces / row.steps:16.2f} {row.exchanges / row.steps:12.2f} {row.bytes / row.steps / 1024:9.1f}"
        )


def run(args: argparse.Namespace, folder: Path) -> bool:
    """The three steps; returns whether all prompts agree."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    say(f"1/3 building a tiny random {args.model}")
    model = str(make_tiny_model(args.model, folder / args.model))
    requests = make_requests(args.dp, args.seed)
    say("2/3 one engine, stock vLLM (starting an engine takes about half a minute)")
    single = generate(EngineSpec(model, requests, stock=True))
    say(f"3/3 {args.dp} engines x {args.tp} workers that share the experts, vLLM with this plugin")
    trace = folder / "trace"
    spec = EngineSpec(
        model,
        requests,
        tp=args.tp,
        dp=args.dp,
        expert_parallel=True,
        env={"ASCEND_MOE_TRACE": str(trace)},
        # Every tensor through its own operator call, to show them all. By default small messages travel packed.
        additional_config={"ascend_moe": {"comm": args.comm, "packed_bytes": args.packed_bytes}},
    )
    shared = generate(spec)
    say("done")
    same = show_tokens(requests, single, shared)
    show_trace(read_trace(trace))
    margin = min(margin for result in single for margin in result.margins)
    print(f"\nSmallest margin between the best and the second token: {margin:.4f} (logprob)")
    print(f"{'OK' if same == len(requests) else 'FAILED'}: {same} of {len(requests)} prompts identical")
    return same == len(requests)


def main() -> int:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_moe")
    parser.add_argument("--dp", type=int, default=2, help="data-parallel engines")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel workers per engine")
    parser.add_argument("--comm", choices=("auto", *STRATEGIES), default=STRATEGIES[0], help="how tokens travel")
    parser.add_argument("--packed-bytes", type=int, default=0, help="pack messages up to this size into one gather")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run(args, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
