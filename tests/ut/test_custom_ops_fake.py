"""The fake implementations against the real ones, and the registration.

Proves that a fake, called directly or under FakeTensorMode, has exactly the real shape, strides, dtype and device for
any layout; that row counts of a traced graph are symbols; and that both operators exist for every device key. Does
not compile: test_custom_ops_compile.py does.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_world import GATHER_FAKE, REDUCE_FAKE, context, dp_metadata, gather, layout_context, ops, reduce
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.int64]
NAMES = [ops.GATHER_OP, ops.REDUCE_OP]


def looks(x):
    return tuple(x.shape), x.stride(), x.dtype, x.device


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    tail=st.lists(st.integers(0, 3), max_size=2),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["layout", "DP metadata", "SP sizes", "no metadata"]),
)
def test_fakes_called_directly_look_like_the_real_results(world, sizes, tail, dtype, kind):
    if kind == "no metadata":
        sizes = [sizes[0]] * len(sizes)

    def make_context(groups):
        if kind == "layout":
            return layout_context(sizes, groups.ep.rank_in_group)
        made = context(None if kind == "no metadata" else dp_metadata(sizes))
        if kind == "SP sizes":
            made.dp_metadata.local_sizes = list(sizes)
        return made

    def body(groups):
        x = torch.zeros(sizes[groups.ep.rank_in_group], *tail, dtype=dtype)
        out = gather(x)
        back = reduce(out)
        assert looks(GATHER_FAKE(x)) == looks(out)
        assert looks(REDUCE_FAKE(out)) == looks(back)
        assert looks(back) == looks(x)
        on_meta = REDUCE_FAKE(GATHER_FAKE(x.to("meta")))
        assert on_meta.device.type == "meta"
        assert on_meta.shape == x.shape

    world.sized(dp=len(sizes)).run(make_context, body)


@pytest.mark.parametrize("strided", [lambda x: x[:, ::2], lambda x: x.t()], ids=["x[:, ::2]", "transposed"])
@pytest.mark.parametrize("sizes", [[4], [4, 4], [4, 2]], ids=str)
def test_fakes_of_strided_inputs_are_contiguous_as_the_real_results(world, sizes, strided):
    def body(groups):
        x = strided(torch.zeros(4, 4))[: sizes[groups.ep.rank_in_group]]
        assert looks(GATHER_FAKE(x)) == looks(gather(x))
        y = strided(torch.zeros(4 * len(sizes), 4 * len(sizes)))
        assert looks(REDUCE_FAKE(y)) == looks(reduce(y))

    world.run_layout(sizes, body)


@pytest.mark.parametrize("kind", ["layout", "DP metadata"])
def test_row_counts_of_a_traced_graph_are_symbols(world, kind):
    """They depend on other ranks, which no input of the graph shows: a number would be baked in."""

    def make_context(groups):
        made = layout_context([3, 2], groups.ep.rank_in_group)
        return made if kind == "layout" else context(dp_metadata([3, 2]))

    def body(groups):
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            x = mode.from_tensor(torch.zeros([3, 2][groups.ep.rank_in_group], 8))
            out = gather(x)
            back = reduce(out)
            assert free_unbacked_symbols(out.shape[0])
            assert free_unbacked_symbols(back.shape[0])
            assert out.shape[0] % 2 == 0  # two ranks' rows, whatever the symbol
            assert (out.shape[1:], back.shape[1:]) == ((8,), (8,))
            assert (out.dtype, out.device) == (x.dtype, x.device)

    world.sized(dp=2).run(make_context, body)
    assert world.calls == [[], []]


def test_row_counts_without_metadata_follow_the_input(world):
    """All ranks have as many rows, so the count is the input's, and stays a plain function of its symbol."""

    def body(groups):
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            x = mode.from_tensor(torch.zeros(3, 8))
            out = gather(x)
            assert (tuple(out.shape), tuple(reduce(out).shape)) == ((6, 8), (3, 8))

    world.sized(dp=2).run(lambda groups: context(), body)


# -- registration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["CPU", "CUDA", "PrivateUse1"])
def test_both_operators_have_a_kernel_for_each_device(name, key):
    ops.register_custom_ops()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"vllm::{name}", key)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_functional(name):
    ops.register_custom_ops()
    schema = getattr(torch.ops.vllm, name).default._schema
    assert str(schema) == f"vllm::{name}(Tensor x) -> Tensor"
    assert not schema.is_mutable


def test_registering_again_is_harmless(world):
    assert ops.register_custom_ops() is False
    assert ops.register_custom_ops() is False
    world.run_layout([1, 2], lambda groups: reduce(gather(torch.zeros([1, 2][groups.ep.rank_in_group], 2))))


@pytest.mark.parametrize("name", ["get_forward_context", "get_ep_group", "get_dp_group", "get_pcp_group"])
def test_the_patchable_names_are_vllms_own(name):
    """Unpatched, they are the functions of vLLM."""
    import vllm.distributed
    import vllm.forward_context

    owner = vllm.forward_context if name == "get_forward_context" else vllm.distributed
    assert getattr(ops, name) is getattr(owner, name)
