"""Settings and fixtures of the unit tests."""

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# No deadline: a loaded machine is not a fault. Derandomised: the same commit gives the same result.
settings.register_profile("unit", deadline=None, derandomize=True)
settings.load_profile("unit")
# Hypothesis also draws numbers that it finds in the source of those of our modules that are imported by then, which are
# others with every distribution of files over processes. The list of them stays empty.
assert callable(providers._get_local_constants)
providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture
def world(monkeypatch):
    """All ranks of a topology in this process, with the operators patched to see them (ops_world.World)."""
    # vLLM takes seconds to import; tests that need torch alone do not wait for it.
    from ops_world import make_world

    return make_world(monkeypatch)
