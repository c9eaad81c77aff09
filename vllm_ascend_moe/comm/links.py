"""Links between ranks, as the cost model sees them, with where each figure comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_ascend_moe.errors import InvalidValueError

# More ranks than any group has: one node holds them all.
ALL_RANKS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Link:
    """What it takes to move bytes between ranks. Bandwidths are one rank's, in one direction, in 1e9 bytes a second.

    Args:
        name: for messages.
        collective_us: from the call of a collective of no bytes until its result can be used, microseconds.
        sync_us: the host waits for a value from the device, microseconds.
        gb_per_s: to ranks of the same node.
        ranks_per_node: L; node_gb_per_s: to ranks of other nodes.
        device: type of the ranks' devices.
        uneven: how the backend's collectives of uneven sizes move a row: "copies", from its rank to every other one;
            "forwarded", from rank to rank; "none": it has none. uneven_ranks: up to how many ranks it has them.
        mc2_by_network: mc2 sends rows over the network between nodes also within one.
        source: where the figures come from: measured, published or assumed.

    Raises:
        InvalidValueError: a bandwidth or a node size that is not above 0.
    """

    name: str
    collective_us: float
    sync_us: float
    gb_per_s: float
    ranks_per_node: int = ALL_RANKS
    node_gb_per_s: float = float("inf")
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    uneven: Literal["none", "copies", "forwarded"] = "none"
    uneven_ranks: int = ALL_RANKS
    mc2_by_network: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("gb_per_s", "ranks_per_node", "node_gb_per_s"):
            if not getattr(self, field) > 0:
                raise InvalidValueError(f"link.{field}", getattr(self, field), "above 0", "Pass the link's figure.")


LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link(
            name="gloo",
            collective_us=300,
            sync_us=0,
            gb_per_s=0.55,
            source="measured: 2 processes on 2 cores of an EPYC, benchmarks/results/comm_gloo.json, smallest times of "
            "1 token and medians of 512",
        ),
        Link(
            name="nvlink",
            collective_us=25,
            sync_us=30,
            gb_per_s=450,
            ranks_per_node=8,
            node_gb_per_s=50,
            device="cuda",
            uneven="forwarded",
            source="published: H200, NVLink 900 GB/s both ways, one 400 Gb/s adapter a GPU; measured, without a "
            "result file here: about 25 us of host time a bare NCCL collective on two H200; assumed: sync, uneven "
            "sizes as broadcasts and reductions in rings",
        ),
        Link(
            name="atlas-a2",
            collective_us=25,
            sync_us=30,
            gb_per_s=196,
            ranks_per_node=8,
            node_gb_per_s=25,
            device="npu",
            uneven="copies",
            uneven_ranks=8,
            mc2_by_network=True,
            source="published: Atlas 800T A2, HCCS full mesh 392 GB/s an NPU both ways, 200 Gb/s RoCE an NPU, uneven "
            "collectives within one host, mc2's full mesh over RDMA; assumed: times, as on NCCL, uneven sizes sent "
            "directly",
        ),
        Link(
            name="atlas-a3",
            collective_us=25,
            sync_us=30,
            gb_per_s=196,
            ranks_per_node=768,
            node_gb_per_s=25,
            device="npu",
            uneven="copies",
            uneven_ranks=16,
            source="published: CloudMatrix384 (arXiv 2506.12708), 392 GB/s one way and 400 Gb/s RDMA an NPU of two "
            "dies, a rank being a die, one supernode of 768, uneven collectives within one host; "
            "assumed: times, as on NCCL, uneven sizes sent directly",
        ),
    )
}


def find_link(name: str) -> Link:
    """A link by name.

    Raises:
        InvalidValueError: there is none of this name.
    """
    try:
        return LINKS[name]
    except KeyError:
        raise InvalidValueError("link", name, f"one of {', '.join(LINKS)}", "Choose one of them.") from None


def link_of(device_type: str, device_name: str = "") -> Link:
    """The link between devices of a type; NPUs are told apart by their name (``torch.npu.get_device_name()``).

    Raises:
        InvalidValueError: an unknown type.

    >>> link_of("npu", "Ascend910_9391").name, link_of("npu", "Ascend910B2").name
    ('atlas-a3', 'atlas-a2')
    """
    npu = "atlas-a3" if device_name.startswith("Ascend910_93") else "atlas-a2"
    names = {"cpu": "gloo", "cuda": "nvlink", "npu": npu}
    if device_type not in names:
        raise InvalidValueError("device_type", device_type, f"one of {', '.join(names)}", "Run on one of these.")
    return LINKS[names[device_type]]
