"""Named layouts: which mesh axis each logical axis of a parameter or activation is split over.

A logical axis that a layout does not name is whole on every device. Logical axes in use: tokens,
embed (model width), vocab, kv_heads, group (query heads of a kv head), head (head width), mlp (mlp
width).
"""

from collections.abc import Mapping
from types import MappingProxyType

type Layout = Mapping[str, str]


def _layout(**axes: str) -> Layout:
    return MappingProxyType(axes)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        # Heads and mlp width over devices, two sums a layer (arXiv:1909.08053 section 3).
        "tensor": _layout(vocab="tensor", kv_heads="tensor", mlp="tensor"),
        # The same with embedding and head whole on each device: memory for one exchange less.
        "tensor-whole-vocab": _layout(kv_heads="tensor", mlp="tensor"),
    }
)
