"""The oracle: torch_npu's own host code says what operators return."""

import pytest
import torch

from vllm_ascend_moe.softnpu.contract import contract, expected
from vllm_ascend_moe.softnpu.errors import ContractError
from vllm_ascend_moe.softnpu.overrides import emulate as emulation
from vllm_ascend_moe.softnpu.overrides.emulate import emulate, emulated

X = torch.randn(4, 16, dtype=torch.bfloat16).npu()
GAMMA = torch.ones(16, dtype=torch.bfloat16).npu()


def test_an_emulated_operator_keeps_its_contract():
    y, rstd = contract("npu::npu_rms_norm", X, GAMMA, epsilon=1e-5)
    assert y.shape == X.shape
    assert rstd.isfinite().all()


def test_the_oracle_knows_operators_that_are_not_emulated():
    assert expected("npu::npu_fast_gelu", X) == [((4, 16), torch.bfloat16)]


def test_the_oracle_says_what_torch_npu_says_of_wrong_calls():
    with pytest.raises(RuntimeError, match=r"npu_rms_norm|rms_norm|gamma|same device"):
        expected("npu::npu_rms_norm", X, GAMMA.cpu())


def test_a_broken_contract_is_found(monkeypatch):
    monkeypatch.setattr(emulation, "_names", {*emulated()})  # test_command.py compares the whole list
    emulate("npu::npu_fast_gelu", lambda self: torch.zeros(2, 2))
    with pytest.raises(
        ContractError, match=r"returns \[\(\(2, 2\), torch.float32\)\]; .* \[\(\(4, 16\), torch.bfloat16\)"
    ):
        contract("npu::npu_fast_gelu", X)
