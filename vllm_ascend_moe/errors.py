"""Typed errors. Each names the field, the value, the limit and what to do next."""

from __future__ import annotations


class AscendMoEError(Exception):
    """Base of every error this package raises for a fault a user can act on."""


class InvalidValueError(AscendMoEError, ValueError):
    """A field has a value outside its limit.

    Args:
        field: what is wrong, as the user or caller names it.
        value: what was given.
        limit: what is accepted.
        action: what to do next.
    """

    def __init__(self, field: str, value: object, limit: str, action: str) -> None:
        self.field, self.value, self.limit, self.action = field, value, limit, action
        super().__init__(f"{field} = {value!r}, but it must be {limit}. {action}")

    def __reduce__(self) -> tuple[type, tuple[str, object, str, str]]:
        # Exceptions cross process boundaries (engine core to front end); the default pickling passes one argument.
        return type(self), (self.field, self.value, self.limit, self.action)


class LayoutError(InvalidValueError):
    """Token counts, ranks or tensor rows that contradict the token layout of this forward."""


class PlacementError(InvalidValueError):
    """Experts, ranks or slots that contradict the placement of experts on ranks."""


class ConfigError(InvalidValueError):
    """A wrong key or value in ``--additional-config '{"ascend_moe": {...}}'`` or in an environment variable."""


class ShapeError(InvalidValueError):
    """A tensor whose shape or memory format an operation does not accept."""


class DtypeError(InvalidValueError, TypeError):
    """A tensor whose dtype an operation does not accept."""


class CapacityError(InvalidValueError):
    """More tokens than the agreed capacity. Raised on every rank, before a collective could hang."""


class CommError(AscendMoEError, RuntimeError):
    """A collective failed: another rank ended, refused its inputs, or did not come within the group's timeout.

    Args:
        strategy: of token communication; step: of the strategy.
        group: the ranks, and which of them this is.
        cause: what the backend said.
    """

    def __init__(self, strategy: str, step: str, group: str, cause: str) -> None:
        self.strategy, self.step, self.group, self.cause = strategy, step, group, cause
        super().__init__(
            f"{strategy}: {step} failed on {group}: {cause}. The fault is most often another rank's: "
            "look for the first error in the logs of all ranks."
        )

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.strategy, self.step, self.group, self.cause)


class MissingDependencyError(AscendMoEError, ImportError):
    """Something this package needs is not installed, or has a version it was not made for."""


class UnsupportedError(AscendMoEError, NotImplementedError):
    """A combination that is understood but not supported; the message says what is supported instead."""
