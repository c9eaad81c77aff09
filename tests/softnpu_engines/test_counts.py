"""Launches of prepare and finalize: vllm-ascend's grow with the DP ranks, ours do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.softnpu_engines.engine import REPOSITORY, npu_environment


def test_no_count_grows_with_the_ranks() -> None:
    env = {**os.environ, **npu_environment(ours=False, sequence_parallel=True)}
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(REPOSITORY)])
    command = [sys.executable, "-m", "tests.softnpu_engines.layer_counts"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=250, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 16, done.stderr[-3000:]
    for row in rows:
        # Also the first layer of a forward, which makes the mask, never waits for the device.
        assert (row["collectives"], row["blocking"], row["first"]["blocking"]) == (3, 0, 0)
        if row["form"] == "theirs":
            assert row["by_name"] == {"aclnnInplaceCopy": 3 * row["dp"]}
            assert row["allocations"] == 6
        else:
            # Ids of pad rows, and this rank's pad rows; nothing where all ranks have as many tokens.
            pads = {"aten::masked_fill_.Scalar": 1, "aten::zero_": 1} if row["counts"] == "uneven" else {}
            assert row["by_name"] == pads
            assert row["allocations"] == 3
    ours = {(row["counts"], row["operators"]) for row in rows if row["form"] == "ours"}
    assert len(ours) == 2, f"the host's work grows with the ranks: {ours}"
