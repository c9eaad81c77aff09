"""The linalg form of a kernel, compiled for this CPU with LLVM 19 and called through ctypes.

Needs Debian's mlir-19-tools and llvm-19, and gcc. bf16 is real bf16: conversions round to nearest, ties to even.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_ascend_moe.errors import MissingDependencyError

TOOLS = ("mlir-opt-19", "mlir-translate-19", "opt-19", "llc-19", "gcc")
_BUFFERIZE = (
    "--allow-unregistered-dialect",
    "--inline",
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=allow-return-allocs-from-loops",
)
_LOWER = (
    "--allow-unregistered-dialect",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--expand-strided-metadata",
    "--arith-expand=include-bf16=true",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
_HEAD = re.compile(r"(func\.func @\w+\()(.*?)\) attributes \{.*?\} \{\n")
_COPY = re.compile(r"memref\.copy (%\S+), (%\S+) : (memref<.*>) to (memref<.*>)")
_CUMSUM = re.compile(r"func\.func private (@triton_cumsum_\d+)\((tensor<(\d+)x(?:(\d+)x)?i32>), i32, i1\) -> \2\n")


def missing_tools() -> list[str]:
    """Which of TOOLS are not installed."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def portable(linalg: str) -> str:
    """The module without what only Ascend's tools know: attributes, and the running sum that they provide."""
    head = _HEAD.search(linalg)
    assert head is not None, "no kernel in the module"
    arguments = re.sub(r"\{[^}]*\}", "", head.group(2))
    text = linalg.replace(head.group(0), f"{head.group(1)}{arguments}) {{\n")
    text = re.sub(r"\{hivm\.[^}]*\}", "", text)
    return _CUMSUM.sub(lambda found: _running_sum(*found.groups()), text)


def _running_sum(name: str, tensor: str, rows: str, columns: str | None) -> str:
    """A running sum along either dimension."""
    index, before = ("%i, %j", "%above, %left") if columns else ("%i", "%above")
    return f"""func.func private {name}(%x: {tensor}, %axis: i32, %reverse: i1) -> {tensor} {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %rows = arith.constant {rows} : index
    %columns = arith.constant {columns or "1"} : index
    %across = arith.index_cast %axis : i32 to index
    %down = arith.subi %c1, %across : index
    %sum = scf.for %i = %down to %rows step %c1 iter_args(%t = %x) -> ({tensor}) {{
      %above = arith.subi %i, %down : index
      %row = scf.for %j = %across to %columns step %c1 iter_args(%u = %t) -> ({tensor}) {{
        %left = arith.subi %j, %across : index
        %a = tensor.extract %u[{before}] : {tensor}
        %b = tensor.extract %u[{index}] : {tensor}
        %c = arith.addi %a, %b : i32
        %v = tensor.insert %c into %u[{index}] : {tensor}
        scf.yield %v : {tensor}
      }}
      scf.yield %row : {tensor}
    }}
    return %sum : {tensor}
  }}
"""


class NativeKernel:
    """A compiled kernel.

    Args:
        linalg: the module's text. folder: where to leave what the compilation makes. name: for its files.

    Raises:
        MissingDependencyError: LLVM 19 or gcc is not installed. RuntimeError: a tool refused the module.
    """

    def __init__(self, linalg: str, folder: Path, name: str) -> None:
        missing = missing_tools()
        if missing:
            raise MissingDependencyError(
                f"{', '.join(missing)} not found. On Debian: apt-get install mlir-19-tools llvm-19 gcc"
            )
        suffixes = ("mlir", "buffers.mlir", "llvm.mlir", "ll", "opt.ll", "o", "so")
        path = {suffix: str(folder / f"{name}.{suffix}") for suffix in suffixes}
        Path(path["mlir"]).write_text(portable(linalg))
        _run("mlir-opt-19", path["mlir"], *_BUFFERIZE, "-o", path["buffers.mlir"])
        # A copy of strided buffers would call MLIR's runtime library; as a linalg operation it becomes a loop.
        buffers = Path(path["buffers.mlir"])
        buffers.write_text(_COPY.sub(r"linalg.copy ins(\1 : \3) outs(\2 : \4)", buffers.read_text()))
        _run("mlir-opt-19", path["buffers.mlir"], *_LOWER, "-o", path["llvm.mlir"])
        _run("mlir-translate-19", "--mlir-to-llvmir", path["llvm.mlir"], "-o", path["ll"])
        _run("opt-19", "-O2", path["ll"], "-S", "-o", path["opt.ll"])
        _run("llc-19", "-O2", "-relocation-model=pic", "-filetype=obj", path["opt.ll"], "-o", path["o"])
        _run("gcc", "-shared", "-o", path["so"], path["o"], "-lm")
        found = re.search(r"func\.func @(\w+)\(", linalg)
        assert found is not None
        self._function = getattr(ctypes.CDLL(path["so"]), found.group(1))
        self._function.restype = None

    def __call__(self, arguments: Sequence[torch.Tensor | int | float], programs: int) -> None:
        """Runs all programs of a grid, one after another.

        Args:
            arguments: the kernel's arguments that are not constants, in order; tensors are contiguous.
        """
        unused = torch.zeros(1, dtype=torch.int8)  # block lock and workspace, which the linalg form does not touch
        head: list[object] = [word for tensor in (unused, unused) for word in _memref(tensor)]
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                head += _memref(argument)
            else:
                head.append(ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int32(argument))
        for program in range(programs):
            self._function(*head, *map(ctypes.c_int32, (programs, 1, 1, program, 0, 0)))


def _memref(tensor: torch.Tensor) -> list[object]:
    """The five words of a one-dimensional memref: allocated and aligned pointer, offset, size, stride."""
    pointer = ctypes.c_void_p(tensor.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(tensor.numel()), ctypes.c_int64(1)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[:2000]}")
