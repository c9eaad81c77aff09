"""Settings and fixtures of the unit tests."""

import pytest
from hypothesis import settings

# No deadline: a loaded machine is not a fault. Derandomised: the same commit gives the same result.
settings.register_profile("unit", deadline=None, derandomize=True)
settings.load_profile("unit")


@pytest.fixture
def world(monkeypatch):
    """All ranks of a topology in this process, with the operators patched to see them (ops_world.World)."""
    # vLLM takes seconds to import; tests that need torch alone do not wait for it.
    from ops_world import make_world

    return make_world(monkeypatch)
