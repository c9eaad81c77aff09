"""The communication benchmark: every method of the strategies suite runs on two ranks, returns what it should and is
told apart from its limit; the crossover of two curves. Times mean nothing here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from vllm_ascend_moe.testing.launch import launch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_comm
import bench_comm_projection
from comm_plot import crossover, draw_projection, draw_strategies
from strategy_methods import STRATEGY_METHODS, bare_of


@pytest.mark.multiprocess
def test_every_strategy_is_checked_and_timed(tmp_path: Path) -> None:
    args = argparse.Namespace(
        backend="gloo", suite="strategies", methods=None, patterns=["even", "skewed"], tokens=[16], hidden=64,
        top_k=8, layers=1, repeats=1,
    )  # fmt: skip
    rows = launch(2, bench_comm.rank_main, args)[0]
    assert {row["method"] for row in rows} == set(STRATEGY_METHODS)
    for row in rows:
        assert row["wall_min"] > 0  # of a ratio nothing is sure, not even that it rounds to more than 0
        assert (row["wall/bare"] == 1) or row["method"] != bare_of(row["method"])
    sent = {row["method"]: row["comm_MB"] for row in rows if (row["pattern"], row["tokens"]) == ("even", 16)}
    assert sent["rows int8"] < sent["rows"] <= sent["padded"] == sent["batched"] == sent["bare batched"]
    # Ours also exchange counts: 8 bytes for each other rank.
    assert sent["rows"] == pytest.approx(sent["bare rows"], abs=2e-5)
    draw_strategies(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [
        ([1, 2, 4], [2, 2, 2], 2),
        ([1, 2, 4], [2**0.5, 2**0.5, 2**0.5], 2**0.5),
        ([1, 2, 4], [8, 8, 8], None),
        ([4, 4, 4], [2, 2, 2], 1),
        ([4, 1, 4], [2, 2, 2], 2 * 2**0.5),
    ],
    ids=["at a point", "between", "never", "always", "for good"],
)
def test_the_crossover_is_where_the_second_stays_below(first, second, at) -> None:
    tokens = [1, 2, 4]
    found = crossover(list(zip(tokens, first, strict=True)), list(zip(tokens, second, strict=True)))
    assert found == (None if at is None else pytest.approx(at))


def test_the_projection_is_the_cost_model(tmp_path: Path) -> None:
    rows = [
        bench_comm_projection.project("atlas-a3", ranks, tokens, False) for ranks in (8, 32) for tokens in (1, 4096)
    ]
    assert [row["chosen"] for row in rows] == ["padded_allgather", "all_to_all"] * 2
    assert rows[1]["MB"]["all_to_all"] < rows[1]["MB"]["padded_allgather"]
    for row in rows:
        assert row["uneven_allgather"] == row["padded_allgather"], "even counts"
        out_of_limits = [row["tokens"] > 1 and "mc2", row["ranks"] > 16 and "uneven_allgather"]
        assert list(row["not possible"]) == [name for name in out_of_limits if name]
    draw_projection(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
