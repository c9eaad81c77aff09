"""vLLM's CPU worker, for layers that communicate: closes their buffers, keeps sequence-parallel steps unambiguous.

vLLM's DeepSeek layers tell whether their input is spread over the TP ranks by its length: as many rows as tokens means
it is not. With one token on two TP ranks each rank holds one row (one of them pad), and the guess is wrong: the pad row
is taken for the token, and the answers are wrong without an error. With two tokens or more the lengths always differ.
So a step of one token is run as one of two, the second being padding that nobody reads, which is how vLLM already runs
steps that are rounded up to a graph's size.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.integration.strategies import close_buffers, describe_buffers
from vllm_ascend_moe.platform import logger

FEWEST_TOKENS = 2


class FewestTokensDispatcher:
    """vLLM's dispatcher of batch sizes, which rounds sizes below ``FEWEST_TOKENS`` up to it; all else is passed on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def dispatch(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's CudagraphDispatcher.dispatch."""
        return self._inner.dispatch(max(num_tokens, FEWEST_TOKENS), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class AscendMoECPUWorker(CPUWorker):
    """Used where experts are spread over more ranks than one TP group has."""

    def init_device(self) -> None:
        """As vLLM does, then rounds one-token steps up where the configuration makes MoE sequence parallel.

        Raises:
            UnsupportedError: the model runner has no dispatcher to do it with.
        """
        super().init_device()
        if self.parallel_config.use_sequence_parallel_moe:
            self._round_up_one_token_steps()

    def _round_up_one_token_steps(self) -> None:
        runner: Any = self.model_runner
        if not hasattr(runner, "cudagraph_dispatcher"):
            raise UnsupportedError(
                f"{type(runner).__name__} with tensor_parallel_size > 1, data parallelism and expert parallelism would "
                "give wrong answers for steps of one token. Set VLLM_USE_V2_MODEL_RUNNER=0."
            )
        runner.cudagraph_dispatcher = FewestTokensDispatcher(runner.cudagraph_dispatcher)
        # vLLM writes MLA's cache outside of the backend's forward, padded tokens too. Its CPU backends do not say so,
        # and would get slots for the real tokens only.
        MLACommonBackend.forward_includes_kv_cache_update = False

    def shutdown(self) -> None:
        """As vLLM does; then lets go of the buffers of dispatch, and says what they were."""
        super().shutdown()
        if text := describe_buffers():
            logger.info("Closing. %s", text)
        close_buffers()
