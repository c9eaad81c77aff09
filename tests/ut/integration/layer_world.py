"""Whole MoE layers of vLLM (router, runner, shared experts, our method) on real process groups, without an engine.

DP=2 x TP=2 on four gloo processes. Each case builds a layer as a model would and compares it with a dense computation
of this process alone, for every size vector in turn, so that one launch tests many cases.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.reference import ReferenceExperts

DP, TP = 2, 2
H, N, K = 64, 32, 3
SCALE = 2.5  # of routed experts
SHARED = 0.5  # a shared expert multiplies by it


@dataclass(frozen=True)
class LayerCase:
    """One layer and its configuration."""

    name: str
    section: dict[str, Any]
    sp: bool = True
    experts: int = 7  # does not divide by the ranks
    shared: bool = False
    weight_on_input: bool = False
    round_robin: bool = False
    expert_parallel: bool = True
    dtype: torch.dtype = torch.float32
    sizes: tuple[tuple[int, int], ...] = ((5, 2), (1, 0), (0, 0), (1, 40), (3, 3))
    more_rows: int = 0  # than the ranks were told of

    def __str__(self) -> str:
        return self.name

    @property
    def top_k(self) -> int:
        return 1 if self.weight_on_input else K


@dataclass
class Outcome:
    """What one rank saw."""

    worst: float = 0.0
    strategies: list[str] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    placement: str = ""
    error: str = ""


class _Shared(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SHARED


def _weights(case: LayerCase) -> ExpertWeights:
    generator = torch.Generator().manual_seed(case.experts)
    w13 = torch.randn((case.experts, 2 * N, H), generator=generator) * 0.3
    w2 = torch.randn((case.experts, H, N), generator=generator) * 0.3
    return ExpertWeights(w13=w13.to(case.dtype), w2=w2.to(case.dtype))


def _tokens(case: LayerCase, sizes: tuple[int, int], dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * dp_rank + sum(sizes))
    hidden = torch.randn((sizes[dp_rank], H), generator=generator)
    return hidden.to(case.dtype), torch.randn((sizes[dp_rank], case.experts), generator=generator)


def dense(case: LayerCase, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The layer's output for these tokens, computed here alone, in fp32."""
    weights, ids = torch.topk(logits.softmax(-1), case.top_k)
    if case.top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    x = hidden.float()
    if case.weight_on_input:
        x = (hidden * weights.to(hidden.dtype)).float()
    routed = ReferenceExperts().apply(
        x, weights, ids, _weights(case), apply_router_weight_on_input=case.weight_on_input
    )
    # Without sequence parallelism a shared expert's output is a part of a sum over TP.
    shared = hidden.float() * SHARED * (1 if case.sp else TP) if case.shared else 0
    return routed * SCALE + shared


