"""Every kernel that the package launches is in the Ascend check and in the CUDA check. Nothing is compiled here."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

import vllm_ascend_moe.kernels
from vllm_ascend_moe.tools.ascend_check.specs import all_specs, numeric_specs
from vllm_ascend_moe.tools.cuda_check.cases import cases

_FOLDER = Path(vllm_ascend_moe.kernels.__file__).parent


def _nodes() -> Iterator[ast.AST]:
    for path in sorted(_FOLDER.glob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


def launched_kernels() -> set[str]:
    """Functions under ``triton.jit`` that are called as ``name[grid](...)`` or through ``launch(name, ...)``."""
    compiled, launched = set(), set()
    for node in _nodes():
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            compiled.add(node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            launched.add(ast.unparse(node.func.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
            launched.add(ast.unparse(node.args[0]))
    return compiled & launched


def test_the_kernels_are_those_named_so():
    """What is launched is found in the text; this is the other way to find it, so that neither can miss one alone."""
    named = {node.name for node in _nodes() if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}
    assert launched_kernels() == named
    assert len(named) >= 11


def test_every_kernel_is_in_the_ascend_check():
    checked = {spec.kernel.fn.__name__ for spec in all_specs() if not spec.overflows}
    assert checked == launched_kernels()


def test_specs_have_names_of_their_own():
    """Files and rows of the report go by them."""
    for specs in (all_specs(), numeric_specs()):
        names = [spec.name for spec in specs]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("spec", all_specs(), ids=lambda spec: spec.name)
def test_constants_are_those_of_the_kernel(spec):
    """One of another name, or none, would be found late and far away."""
    assert set(spec.constants) <= set(spec.kernel.arg_names)
    constexprs = {p for p, kind in spec.kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    assert constexprs <= set(spec.constants)


def test_every_kernel_is_in_the_cuda_check(monkeypatch):
    """The cases launch what they name; that it would be compiled for a GPU, on a GPU's tiles, is said here, not so."""
    launched: set[str] = set()

    def record(kernel: InterpretedFunction, grid: Any) -> Any:
        launched.add(kernel.fn.__name__)
        return lambda *arguments, **options: None

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm_ascend_moe.kernels.") and not name.endswith(".targets"):
            for function, value in {"target_of": "hopper", "processors": 132}.items():
                if hasattr(module, function):
                    monkeypatch.setattr(module, function, lambda device, value=value: value)
    for case in cases().values():
        if not case.refused:
            case.call()
    assert launched == launched_kernels()
