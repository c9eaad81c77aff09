from vllm.distributed import get_ep_group


def get_fc3_quant_x_group():
    return get_ep_group()