class World:
    """This rank's vLLM: groups made once, a configuration for each case."""

    def __init__(self, rank: int) -> None:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        self.dp_rank, self.tp_rank = divmod(rank, TP)
        os.environ["VLLM_DIST_IDENT"] = f"layers-{os.getppid()}"
        self.base = self._config({})
        with set_current_vllm_config(self.base):
            init_distributed_environment(TP, self.tp_rank, "env://", self.tp_rank, "gloo")
            initialize_model_parallel(TP)
        self.built = 0

    def close(self) -> None:
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()

    def _config(self, section: dict[str, Any], **parallel: Any) -> Any:
        from vllm.config import CompilationConfig, ParallelConfig, SchedulerConfig, VllmConfig

        return VllmConfig(
            parallel_config=ParallelConfig(
                data_parallel_size=DP,
                data_parallel_rank=self.dp_rank,
                tensor_parallel_size=TP,
                distributed_executor_backend="mp",
                **{"enable_expert_parallel": True, **parallel},
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64, is_encoder_decoder=False
            ),
            compilation_config=CompilationConfig(mode=0),
            additional_config={"ascend_moe": {"bind_cpus": False, **section}},
        )

    def build(self, case: LayerCase) -> tuple[Any, Any]:
        """The layer with its weights, and its configuration."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import FusedMoEFactory

        parallel: dict[str, Any] = {"enable_expert_parallel": case.expert_parallel}
        if case.round_robin:
            parallel.update(expert_placement_strategy="round_robin", all2all_backend="deepep_low_latency")
        config = self._config(case.section, **parallel)
        self.built += 1
        with set_current_vllm_config(config):
            layer = FusedMoEFactory(
                num_experts=case.experts,
                top_k=case.top_k,
                hidden_size=H,
                intermediate_size=N,
                params_dtype=case.dtype,
                renormalize=case.top_k > 1,
                num_expert_group=2 if case.round_robin else None,
                prefix=f"layer{self.built}.experts",
                is_sequence_parallel=case.sp,
                apply_router_weight_on_input=case.weight_on_input,
                shared_experts=_Shared() if case.shared else None,
                routed_scaling_factor=SCALE,
                apply_routed_scale_to_output=True,
            )
            experts, full = layer.routed_experts, _weights(case)
            if case.expert_parallel:
                # Ids of this rank's experts, in the order of their slots.
                mine = torch.argsort(experts.expert_map)[case.experts - experts.local_num_experts :]
                experts.w13_weight.data.copy_(full.w13[mine])
                experts.w2_weight.data.copy_(full.w2[mine])
            experts.quant_method.process_weights_after_loading(experts)
        return layer, config

    def run(self, case: LayerCase) -> Outcome:
        """Every size vector of the case."""
        outcome = Outcome()
        try:
            layer, config = self.build(case)
            outcome.placement = layer.expert_placement_strategy
            for sizes in case.sizes:
                self._forward(case, layer, config, sizes, outcome)
        except Exception as error:  # noqa: BLE001  the case says which one it must be
            outcome.error = f"{type(error).__name__}: {error}"
        return outcome

    def _forward(self, case: LayerCase, layer: Any, config: Any, sizes: tuple[int, int], outcome: Outcome) -> None:
        from vllm.forward_context import get_forward_context, set_forward_context

        from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY

        hidden, logits = _tokens(case, sizes, self.dp_rank)
        expected = dense(case, hidden, logits)
        if case.sp:
            hidden, logits, expected = (self._chunk(x) for x in (hidden, logits, expected))
        with set_forward_context(
            None, config, num_tokens=sizes[self.dp_rank], num_tokens_across_dp=torch.tensor(sizes, dtype=torch.int32)
        ):
            # A negative number takes rows away.
            output = layer(*(torch.nn.functional.pad(x, (0, 0, 0, case.more_rows)).clone() for x in (hidden, logits)))
            outcome.strategies.extend(get_forward_context().additional_kwargs[FORWARD_LAYOUTS_KEY].passes)
        outcome.outputs.append(output)
        if output.numel():
            difference = (output.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            outcome.worst = max(outcome.worst, difference.item())

    def _chunk(self, x: torch.Tensor) -> torch.Tensor:
        """This TP rank's share of rows, padded with zeros, as vLLM's sequence_parallel_chunk does it."""
        rows = -(-x.shape[0] // TP)
        padded = torch.nn.functional.pad(x, (0, 0, 0, rows * TP - x.shape[0]))
        return padded[self.tp_rank * rows : (self.tp_rank + 1) * rows]


def run_layers(rank: int, ranks: int, cases: list[LayerCase]) -> dict[str, Outcome]:
    """Body for ``launch``."""
    world = World(rank)
    outcomes = {case.name: world.run(case) for case in cases}
    world.close()
    return outcomes


def run_differing(rank: int, ranks: int, sections: list[dict[str, Any]]) -> str:
    """Body for ``launch``: the error of a layer where each rank has a section of its own."""
    world = World(rank)
    outcome = world.run(LayerCase("differing", sections[rank], sizes=((1, 1),)))
    world.close()
    return outcome.error
