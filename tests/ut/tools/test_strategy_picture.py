"""The pictures of the strategies show every row that moves, and no other; those in docs/ are what the code draws."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from vllm_ascend_moe.tools.strategy_picture import EXAMPLE, HEADS, arrived, main, rows_sent, strategy_svg

DOCS = Path(__file__).parents[3] / "docs"


def test_what_arrives_is_what_each_strategy_brings() -> None:
    """The example's tokens: 0.0 has experts 0 and 3, 0.1 has 1 and 2, 0.2 has 4 and 5, 1.0 has 2 and 3, ..."""
    rows = [cell.token for _, cells in arrived(EXAMPLE, "all_to_all", 1) for cell in cells]
    assert rows == [(0, 0), (0, 1), (1, 0), (2, 1)]
    padded = [cell for _, cells in arrived(EXAMPLE, "padded_allgather", 1) for cell in cells]
    assert len(padded) == 9
    assert [cell.token for cell in padded if cell.token and not cell.faded] == rows
    batched = dict(arrived(EXAMPLE, "batched_all_to_all", 1))
    assert [cell.token for cell in batched["expert 3"] if cell.token] == [(0, 0), (1, 0)]
    assert {len(cells) for cells in batched.values()} == {9}
    assert [rows_sent(EXAMPLE, strategy) for strategy in HEADS] == [18, 5, 18]


@pytest.mark.parametrize("strategy", HEADS)
def test_every_cell_is_drawn(strategy) -> None:
    texts = [element.text for element in ET.fromstring(strategy_svg(EXAMPLE, strategy)).iter() if "text" in element.tag]
    for token in EXAMPLE.tokens():
        lines = [cells for rank in range(3) for _, cells in arrived(EXAMPLE, strategy, rank)]
        times = sum(cell.token == token for cells in lines for cell in cells)
        assert texts.count(f"{token[0]}.{token[1]}") == times + 2  # at home before and after


@pytest.mark.parametrize("strategy", HEADS)
def test_the_pictures_in_the_documents_are_up_to_date(strategy, tmp_path: Path) -> None:
    main(str(tmp_path))
    assert (tmp_path / f"{strategy}.svg").read_text() == (DOCS / f"{strategy}.svg").read_text()
