"""Settings of the unit tests."""

from hypothesis import settings

# No deadline: a loaded machine is not a fault. Derandomised: the same commit gives the same result.
settings.register_profile("unit", deadline=None, derandomize=True)
settings.load_profile("unit")
