"""Grouped-query attention (arXiv:2305.13245) around a paged kernel that the caller brings."""

from typing import Protocol

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.layers.linear import add_linear, linear, linear_in_parts, sum_parts
from jaxserve.layers.norm import HalfNormed, Residual, RMSNorm
from jaxserve.layers.parameter import parameter
from jaxserve.layers.rope import rotate
from sharding.place import Placement


class RotateAndWrite(Protocol):
    """`paged_attention.api.rotate_and_write` of one step."""

    def __call__(
        self,
        qkv: Float[Array, "S T K G2 H"],
        cos: Float[Array, "T half"],
        sin: Float[Array, "T half"],
        kv_pages: Float[Array, "pages page_size 2*K H"],
        *,
        sliding_window: int | None,
    ) -> tuple[Float[Array, "T N H"], Float[Array, "pages page_size 2*K H"]] | None: ...


class Attention(nnx.Module):
    """Projections, norms of q and k where a model has them, rotary positions; the caller attends.

    Weights are grouped by kv head, so that splitting kv heads over devices keeps q, k and v of a
    group together:
    ```
    qkv [K, G+2, H, D]:  kv head 0: q q .. q k v | kv head 1: q q .. q k v | ...
                                    G times
    o   [D, K, G, H]
    ```
    K is the number of kv heads as stored (see `ModelConfig.stored_kv_heads`); N = K G.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        placement: Placement,
        dtype: DTypeLike,
    ):
        self.group = num_heads // num_kv_heads
        self.placement = placement
        qkv_shape = (num_kv_heads, self.group + 2, head_dim)
        qkv_axes = ("kv_heads", "group", "head")
        self.qkv = parameter((*qkv_shape, width), (*qkv_axes, "embed"), dtype, fan_in=width)
        self.qkv_bias = parameter(qkv_shape, qkv_axes, dtype, fan_in=width) if qkv_bias else None
        self.q_norm, self.k_norm = (
            None if qk_norm_eps is None else RMSNorm(head_dim, "head", qk_norm_eps, dtype)
            for _ in "qk"
        )
        self.o = parameter(
            (width, num_kv_heads, self.group, head_dim),
            ("embed", "kv_heads", "group", "head"),
            dtype,
            fan_in=num_heads * head_dim,
        )
        self.o_bias = parameter((width,), ("embed",), dtype, fan_in=width) if o_bias else None

    def project(
        self,
        x: Float[Array, "T D"] | HalfNormed,
        cos: Float[Array, "T half"],
        sin: Float[Array, "T half"],
        kv_pages: jax.Array,
        rotate_and_write: RotateAndWrite | None,
        *,
        sliding_window: int | None,
    ) -> tuple[
        Float[Array, "T N H"],
        Float[Array, "T K H"] | None,
        Float[Array, "T K H"] | None,
        jax.Array,
    ]:
        """Queries, keys and values of the tokens, with their positions turned in, and the pages.

        No keys and values where a kernel has written them to the pages already.
        """
        weight = self.qkv.get_value()
        if rotate_and_write and self.qkv_bias is None and self.q_norm is None:
            parts = linear_in_parts(x, weight, self.placement)
            written = rotate_and_write(parts, cos, sin, kv_pages, sliding_window=sliding_window)
            if written is not None:
                q, kv_pages = written
                return q, None, None, kv_pages
            qkv = sum_parts(parts, x.dtype)
        else:
            qkv = linear(x, weight, self.placement)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias.get_value()
        qkv = self.placement.constrain(qkv, ("tokens", "kv_heads", "group", "head"))
        q, k, v = qkv[:, :, : self.group], qkv[:, :, self.group], qkv[:, :, self.group + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # [T, K, G, H] -> [T, N, H]
        return q.reshape(q.shape[0], -1, q.shape[-1]), k, v, kv_pages

    def output(self, stream: Residual, o: Float[Array, "T N H"], norm: RMSNorm) -> Residual:
        """Back to model width, added to the stream or to be added, for `norm`: summed over heads,
        and over the devices that share them."""
        weight = self.o.get_value()
        # As matrices: of three contracted dimensions XLA may change the order, copying the weight.
        o, matrix = o.reshape(o.shape[0], -1), weight.reshape(weight.shape[0], -1)
        return add_linear(stream, o, matrix, self.placement, self.o_bias, norm)
