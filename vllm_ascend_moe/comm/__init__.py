"""Dispatch and combine strategies: how tokens reach their experts and come back."""
