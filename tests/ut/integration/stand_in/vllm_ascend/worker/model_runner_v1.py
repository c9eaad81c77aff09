import torch


class NPUModelRunner:
    def _sync_metadata_across_dp(
        self,
        num_tokens: int,
        is_draft_model: bool = False,
        cudagraph_mode: str = "NONE",
        allow_dp_padding: bool = False,
    ) -> tuple[int, torch.Tensor | None, str]:
        agreed = [num_tokens, num_tokens + 2]
        counts = [max(agreed)] * 2 if allow_dp_padding or is_draft_model else agreed
        return max(agreed), torch.tensor(counts, dtype=torch.int32), cudagraph_mode
