import torch
from vllm.forward_context import get_forward_context

from vllm_ascend.ascend_forward_context import _EXTRA_CTX
from vllm_ascend.distributed.parallel_state import get_fc3_quant_x_group


def fc3_all_gather_and_maybe_unpad_impl(x: torch.Tensor) -> torch.Tensor:
    counts = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
    blocks = get_fc3_quant_x_group().all_gather(x, 0).split(_EXTRA_CTX.padded_length)
    return torch.cat([block[:n] for block, n in zip(blocks, counts, strict=True)])
