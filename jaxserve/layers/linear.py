"""Products with a weight: the one place that knows how each platform likes them written."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.layers.norm import HalfNormed, Residual, RMSNorm
from pallas_kernels import dispatch
from pallas_kernels.decode_matmul.api import choose, choose_adding, xla_splits
from pallas_kernels.decode_matmul.config import Config
from pallas_kernels.matmul.api import choose_gated
from sharding.place import Placement

# With more rows both ways to write a product are equally fast on the CPU, and the transpose costs.
_MAX_WEIGHT_FIRST_ROWS = 128


def linear(
    x: Float[Array, "T inputs"] | HalfNormed,
    weight: Float[Array, "*outputs inputs"],
    placement: Placement,
    *,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "T *outputs"]:
    """x times the weight, which is stored outputs first, as checkpoints have it.

    Of several output dimensions only the first may be split over devices: they are multiplied as
    one (given more, XLA may copy the whole weight to reorder them). On the CPU few rows are
    multiplied with the weight as left operand, which takes 0.5 to 0.8 of the time at 2 to 64 rows
    (a SmolLM2-135M step in float32, JAX 0.11.2); the barrier keeps XLA from turning the product
    around again.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    parts = _parts(x, matrix, placement)
    x = _whole(x)
    if parts is not None:
        product = sum_parts(parts, out_dtype or x.dtype)
    elif placement.on_cpu and x.shape[0] <= _MAX_WEIGHT_FIRST_ROWS:
        product = jnp.einsum("OI,TI->OT", matrix, x, preferred_element_type=out_dtype)
        product = jax.lax.optimization_barrier(product).T
    else:
        product = jnp.einsum("TI,OI->TO", x, matrix, preferred_element_type=out_dtype)
    return product.reshape(-1, *weight.shape[:-1])


def linear_in_parts(
    x: Float[Array, "T inputs"] | HalfNormed,
    weight: Float[Array, "*outputs inputs"],
    placement: Placement,
) -> Float[Array, "S T *outputs"]:
    """As `linear`, in parts whose sum it is; see `sum_parts`."""
    parts = _parts(x, weight.reshape(-1, weight.shape[-1]), placement)
    if parts is None:
        return linear(x, weight, placement)[None]
    return parts.reshape(*parts.shape[:-1], *weight.shape[:-1])


def sum_parts(parts: Float[Array, "S *rest"], dtype: DTypeLike) -> Float[Array, "*rest"]:
    return sum(parts[1:], start=parts[0]).astype(dtype)


def add_linear(
    stream: Residual,
    x: Float[Array, "T inputs"],
    weight: Float[Array, "outputs inputs"],
    placement: Placement,
    bias: nnx.Param | None,
    norm: RMSNorm | None = None,
) -> Residual:
    """The stream with `linear` and a bias to add to it, in parts where a kernel is to do so; with
    both added and `norm`, which comes next, half done where the product's kernel does.

    Inputs may be split over devices, whose sums are then added up.
    """
    if norm is not None and bias is None and x.dtype == weight.dtype == stream.hidden.dtype:
        config = choose_adding(placement.device_kind, x.shape[0], weight.shape, x.dtype)
        if config is not None:
            from pallas_kernels.decode_matmul.gpu import decode_matmul_add

            scale = norm.scale.get_value()
            hidden, scaled, squares = decode_matmul_add(
                x, weight, stream.sum(), scale, config=config
            )
            return Residual(hidden, normed=HalfNormed(scaled, squares, norm.eps))
    assert stream.addend is None
    addend = _parts(x, weight, placement) if bias is None else None
    if addend is None:
        addend = placement.constrain(linear(x, weight, placement), ("tokens", "embed"))
        addend = addend if bias is None else addend + bias.get_value()
        addend = addend[None] if adds_in_kernel(placement, addend.dtype) else addend
    return Residual(stream.hidden, addend)


def adds_in_kernel(placement: Placement, dtype: jnp.dtype) -> bool:
    """Whether `add_norm` takes what `add_linear` gives."""
    kind = placement.device_kind
    return kind is not None and dispatch.is_hopper(kind) and dtype.itemsize == 2


def gated_linear(
    x: Float[Array, "T inputs"] | HalfNormed,
    weight: Float[Array, "outputs 2 inputs"],
    placement: Placement,
    *,
    bias: Float[Array, "outputs 2"] | None = None,
) -> Float[Array, "T outputs"]:
    """silu(x gate) * (x up), of a weight that holds gate and up in pairs."""
    if bias is None and (product := _gated_in_kernel(x, weight, placement)) is not None:
        return product
    pairs = linear(x, weight, placement)
    if bias is not None:
        pairs = pairs + bias
    pairs = placement.constrain(pairs, ("tokens", "mlp", None))
    return jax.nn.silu(pairs[..., 0]) * pairs[..., 1]


def _whole(x: Float[Array, "T inputs"] | HalfNormed) -> Float[Array, "T inputs"]:
    return x.whole() if isinstance(x, HalfNormed) else x


def _gated_in_kernel(x, weight, placement) -> Float[Array, "T outputs"] | None:
    if (config := _config(x, weight, placement)) is not None:
        return _decode_matmul(x, weight, config, gated=True)
    x = _whole(x)
    config = choose_gated(placement.device_kind, x.shape[0], weight.shape, x.dtype)
    if config is None or x.dtype != weight.dtype:
        return None
    from pallas_kernels.matmul.gpu import gated_matmul

    return gated_matmul(x, weight, config=config)


def _parts(x, matrix, placement) -> Float[Array, "S T outputs"] | None:
    if (config := _config(x, matrix, placement)) is not None:
        return _decode_matmul(x, matrix, config)
    x = _whole(x)
    splits = xla_splits(placement.device_kind, x.shape[0], matrix.shape, x.dtype)
    if splits == 1 or x.dtype != matrix.dtype:
        return None
    x, matrix = (a.reshape(len(a), splits, -1) for a in (x, matrix))
    return jnp.einsum("TSI,OSI->STO", x, matrix, preferred_element_type=jnp.float32)


def _decode_matmul(x, weight, config: Config, *, gated: bool = False) -> Float[Array, "..."]:
    from pallas_kernels.decode_matmul.gpu import decode_matmul

    if isinstance(x, HalfNormed):
        return decode_matmul(x.scaled, weight, x.squares, config=config, gated=gated, eps=x.eps)
    return decode_matmul(x, weight, config=config, gated=gated)


def _config(x, weight, placement) -> Config | None:
    x = x.scaled if isinstance(x, HalfNormed) else x
    same = x.dtype == weight.dtype
    return choose(placement.device_kind, x.shape[0], weight.shape, x.dtype) if same else None
