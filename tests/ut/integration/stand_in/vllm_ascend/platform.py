from vllm.platforms.cpu import CpuPlatform


class StandInPlatform(CpuPlatform):
    pass
