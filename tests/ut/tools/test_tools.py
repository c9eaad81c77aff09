"""The command line: layout, trace, doctor, and errors as one line."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.tools import doctor
from vllm_ascend_moe.tools.cli import main
from vllm_ascend_moe.tools.picture import layout_svg
from vllm_ascend_moe.tools.trace import most_uneven, read_trace, sum_by_layer


def test_layout_draws_and_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "layout.svg"
    assert main(["layout", "5,2", "--tp", "2", "--svg", str(picture)]) == 0
    assert "rank 2 |#..| rows 6-6, 2 pad" in capsys.readouterr().out
    ET.fromstring(picture.read_text())


@pytest.mark.parametrize("sizes", [[4, 1, 0, 6], [0, 0], [1]], ids=str)
def test_picture_shows_every_token_and_every_pad_row(sizes: list[int]) -> None:
    layout = TokenLayout.of(sizes, 0)
    texts = [element.text for element in ET.fromstring(layout_svg(layout)).iter() if element.tag.endswith("text")]
    for rank, size in enumerate(sizes):
        for token in range(size):
            assert texts.count(f"{rank}.{token}") == 3  # held, gathered, returned
    assert texts.count("pad") == 2 * layout.pad_rows


def test_bad_sizes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "5,-1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: local_sizes[1] = -1, but it must be an integer of 0 or more")
    assert error.count("\n") == 1


def write_trace(folder: Path) -> None:
    lines = [
        {
            "layer": "a",
            "group": "dp",
            "rank": 0,
            "local_sizes": [3, 3],
            "collectives": [["gather", 10], ["reduce_scatter", 5]],
        },
        {
            "layer": "a",
            "group": "dp",
            "rank": 0,
            "local_sizes": [9, 1],
            "strategies": ["all_to_all", "padded_allgather"],
            "collectives": [["gather", 30], ["all_to_all", 15]],
        },
        {"layer": "b", "group": None, "rank": None, "local_sizes": None, "collectives": [["allreduce", 7]]},
    ]
    (folder / "moe-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_trace_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    steps = read_trace(tmp_path)
    uneven = most_uneven(steps)
    assert uneven is not None
    assert uneven.local_sizes == (9, 1)
    a, b = sum_by_layer(steps)
    assert (a.steps, a.gathers, a.reduces, a.exchanges, a.others, a.bytes) == (2, 2, 1, 1, 0, 60)
    assert a.strategies == {"all_to_all": 1, "padded_allgather": 1}
    assert (b.steps, b.gathers, b.reduces, b.exchanges, b.others, b.bytes) == (1, 0, 0, 0, 1, 7)
    assert main(["trace", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "10 tokens on 2 ranks, padded to 18 rows" in shown
    assert "1 all_to_all, 1 padded_allgather" in shown


def test_empty_trace_folder_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "Run the engine with ASCEND_MOE_TRACE=FOLDER first" in capsys.readouterr().err


def test_doctor_reports_every_probe_and_survives_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("no such device")

    monkeypatch.setattr(
        doctor, "probes", lambda: {"machine": doctor._machine, "broken": broken, "code": doctor._run("1/0")}
    )
    rows, healthy = doctor.report()
    assert not healthy
    assert dict(rows)["broken"] == "FAILED: OSError: no such device"
    assert dict(rows)["code"].endswith("ZeroDivisionError: division by zero")
    assert "Python" in dict(rows)["machine"]
