"""Comparison of results with a reference. NaN never passes, nor a wrong shape; infinity passes only if exact."""

from __future__ import annotations

import torch

# Largest ‖out - ref‖ / ‖ref‖ by the dtype of the output: some tens of roundings of a result that was computed in
# fp32 or wider. A dropped, doubled or misplaced row is orders of magnitude above.
BOUNDS: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``‖out - ref‖ / ‖ref‖`` in fp64.

    Returns:
        The error; NaN where either holds NaN or infinity; where ``ref`` is all zero (or empty): 0 if ``out`` is
        too, else infinity.

    Raises:
        AssertionError: different shapes.
    """
    if out.shape != ref.shape:
        raise AssertionError(f"shape {tuple(out.shape)}, reference {tuple(ref.shape)}")
    a, b = out.detach().to("cpu", torch.float64), ref.detach().to("cpu", torch.float64)
    if not (a.isfinite().all() and b.isfinite().all()):
        return float("nan")
    difference, scale = float((a - b).norm()), float(b.norm())
    if scale:
        return difference / scale
    return float("inf") if difference else 0.0


def assert_close(out: torch.Tensor, ref: torch.Tensor, *, bound: float | None = None, what: str = "output") -> None:
    """Raises AssertionError unless ``relative_error(out, ref)`` is within the bound of ``out``'s dtype.

    Args:
        out: the result; ref: the reference, of the same shape, in any dtype (wider is better).
        bound: another limit than the dtype's.
        what: name for the message.
    """
    limit = BOUNDS[out.dtype] if bound is None else bound
    error = relative_error(out, ref)
    # Not "error > limit": that is false for NaN.
    if not error <= limit:
        rows = _worst_rows(out, ref)
        raise AssertionError(f"{what}: relative error {error:.3g}, limit {limit:.3g} ({out.dtype}); {rows}")


def assert_equal(out: torch.Tensor, ref: torch.Tensor, *, what: str = "output") -> None:
    """Raises AssertionError unless shape, dtype and every value are the same, and no value is NaN."""
    if out.dtype != ref.dtype:
        raise AssertionError(f"{what}: dtype {out.dtype}, reference {ref.dtype}")
    if out.shape != ref.shape:
        raise AssertionError(f"{what}: shape {tuple(out.shape)}, reference {tuple(ref.shape)}")
    if not torch.equal(out, ref):
        raise AssertionError(f"{what}: {_worst_rows(out, ref)}")


def _worst_rows(out: torch.Tensor, ref: torch.Tensor) -> str:
    """Which rows differ most, since a fault of a layout shows in whole rows."""
    a, b = out.detach().to("cpu", torch.float64), ref.detach().to("cpu", torch.float64)
    per_row = (a - b).abs().reshape(a.shape[0], -1).sum(1) if a.dim() else (a - b).abs().reshape(1)
    per_row = per_row.nan_to_num(nan=float("inf"))
    wrong = int((per_row > 0).sum())
    worst = per_row.argsort(descending=True)[:4].tolist()
    return f"{wrong} of {per_row.numel()} rows differ, most: " + ", ".join(
        f"row {r} by {per_row[r]:.3g}" for r in worst
    )
