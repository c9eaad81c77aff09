"""The parts of the Ascend check that need no compiler: reading plans, planting faults, writing the report."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from vllm_ascend_moe.tools.ascend_check import __main__ as main
from vllm_ascend_moe.tools.ascend_check import buffers, lower
from vllm_ascend_moe.tools.ascend_check.native import portable
from vllm_ascend_moe.tools.ascend_check.numerics import TRIALS, Compared, wrong_copies
from vllm_ascend_moe.tools.ascend_check.report import render

MODULE = """
    %c32768_i64 = arith.constant 32768 : i64
    %c0_i64 = arith.constant 0 : i64
    %c0_i64_7 = arith.constant 65536 : i64
    %0 = hivm.hir.pointer_cast(%c32768_i64) : memref<4x8x16x16xbf16, #hivm.address_space<cbuf>>
    %1 = hivm.hir.pointer_cast(%c0_i64, %c0_i64_7) : memref<64x128xf32, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%c0_i64) : memref<8x8x16x16xf32, #hivm.address_space<cc>>
    %3 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
"""


def test_planned_bytes_is_the_highest_end_of_each_buffer():
    assert buffers.planned_bytes(MODULE) == {"cbuf": 32768 + 8192 * 2, "ub": 65536 + 64 * 128 * 4, "cc": 65536}
    bits = "%0 = hivm.hir.pointer_cast(%c0) : memref<16x256xi1, #hivm.address_space<ub>>"
    assert buffers.planned_bytes(f"%c0 = arith.constant 0 : i64\n{bits}")["ub"] == 512, "eight truth values are a byte"
    assert buffers.planned_bytes("") == {"ub": 0, "cbuf": 0, "cc": 0}


@pytest.mark.parametrize(
    "line",
    [
        "%1 = hivm.hir.pointer_cast(%c1_i64) : memref<64xf32, #hivm.address_space<ub>>",  # nowhere defined
        "%1 = hivm.hir.pointer_cast(%c0_i64, %arg3) : memref<64xf32, #hivm.address_space<ub>>",
        "%1 = hivm.hir.pointer_cast(%c0_i64) [%n] : memref<?xf32, #hivm.address_space<ub>>",
        "%1 = hivm.hir.pointer_cast(%c0_i64) : memref<?xf32, #hivm.address_space<ub>>",
        "%1 = hivm.hir.pointer_cast(%c0_i64) : memref<64xf8E4M3FN, #hivm.address_space<ub>>",
        "%1 = hivm.hir.pointer_cast(%c0_i64) : memref<64xi24, #hivm.address_space<ub>>",
        "%1 = hivm.hir.pointer_cast(%c0_i64) : memref<64xf32, #hivm.address_space<cb>>",
        "%1 = hivm.hir.pointer_cast(%c0_i64) : memref<8x8xf32, strided<[64, 1]>, #hivm.address_space<ub>>",
        "%1 = hivm.hir.pointer_cast() : memref<64xf32, #hivm.address_space<ub>>",
    ],
)
def test_a_buffer_that_cannot_be_read_is_an_error(line):
    """It could be of any size: to leave it out would show a plan that fits."""
    with pytest.raises(buffers.UnreadablePlanError, match="a buffer"):
        buffers.planned_bytes(f"%c0_i64 = arith.constant 0 : i64\n{line}\n{MODULE}")


def test_names_are_those_of_their_own_function():
    function = "%c = arith.constant {} : i64\n%1 = hivm.hir.pointer_cast(%c) : memref<4xi8, #hivm.address_space<ub>>\n"
    assert buffers.planned_bytes(function.format(900) + function.format(100))["ub"] == 904


FITS = {"ub": 196_608, "cbuf": 524_288, "cc": 131_072}


@pytest.mark.parametrize(
    ("used", "cores", "fault"),
    [
        (FITS, "cube and vector", ""),
        (FITS | {"ub": 0}, "cube", ""),
        ({"ub": 1, "cbuf": 0, "cc": 0}, "vector", ""),
        (FITS | {"ub": 196_609}, "cube and vector", "UB: 196,609 of 196,608"),
        (FITS | {"cbuf": 524_289}, "cube and vector", "L1: 524,289 of 524,288"),
        (FITS | {"cc": 131_073}, "cube", "L0C: 131,073 of 131,072"),
        (FITS | {"ub": 0}, "cube and vector", "UB: none is planned"),
        (FITS | {"cbuf": 0}, "cube", "L1: none is planned"),
        (FITS | {"cc": 0}, "cube and vector", "L0C: none is planned"),
        ({"ub": 0, "cbuf": 0, "cc": 0}, "vector", "UB: none is planned"),
    ],
)
def test_a_plan_past_a_limit_or_without_a_buffer_is_at_fault(used, cores, fault):
    found = buffers.plan_fault(used, cores)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    ("module", "outcome", "detail"),
    [
        (MODULE, "lowers", ""),
        (MODULE.replace("65536 : i64", "165536 : i64"), "failed", "UB: 198,304 of 196,608"),
        (MODULE.replace("64x128xf32", "?xf32"), "failed", "a buffer of a form"),
        ("func.func @k() { return }", "failed", "UB: none is planned"),
    ],
    ids=["fits", "too much", "unreadable", "empty"],
)
def test_a_module_whose_plan_cannot_be_is_not_as_expected(module, outcome, detail):
    """``_mix_aic(`` marks a module of cube and vector cores."""
    result = lower.Lowered("k", "T", "1x1", "lowers")
    lower.read_plan(result, module.replace("    %0", "call @k_mix_aic()\n    %0", 1))
    assert result.outcome == outcome
    assert result.as_expected == (outcome == "lowers")
    assert result.detail.startswith(detail)


def test_results_of_an_earlier_run_are_not_reported(tmp_path, monkeypatch):
    """Lowering that ends before it has a result."""
    (tmp_path / "lowered.json").write_text('{"versions": {}, "results": []}')
    report = tmp_path / "report.md"
    monkeypatch.setattr(main, "missing_tools", list)
    monkeypatch.setattr(main, "lower_in", lambda python, out: False)
    monkeypatch.setattr(main, "compare_all", lambda out: [])
    assert main.main(["--python", "python", "--out", str(tmp_path), "--report", str(report)]) == 1
    assert not report.exists()


@pytest.mark.parametrize(("lowers", "error"), [(True, 0.0), (True, 1.0), (False, 0.0)])
def test_only_a_check_that_passed_writes_its_report(tmp_path, monkeypatch, lowers, error):
    report = tmp_path / "report.md"

    def lower_in(python: Path, out: Path) -> bool:
        (out / "lowered.json").write_text('{"versions": {}, "results": []}')
        return lowers

    monkeypatch.setattr(main, "missing_tools", list)
    monkeypatch.setattr(main, "lower_in", lower_in)
    monkeypatch.setattr(main, "compare_all", lambda out: [Compared("k", error, 0.1, 1, 1)])
    good = lowers and error == 0.0
    code = main.main(["--python", "python", "--out", str(tmp_path), "--report", str(report)])
    assert (code == 0, report.exists()) == (good, good)


def test_an_overflow_names_the_buffer_and_both_sizes():
    found = buffers.overflow_in("x\nerror: ub overflow, requires 1574400 bits while 1572864 bits available! (why)")
    assert (found.buffer, found.needed, found.limit) == ("UB", 196_800, 196_608)
    assert buffers.overflow_in("error: something else") is None


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(buffers).failed == 0


def test_a_wrong_copy_differs_in_one_operation():
    text = "a = arith.addf x\nb = arith.addf y\nc = arith.mulf z\nd = arith.cmpi eq, p\n"
    copies = wrong_copies(text)
    assert len(copies) == 3
    for copy in copies:
        changed = [pair for pair in zip(text.splitlines(), copy.splitlines(), strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1


def test_a_kernel_without_arithmetic_still_gets_a_wrong_copy():
    assert wrong_copies("a = arith.divsi x") == ["a = arith.remsi x"]
    assert wrong_copies("a = arith.maxsi x") == ["a = arith.minsi x"]
    assert wrong_copies("nothing") == []


def test_portable_removes_what_only_ascend_knows():
    text = (
        "module {\n  func.func private @triton_cumsum_0(tensor<16xi32>, i32, i1) -> tensor<16xi32>\n"
        "  func.func @k(%a: memref<?xi8> {tt.kind = 0 : i32}) attributes {x = 1} {\n    scf.if %c {\n    } {hivm.y}\n"
    )
    result = portable(text)
    assert "attributes" not in result
    assert "hivm" not in result
    assert "tt.kind" not in result
    assert "arith.addi" in result  # the running sum has a body now


@pytest.mark.parametrize(
    ("error", "planted", "caught", "good"),
    [(0.0, 2, 2, True), (0.5, 2, 2, False), (0.0, 2, 1, False), (0.0, 0, 0, False)],
)
def test_a_comparison_is_good_only_if_it_matches_and_notices_every_fault(error, planted, caught, good):
    assert Compared("k", error, 0.1, planted, caught).good is good


def test_the_report_shows_use_limits_and_refusals():
    row = {
        "name": "gemm",
        "target": "T",
        "tile": "1x2x3",
        "outcome": "lowers",
        "double_buffered": False,
        "cores": "cube",
    }
    bad = {"name": "big", "target": "T", "tile": "9x9x9", "outcome": "UB", "detail": "UB overflow: needs 2 of 1 bytes"}
    lowered = {"versions": {"tool": "1.0"}, "results": [{**row, "used": {"ub": 1, "cbuf": 2000, "cc": 3}}, bad]}
    text = render(lowered, [Compared("gemm", 0.25, 0.5, 3, 3)])
    assert "| gemm | 1x2x3 | cube | 1 | 2,000 | 3 | no |" in text
    assert "| big | 9x9x9 | UB overflow: needs 2 of 1 bytes |" in text
    assert "| gemm | 5.0e-01 | 3 of 3 |" in text
    assert "2.5e-01" not in text, "it differs from one CPU to another"


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_fails_on_a_kernel_that_does_nothing(name):
    """Results start as markers, so that a comparison with torch cannot pass by itself."""
    results = TRIALS[name]().results()
    actual, wanted, tolerance = results[0]
    assert (actual.double() - wanted.double()).norm() > tolerance * wanted.double().norm()
