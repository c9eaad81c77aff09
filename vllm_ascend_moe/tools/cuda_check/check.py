"""One case compiled and judged. Results are plain values, so that processes can hand them over."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_moe.tools.cuda_check.cases import cases
from vllm_ascend_moe.tools.cuda_check.compile_only import compile_only
from vllm_ascend_moe.tools.cuda_check.resources import PROCESSORS, Kernel, limits_passed, resources_of


@dataclass
class Checked:
    """A case and what is wrong with it.

    Args:
        faults: what to fix, in words; empty where the case is as it must be.
        refused: what was found where the case has to be refused.
    """

    name: str
    capability: int
    programs: int
    kernels: list[Kernel] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    refused: str = ""


def check(name: str) -> Checked:
    """Compiles a case of cases() and judges it."""
    case = cases()[name]
    result = Checked(name, case.capability, case.programs)
    with compile_only(case.capability) as compiled:
        case.call()
    processor = PROCESSORS[case.capability]
    result.kernels = [Kernel(kernel.metadata.name, resources_of(kernel)) for kernel in compiled]
    found = limits_passed(result.kernels, case.programs, processor)
    text = compiled[0].asm["ptx"] if compiled else ""
    if missing := [word for word in case.uses if word not in text]:
        found["instructions"] = f"no {', no '.join(missing)} in the PTX"
    if case.refused:
        result.refused = "; ".join(found.values())
        if case.refused not in found:
            result.faults.append(f"must be refused for {case.refused}; found: {result.refused or 'nothing'}")
    else:
        result.faults = list(found.values())
    return result
