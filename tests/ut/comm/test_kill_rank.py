"""One rank is gone in the middle of a step: the others end with an error that says where, and within the timeout.

Proves it on gloo, where a collective returns when it is done. On NCCL and HCCL the device waits, and it is their
watchdog that ends the process.
"""

import re

import kill_bodies
import pytest

from vllm_ascend_moe.testing.launch import RankFailedError, launch

pytestmark = pytest.mark.multiprocess
RANKS = 3


@pytest.mark.parametrize("strategy", kill_bodies.STRATEGIES)
@pytest.mark.parametrize(("fault", "where"), [("killed", "combine"), ("stalled", "dispatch")], ids=lambda x: x)
def test_the_others_end_with_an_error_that_names_the_step(strategy, fault, where):
    with pytest.raises(RankFailedError) as raised:
        launch(RANKS, kill_bodies.steps, strategy, fault, where, timeout_s=60)
    kinds, text = raised.value.kinds, str(raised.value)
    survivors = [rank for rank in range(RANKS) if rank != kill_bodies.VICTIM]
    assert {rank: kinds.get(rank) for rank in survivors} == dict.fromkeys(survivors, "CommError")
    assert kinds.get(kill_bodies.VICTIM) == ("ProcessDied" if fault == "killed" else None)
    found = re.findall(rf"CommError: {strategy}: (.*) failed on ep, rank (\d) of {RANKS}: ", text)
    assert {int(rank) for _, rank in found} == set(survivors)
    # gloo may let one rank through a collective that fails on another; that one then fails at the next.
    assert any(step in kill_bodies.STEPS[where] for step, _ in found), found
    waited = [float(seconds) for seconds in re.findall(r"waited ([\d.]+) s", text)]
    assert len(waited) == len(survivors)
    assert max(waited) < 2 * kill_bodies.TIMEOUT_S
