from enum import Enum

from vllm.forward_context import get_forward_context


class MoECommType(Enum):
    ALLGATHER = 0
    MC2 = 1


class _Extra:
    extra_attrs = ("capturing", "moe_comm_type", "flash_comm_v1_enabled", "pad_size", "padded_length")

    @staticmethod
    def _ctx():
        return get_forward_context()

    def __getattr__(self, name):
        if name not in self.extra_attrs:
            raise AttributeError(f"{name} is not extra forward context attribute")
        return getattr(self._ctx(), name, None)


_EXTRA_CTX = _Extra()
