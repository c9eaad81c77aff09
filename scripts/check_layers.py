"""Checks the import layers that the docstring of vllm_ascend_moe/__init__.py states. Standard library only.

    python scripts/check_layers.py [FOLDER OF THE PACKAGE]

Prints ``file:line: rule`` for each import that breaks a rule, and exits with 1 if there is one. Every import counts,
also inside functions and under TYPE_CHECKING, and ``import_module("...")`` of a literal name. Two exceptions: the
package's own ``__init__.py`` imports inside its entry points only; the command line in ``__main__.py`` is a tool.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "vllm_ascend_moe"
BELOW_OPS = {"errors", "envs", "config", "layout", "placement"}

# Which layers each layer may import, besides itself.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "envs": {"errors"},
    "config": {"errors", "envs"},
    "layout": {"errors", "envs"},
    "placement": {"errors"},
    "ops": BELOW_OPS,
    "kernels": BELOW_OPS | {"ops"},
    "comm": BELOW_OPS | {"ops", "kernels"},
    "experts": BELOW_OPS | {"ops", "kernels"},
    "softnpu": set(),  # stands alone
    "vllm_alias": set(),
    "platform": {
        "errors",
        "envs",
        "vllm_alias",
    },  # runs while vLLM detects its platform, so it names integration in text only
    "integration": BELOW_OPS | {"ops", "kernels", "comm", "experts", "platform"},
    "testing": BELOW_OPS | {"ops", "kernels", "comm", "experts", "softnpu"},
    "tools": BELOW_OPS | {"ops", "kernels", "comm", "experts", "integration", "platform", "softnpu", "testing"},
    "__init__": {"platform", "integration"},
}
LAYERS["__main__"] = LAYERS["tools"] | {"tools"}

# Which files may import a package from outside the standard library: layers, or single files.
OUTSIDE: dict[str, set[str]] = {
    "torch": set(LAYERS) - {"errors", "envs", "__init__", "__main__"},
    "vllm": {"integration", "platform", "ops/register_custom_ops.py"},
    "vllm_ascend": {"integration", "platform"},
    "torch_npu": {"integration", "softnpu", "ops/npu.py"},
    "triton": {
        "kernels",
        "experts/batched_triton.py",
        "experts/triton_tune.py",
        "tools/ascend_check/gemm_specs.py",
        "tools/ascend_check/lower.py",
        "tools/ascend_check/sent_row_specs.py",
        "tools/ascend_check/specs.py",
        "tools/cuda_check/__main__.py",
        "tools/cuda_check/compile_only.py",
        "tools/cuda_check/resources.py",
    },
    "ascendnpuir": {"tools/ascend_check/lower.py"},
    "pydantic": {"config"},
    "packaging": {"platform"},
    "transformers": {"testing"},
    "tokenizers": {"testing"},
    "safetensors": {"testing"},
    "numpy": {"integration", "testing", "softnpu"},
}


@dataclass(frozen=True, order=True)
class Fault:
    """One import that breaks a rule."""

    file: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}"


def layer_of(inside: str) -> str:
    """The layer of a file or module, by its path inside the package: ``ops/native.py`` -> ``ops``."""
    return inside.split("/")[0].removesuffix(".py")


def imported(tree: ast.AST, inside: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; names taken from our own package are followed one level down."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                folder = [PACKAGE, *inside.split("/")[:-1]]
                module = ".".join([*folder[: len(folder) - node.level + 1], *filter(None, [module])])
            if module == PACKAGE:
                for alias in node.names:
                    yield node.lineno, f"{PACKAGE}.{alias.name}"
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def check_import(inside: str, name: str) -> str | None:
    """The rule that importing ``name`` in the file ``inside`` the package breaks, or None."""
    layer, parts = layer_of(inside), name.split(".")
    if parts[0] != PACKAGE:
        if parts[0] in sys.stdlib_module_names:
            return None
        allowed = OUTSIDE.get(parts[0])
        if allowed is None:
            return f"{parts[0]} is no declared dependency; see OUTSIDE in scripts/check_layers.py"
        if layer in allowed or inside in allowed:
            return None
        return f"{parts[0]} may be imported only in {', '.join(sorted(allowed))}"
    target = parts[1] if len(parts) > 1 else "__init__"
    # A name of the package that is no layer (its version, the native extension) is free.
    if target == layer or (target != "__init__" and target not in LAYERS) or target in LAYERS[layer]:
        return None
    return f"{layer} may import only {', '.join(sorted(LAYERS[layer])) or 'nothing'} of this package, not {target}"


def check_package(root: Path) -> list[Fault]:
    """Every fault in the package in folder ``root``."""
    faults: list[Fault] = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        if layer_of(inside) not in LAYERS:
            faults.append(Fault(str(path), 1, f"{layer_of(inside)} is in no import layer; see scripts/check_layers.py"))
            continue
        for line, name in imported(tree, inside):
            rule = check_import(inside, name)
            if rule:
                faults.append(Fault(str(path), line, rule))
        if inside == "__init__.py":
            for node in tree.body:
                ours = isinstance(node, ast.ImportFrom) and node.module == "__future__"
                if isinstance(node, (ast.Import, ast.ImportFrom)) and not ours:
                    faults.append(Fault(str(path), node.lineno, "importing the package must import nothing"))
    return sorted(faults)


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / PACKAGE
    if not (root / "__init__.py").is_file():
        print(f"{root} is not a package", file=sys.stderr)
        return 2
    faults = check_package(root)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
