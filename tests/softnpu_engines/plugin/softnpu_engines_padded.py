"""A pytest plugin for vllm-ascend's own unit tests: they run with our functions in place of vllm-ascend's."""

from __future__ import annotations


def pytest_collection_finish() -> None:
    """After vllm-ascend's conftest has set up its mocks and its operators are imported."""
    import vllm_ascend.ops

    from vllm_ascend_moe.integration import vllm_ascend as ours

    vllm_ascend.ops.register_custom_ops  # noqa: B018  imported above, so that there is something to replace
    ours.install()
    assert ours._libraries, "nothing was replaced"
