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
    from vllm_ascend_moe.tools.trace import most_uneven, read_trace, sum_by_layer

    steps = read_trace(args.folder)
    uneven = most_uneven(steps)
    if uneven is not None:
        print(f"most uneven step, layer {uneven.layer}, group {uneven.group}:\n{uneven.layout()}\n")
    print(f"{'layer':40} {'rank':>4} {'steps':>6} {'gathers':>8} {'reduces':>8} {'others':>7} {'bytes':>12}")
    for row in sum_by_layer(steps):
        print(
            f"{row.layer:40} {row.rank!s:>4} {row.steps:6} {row.gathers:8} {row.reduces:8} {row.others:7} "
            f"{row.bytes:12}"
        )
    return 0


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
