"""Configuration of the plugin: ``--additional-config '{"ascend_moe": {...}}'``, validated once, frozen.

Unknown keys and wrong values are refused by name; nothing is guessed or ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ascend_moe.errors import ConfigError

SECTION = "ascend_moe"
CommName = Literal["auto", "padded_allgather", "all_to_all", "batched_all_to_all", "mc2", "uneven_allgather"]
ExpertsName = Literal["auto", "native", "torch", "reference", "triton", "npu", "vllm"]


class AscendMoEConfig(BaseModel):
    """Every key of the section, its type and its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    comm: CommName = Field(
        default="auto",
        description="How tokens reach experts. auto: per forward, by the cost model of comm/select.py. mc2: NPUs only.",
    )
    max_tokens_across_dp: int | None = Field(
        default=None,
        ge=1,
        description="Capacity C of batched_all_to_all: the most tokens one rank sends in one pass. null: from vLLM's "
        "scheduler limits. The buffers grow with it.",
    )
    over_capacity: Literal["error", "rows"] = Field(
        default="error",
        description="More tokens on a rank than batched_all_to_all (C) or mc2 takes: an error on every rank, or "
        "all_to_all for this pass.",
    )
    quantize_dispatch: Literal["none", "int8", "fp8"] = Field(
        default="none",
        description="Tokens go to their experts in one byte an element; the way back is not rounded.",
    )
    max_tokens_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="A layer takes so many tokens of each rank at a time, in several passes. null: all at once.",
    )
    exact: bool = Field(
        default=False,
        description="Sum in fp32 in a fixed order: the same bits with every strategy, given experts whose own sums "
        "keep that order (torch, reference; native but for batched_all_to_all). Slower.",
    )
    experts: ExpertsName = Field(
        default="auto",
        description="Expert kernel; see experts/select.py. vllm: vLLM's own for CPU, with ids made local to the rank.",
    )
    packed_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Up to this many bytes a rank, one packed collective instead of one operator call per tensor. "
        "0 never packs; null: the measured threshold.",
    )
    bind_cpus: bool = Field(
        default=True,
        description="On CPU: share the cores among workers where vLLM's automatic binding needs one NUMA node each.",
    )


def _describe(error: Mapping[str, Any]) -> ConfigError:
    """Our error for the first fault pydantic found."""
    key = ".".join(str(part) for part in error["loc"])
    where = f"additional_config.{SECTION}" + (f".{key}" if key else "")
    if error["type"] == "extra_forbidden":
        known = ", ".join(AscendMoEConfig.model_fields)
        return ConfigError(where, error["input"], f"absent: known keys are {known}", "Remove it or correct the name.")
    if error["type"] == "literal_error":
        limit = f"one of {error['ctx']['expected']}"
    elif error["type"].startswith(("model_", "dict_")):
        limit = "an object with keys"
    else:
        limit = error["msg"][0].lower() + error["msg"][1:]
    return ConfigError(where, error["input"], limit, "Correct the value in --additional-config.")


@lru_cache(maxsize=64)
def _parse(text: str) -> AscendMoEConfig:
    try:
        config = AscendMoEConfig.model_validate_json(text)
    except ValidationError as error:
        raise _describe(error.errors()[0]) from None
    if config.experts == "vllm" and config.comm == "batched_all_to_all":
        raise ConfigError(
            f"additional_config.{SECTION}.comm",
            config.comm,
            "another strategy with experts = 'vllm', whose kernel takes rows",
            "Choose one of them, or another expert kernel.",
        )
    return config


def parse_config(additional_config: object) -> AscendMoEConfig:
    """Reads our section of vLLM's ``additional_config``.

    Args:
        additional_config: what vLLM's configuration holds. Anything but a mapping has no section of ours.

    Returns:
        The validated section; defaults where it is absent.

    Raises:
        ConfigError: an unknown key, a wrong value, or a section that is not an object.
    """
    if not isinstance(additional_config, Mapping):
        return AscendMoEConfig()
    section = additional_config.get(SECTION, {})
    try:
        return _parse(json.dumps(section, sort_keys=True))
    except TypeError:
        raise ConfigError(
            f"additional_config.{SECTION}", section, "JSON values only", "Pass strings, numbers and booleans."
        ) from None
