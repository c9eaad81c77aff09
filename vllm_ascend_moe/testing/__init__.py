"""Helpers for tests and benchmarks, shipped: launcher, data, fake group, comparison."""
