"""Torch custom ops."""
