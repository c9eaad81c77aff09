"""``python -m vllm_ascend_moe.softnpu build | info | run -- COMMAND``."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from vllm_ascend_moe.softnpu.build import build
from vllm_ascend_moe.softnpu.errors import SoftNPUError
from vllm_ascend_moe.softnpu.info import report
from vllm_ascend_moe.softnpu.settings import environment, folders


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vllm_ascend_moe.softnpu", description="torch_npu on a CPU")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the libraries (and install torch-npu beside them)")
    commands.add_parser("info", help="print what is emulated")
    run = commands.add_parser("run", help="run a command on the soft NPU")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")
    return parser


def _run(arguments: list[str]) -> None:
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command:
        raise SoftNPUError("run needs a command: python -m vllm_ascend_moe.softnpu run -- python script.py")
    where = folders()
    for needed in (where.lib / "libsoftnpu_dispatch.so", where.torch_npu):
        if not needed.exists():
            raise SoftNPUError(f"{needed} is missing: run `python -m vllm_ascend_moe.softnpu build`")
    try:
        os.execvpe(command[0], command, environment(where))
    except OSError as error:
        raise SoftNPUError(f"{command[0]} cannot be run: {error}") from error


def main() -> int:
    options = _parser().parse_args()
    try:
        if options.command == "build":
            build(folders())
        elif options.command == "info":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `info | head` ends quietly
            print(report(folders()))
        else:
            _run(options.arguments)
    except SoftNPUError as error:
        print(f"softnpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
