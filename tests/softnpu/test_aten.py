"""Plain aten operators on NPU tensors: real torch_npu above, CPU kernels below."""

import pytest
import torch
import torch.nn.functional as F
from compare import same_on_npu

X = torch.linspace(-3, 3, 48).sin().view(6, 8)
I = torch.tensor([5, 0, 2])  # noqa: E741
H = X.bfloat16()


def set_item(t, index, value):
    t[index] = value
    return t


CASES = {
    "add": (lambda a: a + 1, X),
    "bfloat16 of a transpose": (lambda a: a.t().to(torch.bfloat16), X),
    "float of every second row": (lambda a: a.t()[::2].float(), H),
    "contiguous transpose": (lambda a: a.t().contiguous(), X),
    "clone keeps strides": (lambda a: a.t().clone(), X),
    "copy_ between strided views": (lambda a: (a[:, ::2].copy_(a[:, 1::2]), a)[1], X),
    "copy_ with a cast": (lambda a: torch.zeros(6, 8, device=a.device).copy_(a), H),
    "set a column": (lambda a: set_item(a, (slice(None), 3), 7.0), X),
    "matmul": (lambda a: a @ a.t(), X),
    "linear": (lambda a: F.linear(a, a, a[:, 0]), X),
    "bmm": (lambda a: torch.bmm(a[None], a.t()[None]), X),
    "index": (lambda a, i: a[i], X, I),
    "index_put": (lambda a, i: set_item(a, i, 1.0), X, I),
    "index with None": (lambda a, i: a[:, i[None]], X, I),
    "scatter": (lambda a, i: a.scatter(0, i[:, None], 0.5), X, I),
    "index_add_": (lambda a, i: a.index_add_(0, i, a[:3].clone()), X, I),
    "topk": (lambda a: torch.topk(a, 3), X),
    "sort": (lambda a: a.sort(), X),
    "cumsum": (lambda a: a.cumsum(0), X),
    "argmax": (lambda a: a.argmax(-1), X),
    "nonzero": (lambda a: (a > 0).nonzero(), X),
    "masked_select": (lambda a: a[a > 0], X),
    "where": (lambda a: torch.where(a > 0, a, 0.0), X),
    "bincount": (lambda i: torch.bincount(i, minlength=8), I),
    "repeat_interleave": (lambda a, i: torch.repeat_interleave(a[:3], i, 0), X, I),
    "cat": (lambda a: torch.cat([a, a], 1), X),
    "split": (lambda a: a.split([1, 7], 1), X),
    "pad": (lambda a: F.pad(a, (1, 2)), X),
    "embedding": (lambda i, a: F.embedding(i, a), I, X),
    "softmax": (lambda a: a.softmax(-1), X),
    "attention": (lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None]), X),
    "in place": (lambda a: a.mul_(2).add_(1), X),
    "out=": (lambda a: torch.add(a, a, out=torch.empty_like(a)), X),
    "out= that is resized": (lambda a: torch.add(a, a, out=torch.empty(0, device=a.device)), X),
    "foreach": (lambda a: torch._foreach_add([a, a], 1.0), X),
    "foreach in place": (lambda a: (torch._foreach_mul_([a], 2.0), a)[1], X),
    "view as another dtype": (lambda a: a.view(torch.int32), X),
    "view as complex": (lambda a: torch.view_as_real(torch.view_as_complex(a.view(6, 4, 2)) * 2j), X),
    "fp8 round trip": (lambda a: a.to(torch.float8_e4m3fn).float(), X),
    "expand": (lambda a: a[:1].expand(3, 8), X),
    "fill_diagonal_": (lambda a: a.fill_diagonal_(0), X),
    "no rows": (lambda a: a[:0] @ a.t(), X),
    "arange": (lambda i: torch.arange(5, device=i.device), I),
    "tensor": (lambda i: torch.tensor([1, 2, 3], device=i.device), I),
}


@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(name):
    same_on_npu(*CASES[name])


def test_results_of_views_share_memory():
    x = torch.zeros(4, 4, device="npu")
    x[1].add_(1)
    x.t()[2].mul_(5)
    x.view(-1)[0] = 9
    assert x.cpu().tolist() == [[9, 0, 0, 0], [1, 1, 5, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_gradients_are_torchs_own():
    def gradients(device):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 4).to(device)
        x = X.to(device).clone().requires_grad_()
        (layer(x).softmax(-1) @ layer.weight).gather(1, I.to(device)[:, None]).sum().backward()
        return [t.grad.cpu() for t in (x, layer.weight, layer.bias)]

    for want, give in zip(gradients("cpu"), gradients("npu"), strict=True):
        torch.testing.assert_close(give, want)


def test_generators_keep_their_meaning():
    generator = torch.Generator(device="npu")

    def draw():
        return torch.empty(5, device="npu").exponential_(generator=generator).cpu()

    generator.manual_seed(3)
    first, second = draw(), draw()
    state = generator.get_state()
    third = draw()
    assert not torch.equal(first, second)
    generator.manual_seed(3)
    assert torch.equal(draw(), first)
    generator.set_state(state)
    assert torch.equal(draw(), third)
    torch.npu.manual_seed(1)
    one = torch.rand(3, device="npu").cpu()
    torch.npu.manual_seed(1)
    assert torch.equal(torch.rand(3, device="npu").cpu(), one)


def test_host_and_device_copies():
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    there = torch.empty(4, device="npu")
    there.copy_(pinned, non_blocking=True)
    back = torch.empty(4).pin_memory()
    back.copy_(there * 2, non_blocking=True)
    torch.npu.synchronize()
    assert back.tolist() == [0, 2, 4, 6]
    assert torch.ones(3, device="npu:1").to("npu:0").sum().item() == 3


def test_the_device_describes_itself():
    assert torch.npu.device_count() == 8
    assert torch.npu.get_device_name() == "Ascend910B2"
    torch.npu.empty_cache()  # or the tensor below may get what an earlier test had
    free, total = torch.npu.mem_get_info()
    held = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert torch.npu.mem_get_info()[0] <= free - held.numel()
    assert total == 4 << 30


def test_private_formats_keep_their_values():
    """The format is torch_npu's; the layout stays plain, so that any operator can read it."""
    import torch_npu

    torch.npu.config.allow_internal_format = True
    try:
        x = torch.randn(17, 40).bfloat16()
        cast = torch_npu.npu_format_cast(x.npu(), 29)
        assert int(torch_npu.get_npu_format(cast)) == 29
        torch.testing.assert_close(cast.cpu(), x)
        torch.testing.assert_close((cast @ cast.t()).cpu(), x @ x.t())
        torch.testing.assert_close(torch_npu.npu_format_cast(cast, 2).cpu(), x)
    finally:
        torch.npu.config.allow_internal_format = False
