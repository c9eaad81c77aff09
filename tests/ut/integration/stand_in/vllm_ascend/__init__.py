"""A hand-written stand-in for vllm-ascend 0.23: what our integration imports, with the real signatures, on CPU tensors.

Its operators gather and cut out rows as vllm-ascend's do, so that both forms can be compared. It does not prove that
the names and signatures are vllm-ascend's: tests/softnpu_engines runs with the real package.
"""


def register() -> str:
    return "vllm_ascend.platform.StandInPlatform"
