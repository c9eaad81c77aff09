"""The tiny models test something: the experts, the router's bias and the shared expert change the next token's logits,
and the tokenizer gives back what it was given. Computed with the Transformers implementation, without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.testing.tiny_models import MODELS, make_tiny_model

_PROMPT = torch.randint(256, (1, 48), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _expert_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t for name, t in tensors.items() if "expert" in name or "e_score_correction_bias" in name}


@torch.no_grad()
def test_expert_tensors_change_the_logits(model: torch.nn.Module) -> None:
    before = model(_PROMPT).logits
    changed = 0
    for name, tensor in _expert_parameters(model).items():
        slots = (0, tensor.shape[0] // 2, tensor.shape[0] - 1) if tensor.dim() == 3 else [slice(None)]
        for slot in slots:
            saved = tensor[slot].clone()
            tensor[slot] = -saved
            assert not torch.allclose(model(_PROMPT).logits, before, atol=1e-3), f"{name}[{slot}] changes nothing"
            tensor[slot] = saved
            changed += 1
    assert changed >= 4


def test_same_seed_same_weights(tmp_path: Path) -> None:
    one, two, three = (make_tiny_model("mixtral", tmp_path / str(i), seed=s) for i, s in enumerate((5, 5, 6)))
    read = [(path / "model.safetensors").read_bytes() for path in (one, two, three)]
    assert read[0] == read[1] != read[2]


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_tiny_model("mixtral", tmp_path))
    text = "Grüße, 漢字!\n\ttab"
    ids = tokenizer.encode(text)
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="kind = 'gpt', but it must be one of qwen3_moe"):
        make_tiny_model("gpt", tmp_path)
