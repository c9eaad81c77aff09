"""The command ``plan``: what it prints is what the cost model and the choice say."""

from __future__ import annotations

import doctest
import shlex
from pathlib import Path

import pytest

from vllm_ascend_moe.comm.cost_model import STRATEGIES, MoEShape
from vllm_ascend_moe.comm.links import LINKS
from vllm_ascend_moe.comm.select import Situation
from vllm_ascend_moe.tools import plan as plan_module
from vllm_ascend_moe.tools.cli import main
from vllm_ascend_moe.tools.plan import human_bytes, make_plan, render

MODEL = ["--experts", "64", "--top-k", "6", "--hidden", "2048"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments, *MODEL]) == 0
    return capsys.readouterr().out


def cells(text: str, strategy: str) -> list[str]:
    """The strategy's row of the table; every column is two spaces or more from the next."""
    row = next(line for line in text.splitlines() if line.startswith(strategy + "  "))
    return [cell for cell in row.split("  ") if cell.strip()]


def test_the_table_has_the_costs_and_marks_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--tokens", "5", "2", "0", "7", "--capacity", "8")
    situation = Situation(shape=MoEShape(hidden_size=2048, num_experts=64, top_k=6), capacity=8)
    made = make_plan((5, 2, 0, 7), situation)
    assert text.strip() == render(made)
    assert text.startswith(f"{made.decision.strategy} ({made.decision.kind}")
    assert set(made.costs) == {*STRATEGIES} - {"mc2"}, "what runs on NPUs alone has no price here"
    for name in made.costs:
        cost, row = made.costs[name], [cell.strip() for cell in cells(text, name)]
        assert ("<- chosen" in row) == (name == made.decision.strategy)
        figures = [human_bytes(b) for b in (cost.dispatch_bytes, cost.combine_bytes, cost.node_bytes)]
        assert row[-7:] == [
            str(cost.collectives),
            str(cost.syncs),
            *figures,
            human_bytes(cost.memory_bytes),
            f"{cost.us:.0f} us",
        ]
        assert (f"  not {name}: " in text) == (name != made.decision.strategy)


def test_every_option_reaches_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    one_count = plan(capsys, "--tokens", "9", "--ranks", "3")
    assert one_count == plan(capsys, "--tokens", "9", "9", "9")
    assert "only choice" in plan(capsys, "--tokens", "5", "2", "--fixed-shapes", "--capacity", "5")
    assert "no experts of the batched format" in plan(capsys, "--tokens", "5", "2", "--rows-only", "--capacity", "5")
    assert plan(capsys, "--tokens", "5", "2", "--comm", "all_to_all").startswith("all_to_all (configured")
    over = plan(
        capsys, "--tokens", "5", "2", "--capacity", "3", "--over-capacity", "rows", "--comm", "batched_all_to_all"
    )
    assert over.startswith("all_to_all (over capacity: 5 tokens on a rank, capacity 3)")
    assert "a token is 2100 bytes on its way out and 4096" in plan(capsys, "--tokens", "5", "--quantize", "int8")
    assert "and 8192 on its way back" in plan(capsys, "--tokens", "5", "--element-bytes", "4")
    assert LINKS["atlas-a3"].source in plan(capsys, "--tokens", "5", "--link", "atlas-a3")


def test_between_npus_mc2_is_among_them_with_its_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--tokens", "256", "--ranks", "16", "--link", "atlas-a2"]
    text = plan(capsys, *few, "--hccl-buffer", "131")
    assert any(line.startswith("mc2  ") for line in text.splitlines())
    assert "not mc2: HCCL_BUFFSIZE = 131, but it must be at least 132 (MiB)" in text
    assert "HCCL_BUFFSIZE" not in plan(capsys, *few, "--hccl-buffer", "132")
    assert plan(capsys, *few, "--hccl-buffer", "132", "--comm", "mc2").startswith("mc2 (configured")
    assert "must be as many on each of 128 ranks" in plan(capsys, *few, "--splits", "8")


def test_without_a_capacity_there_is_nothing_to_price(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--tokens", "5", "2")
    assert "not batched_all_to_all: no capacity was agreed on" in text
    assert not any(line.startswith("batched_all_to_all  ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "5", "--link", "string"], "error: link = 'string', but it must be one of gloo, "),
        (["--tokens", "5", "2", "--fixed-shapes"], "error: capacity = None"),
        (["--tokens", "5", "2", "--capacity", "4", "--comm", "batched_all_to_all"], "error: max(local_sizes) = 5"),
        (["--tokens", "5", "-1"], "error: local_sizes[1] = -1"),
        (["--tokens", "5", "--ranks", "0"], "error: ranks = 0"),
        (["--tokens", "5", "2", "--ranks", "3"], "error: ranks = 3, but it must be 2"),
    ],
)
def test_faults_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments, *MODEL]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(plan_module)
    assert result.attempted
    assert result.failed == 0


def test_the_plan_in_the_documents_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text()
    [block] = [block for block in text.split("```") if block.startswith("\n$ vllm-ascend-moe plan ")]
    command, _, printed = block[1:].partition("\n")
    assert main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out == printed
