"""Triton kernel sources; need only torch and triton."""
