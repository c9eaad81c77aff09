"""Tiny MoE models with random weights and a byte-level tokenizer, written to a folder in a second.

Random weights are enough to test serving, provided that the answers are not ambiguous: weights are drawn wide, so that
every layer and every expert changes the logits, and tests check the margin between the best two tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_moe.errors import InvalidValueError

VOCAB_SIZE = 320
# Bytes are tokens 0..255; the rest of the vocabulary is special tokens, so that any id decodes.
BOS_ID, EOS_ID = 256, 257
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # As in the published models. It matters: vLLM 0.32 on CPU rotates wrongly without it, since its kernel for
    # plain rotary embeddings takes MLA's 3-D query for a 2-D one.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            **_MLA,
            "num_hidden_layers": 3,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            **_MLA,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
}
MODELS = tuple(_CONFIGS)


def make_tiny_model(
    kind: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Writes one model: configuration, weights (safetensors) and tokenizer.

    Args:
        kind: one of MODELS.
        folder: where; made if missing.
        seed: of the weights.
        dtype: of the weights.
        overrides: configuration values that differ from the tiny ones.

    Returns:
        ``folder``.

    Raises:
        InvalidValueError: an unknown kind.
    """
    if kind not in _CONFIGS:
        raise InvalidValueError("kind", kind, f"one of {', '.join(MODELS)}", "Choose one of these models.")
    import transformers
    from transformers.utils import logging

    # A progress bar for one small file only garbles the output of the demo and of tests.
    logging.disable_progress_bar()
    config_class, values = _CONFIGS[kind]
    config = getattr(transformers, config_class)(**{**_COMMON, **values, **overrides})
    config.dtype = dtype
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    _spread_router_biases(model)
    torch.set_rng_state(generator_state)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _spread_router_biases(model: torch.nn.Module) -> None:
    """The correction bias of grouped top-k starts at zero, which would not test it."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", *(f"<extra_{i}>" for i in range(VOCAB_SIZE - 258))]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials[:2]])
    tokenizer.add_tokens([AddedToken(text) for text in specials[2:]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json."""
    return json.loads((folder / "config.json").read_text())
