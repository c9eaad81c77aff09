"""Configuration and environment: accepted values, and errors that name key, value, limit and next step."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vllm_ascend_moe import envs
from vllm_ascend_moe.config import AscendMoEConfig, parse_config
from vllm_ascend_moe.errors import ConfigError


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, {"ascend_moe": {}}], ids=str)
def test_defaults(additional: object) -> None:
    assert parse_config(additional) == AscendMoEConfig()


def test_values_are_taken() -> None:
    config = parse_config({"ascend_moe": {"experts": "reference", "bind_cpus": False}, "another_plugin": {"x": 1}})
    assert (config.experts, config.bind_cpus, config.comm) == ("reference", False, "auto")


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        (
            {"exprts": "native"},
            [
                "additional_config.ascend_moe.exprts = 'native'",
                "known keys are comm, max_tokens",
            ],
        ),
        (
            {"experts": "fast"},
            ["additional_config.ascend_moe.experts = 'fast'", "'torch', 'reference', 'triton', 'npu' or 'vllm'"],
        ),
        ({"bind_cpus": "yes"}, ["additional_config.ascend_moe.bind_cpus = 'yes'", "boolean"]),
        ({"bind_cpus": 1}, ["additional_config.ascend_moe.bind_cpus = 1", "boolean"]),
        (
            {"comm": "pplx"},
            ["additional_config.ascend_moe.comm = 'pplx'", "'batched_all_to_all', 'mc2' or 'uneven_allgather'"],
        ),
        ({"max_tokens_across_dp": 0}, ["additional_config.ascend_moe.max_tokens_across_dp = 0", "1"]),
        ({"max_tokens_across_dp": 2.5}, ["additional_config.ascend_moe.max_tokens_across_dp = 2.5", "integer"]),
        ({"max_tokens_in_flight": -4}, ["additional_config.ascend_moe.max_tokens_in_flight = -4", "1"]),
        ({"over_capacity": "drop"}, ["additional_config.ascend_moe.over_capacity = 'drop'", "'error' or 'rows'"]),
        ({"quantize_dispatch": "int4"}, ["additional_config.ascend_moe.quantize_dispatch = 'int4'", "'int8' or 'fp8'"]),
        ({"exact": 1}, ["additional_config.ascend_moe.exact = 1", "boolean"]),
        (
            {"comm": "batched_all_to_all", "experts": "vllm"},
            ["additional_config.ascend_moe.comm = 'batched_all_to_all'", "whose kernel takes rows"],
        ),
        ("native", ["additional_config.ascend_moe = 'native'", "an object with keys"]),
        (["comm"], ["additional_config.ascend_moe = ['comm']", "an object with keys"]),
        ({"comm": object()}, ["additional_config.ascend_moe", "JSON values only"]),
    ],
    ids=[
        *("unknown-key", "wrong-choice", "text-for-switch", "number-for-switch"),
        *("unknown-strategy", "no-capacity", "fraction", "negative-bound", "never-dropped", "unknown-payload", "exact"),
        *("kernel-of-rows", "text", "list", "not-json"),
    ],
)
def test_refused_by_name(section: object, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"ascend_moe": section})
    for part in parts:
        assert part in str(caught.value)


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        parse_config({}).comm = "auto"


def test_environment_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_MOE_ENABLE", raising=False)
    assert envs.get("ASCEND_MOE_ENABLE") is True
    monkeypatch.setenv("ASCEND_MOE_ENABLE", "0")
    assert envs.get("ASCEND_MOE_ENABLE") is False
    monkeypatch.setenv("ASCEND_MOE_ENABLE", "no")
    with pytest.raises(ConfigError, match="ASCEND_MOE_ENABLE = 'no', but it must be 0 or 1"):
        envs.get("ASCEND_MOE_ENABLE")


def test_only_names_of_ours_and_every_default_parses() -> None:
    for name, variable in envs.TABLE.items():
        assert name.startswith("ASCEND_MOE_")
        variable.parse(name, variable.default)
