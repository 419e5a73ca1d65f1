"""Which implementation of a kernel to use on which device: one visible rule, no probing."""

from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.paged_attention.meta import AttentionSpec


def unsupported(impl: Implementation, platform: str, case: AttentionSpec) -> str | None:
    """Why `impl` can't do `case` on a platform, or None where it can."""
    if impl == "reference":
        return None
    if impl == "tpu":
        from pallas_kernels.paged_attention import tpu as kernel
    else:
        from pallas_kernels.paged_attention import gpu as kernel
    if platform != impl and (impl, platform) != ("gpu", "cuda"):
        return f"a {platform}"
    return kernel.unsupported(case)


def is_hopper(device_kind: str) -> bool:
    """Whether it has wgmma and TMA as the GPU kernels use them."""
    return any(name in device_kind for name in ("H100", "H200", "H800", "GH200"))


def choose(platform: str, device_kind: str, case: AttentionSpec) -> Implementation:
    """The fastest implementation of paged attention that does `case` on this device.

    platform and device_kind are `jax.Device`'s (cpu, gpu or tpu; "NVIDIA H200", "TPU v5 lite").
    case has one device's sizes.
    """
    if platform == "tpu":
        from pallas_kernels.paged_attention import tpu

        return "tpu" if tpu.unsupported(case) is None else "reference"
    if platform in ("gpu", "cuda"):
        from pallas_kernels.paged_attention import gpu

        return "gpu" if is_hopper(device_kind) and gpu.unsupported(case) is None else "reference"
    if platform == "cpu":
        return "reference"
    raise ValueError(f"platform is {platform!r}; allowed: cpu, gpu, tpu (device: {device_kind!r})")
