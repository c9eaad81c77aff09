import torch
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context

from vllm_ascend.ascend_forward_context import _EXTRA_CTX
from vllm_ascend.utils import enable_sp_by_pass


def _maybe_all_gather_and_maybe_unpad_impl(x: torch.Tensor, label: bool, is_ep_comm: bool = False) -> torch.Tensor:
    metadata = get_forward_context().dp_metadata
    if not (_EXTRA_CTX.flash_comm_v1_enabled and label and is_ep_comm) or metadata is None:
        return x.clone()
    x = get_ep_group().all_gather(x, 0)
    if enable_sp_by_pass():
        return x
    blocks = x.split(_EXTRA_CTX.padded_length)
    counts = metadata.num_tokens_across_dp_cpu.tolist()
    return torch.cat([block[:n] for block, n in zip(blocks, counts, strict=True)])


def _maybe_pad_and_reduce_impl(x: torch.Tensor, is_ep_comm: bool = False) -> torch.Tensor:
    metadata = get_forward_context().dp_metadata
    if not (_EXTRA_CTX.flash_comm_v1_enabled and is_ep_comm) or metadata is None:
        return x.clone()
    if enable_sp_by_pass():
        return get_ep_group().reduce_scatter(x, 0)
    counts = metadata.num_tokens_across_dp_cpu.tolist()
    # Whatever the memory held: pad rows of vllm-ascend's buffer are not initialised.
    padded = x.new_full((len(counts), _EXTRA_CTX.padded_length, *x.shape[1:]), float("nan"))
    for block, tokens in zip(padded, x.split(counts), strict=True):
        block[: len(tokens)] = tokens
    return get_ep_group().reduce_scatter(padded.flatten(0, 1), 0)


def _maybe_all_gather_and_maybe_unpad_fake(x: torch.Tensor, label: bool, is_ep_comm: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


def _maybe_pad_and_reduce_fake(x: torch.Tensor, is_ep_comm: bool = False) -> torch.Tensor:
    return torch.empty_like(x)
