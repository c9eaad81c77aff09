"""The token layouts of one forward: made once, when the forward begins, and read by every MoE layer.

A layer communicates over one of three groups, known from its configuration and never guessed from a shape:

- ``"ep"``: all EP ranks. The layer's input is spread over DP, PCP and TP ranks (sequence parallelism).
- ``"dp"``: the DP ranks of one TP rank. The input is the DP rank's, repeated on its TP ranks.
- ``"pcp"``: the PCP ranks of one TP rank, without data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from vllm_ascend_moe.errors import LayoutError
from vllm_ascend_moe.layout import TokenLayout

GroupName = Literal["ep", "dp", "pcp"]

# Key in vLLM's ForwardContext.additional_kwargs.
FORWARD_LAYOUTS_KEY = "ascend_moe_layouts"


@dataclass
class ForwardLayouts:
    """Layouts by group name, and which of them the layer that runs now uses (None: no layer has said).

    It belongs to one forward, so what a layer leaves here between its dispatch and its combine is safe from other
    forwards.
    """

    by_group: dict[GroupName, TokenLayout] = field(default_factory=dict)
    active: GroupName | None = None
    part: TokenLayout | None = None
    """Of a layer that takes its tokens in several passes: the layout of the pass that runs now."""
    handle: object = None
    """What the combine of the pass that runs now needs from its dispatch."""
    passes: list[str] = field(default_factory=list)
    """Strategies of the passes so far, for the trace."""

    @contextmanager
    def use(self, group: GroupName | None, part: TokenLayout | None = None) -> Iterator[None]:
        """Selects the group of the layer that runs inside the ``with`` block, and the layout of its pass, if not all
        tokens of the group's layout take part."""
        before = self.active, self.part
        self.active, self.part = group, part
        try:
            yield
        finally:
            self.active, self.part = before

    def layout(self) -> TokenLayout:
        """The layout of the pass that runs now, else of the active group.

        Raises:
            LayoutError: this forward has no layout for that group.
        """
        if self.part is not None:
            return self.part
        layout = None if self.active is None else self.by_group.get(self.active)
        if layout is None:
            raise LayoutError(
                "group",
                self.active,
                f"one of {sorted(self.by_group)}, the groups with token counts in this forward",
                "Run the layer inside vLLM's set_forward_context with num_tokens_across_dp.",
            )
        return layout
