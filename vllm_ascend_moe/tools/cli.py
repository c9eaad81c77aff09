"""The command ``vllm-ascend-moe`` (also ``python -m vllm_ascend_moe``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_moe import __version__
from vllm_ascend_moe.errors import AscendMoEError


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token counts like 5,2,0") from None


def _doctor(args: argparse.Namespace) -> int:
    from vllm_ascend_moe.tools.doctor import report

    rows, healthy = report()
    for name, answer in rows:
        print(f"{name:12} {answer}")
    return 0 if healthy else 1


def _layout(args: argparse.Namespace) -> int:
    from vllm_ascend_moe.layout import TokenLayout

    layout = TokenLayout.from_dp(args.tokens, dp_rank=0, tp_size=args.tp, pcp_size=args.pcp)
    print(layout)
    if args.svg:
        from vllm_ascend_moe.tools.picture import layout_svg

        args.svg.write_text(layout_svg(layout))
        print(f"picture: {args.svg}")
    return 0


def _trace(args: argparse.Namespace) -> int:
    from vllm_ascend_moe.tools.trace import read_trace, render

    print(render(read_trace(args.folder)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from vllm_ascend_moe.comm.base import ActivationFormat
    from vllm_ascend_moe.comm.cost_model import MoEShape
    from vllm_ascend_moe.comm.links import find_link
    from vllm_ascend_moe.comm.select import Situation
    from vllm_ascend_moe.tools.plan import local_sizes, make_plan, render

    shape = MoEShape(
        hidden_size=args.hidden,
        num_experts=args.experts,
        top_k=args.top_k,
        element_bytes=args.element_bytes,
        payload=args.quantize,
        splits=args.splits,
    )
    situation = Situation(
        shape=shape,
        link=find_link(args.link),
        comm=args.comm,
        capacity=args.capacity,
        over_capacity=args.over_capacity,
        fixed_shapes=args.fixed_shapes,
        formats=(ActivationFormat.ROWS,) if args.rows_only else tuple(ActivationFormat),
        hccl_buffer_mib=args.hccl_buffer,
    )
    print(render(make_plan(local_sizes(args.tokens, args.ranks), situation)))
    return 0


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="tokens of each rank, like 5 2 0 7")
    parser.add_argument("--ranks", type=int, default=1, help="ranks, where --tokens is one count for all of them")
    parser.add_argument("--experts", type=int, required=True, help="global experts, replicas counted")
    parser.add_argument("--top-k", type=int, required=True, help="experts a token")
    parser.add_argument("--hidden", type=int, required=True, help="hidden size")
    parser.add_argument("--element-bytes", type=int, default=2, help="of a hidden element [2: bf16]")
    parser.add_argument("--link", default="gloo", help="gloo, nvlink, atlas-a2 or atlas-a3 [gloo]")
    parser.add_argument("--capacity", type=int, help="most tokens of a rank, for batched_all_to_all")
    parser.add_argument("--comm", default="auto", help="auto, or the strategy to use [auto]")
    parser.add_argument("--over-capacity", choices=["error", "rows"], default="error")
    parser.add_argument("--quantize", choices=["none", "int8", "fp8"], default="none", help="payload on the way out")
    parser.add_argument("--splits", type=int, default=1, help="TP ranks with the same tokens, which share the experts")
    parser.add_argument("--hccl-buffer", type=int, default=200, help="HCCL_BUFFSIZE in MiB, for mc2 [200]")
    parser.add_argument("--fixed-shapes", action="store_true", help="the forward is captured")
    parser.add_argument("--rows-only", action="store_true", help="there are no batched experts")
    parser.set_defaults(run=_plan)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("vllm-ascend-moe", description="Tools of the vllm-ascend-moe plugin.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed and whether it works, for bug reports")
    doctor.set_defaults(run=_doctor)
    layout = commands.add_parser("layout", help="draw who holds which rows, and which are pad")
    layout.add_argument("tokens", type=_sizes, help="tokens of each DP rank, like 5,2,0")
    layout.add_argument("--tp", type=int, default=1, help="TP ranks that share a DP rank's tokens (sequence parallel)")
    layout.add_argument("--pcp", type=int, default=1, help="PCP ranks per DP rank")
    layout.add_argument("--svg", type=Path, help="also write a picture there")
    layout.set_defaults(run=_layout)
    _add_plan(commands.add_parser("plan", help="which strategy moves the tokens of a forward, and what each costs"))
    trace = commands.add_parser("trace", help="sum up what an engine wrote with ASCEND_MOE_TRACE=FOLDER")
    trace.add_argument("folder", type=Path)
    trace.set_defaults(run=_trace)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors a user can act on are one line, not a traceback."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except AscendMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
