"""Programmatic dependent launch (CUDA programming guide): a kernel may start before the one ahead
of it on the stream has ended, where that one allows it, and must then wait before it touches what
others on the stream write or read.

    kernel N     starts, allows ─── works ──────────── ends
    kernel N+1                  starts, reads weights ─ waits ─ works ...

So what a launch costs, and the first bytes of weights, are hidden behind the kernel ahead. A small
kernel allows at once, one that reads much with its last copies: earlier, the next one's would only
take bandwidth from it (1 to 2 % of a decode step, H200). One ahead of attention waits first, since
attention reads old cache and its plan before it waits. Every kernel that allows must also wait:
then all that came before kernel N has ended too.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu


def allow_next(interpret: Any = None) -> None:
    """Lets the next kernel start as soon as every thread block of this one has come here."""
    if interpret is None:  # Pallas's interpreter has no launches
        plgpu.griddepcontrol_launch_dependents()


def wait_for_inputs(interpret: Any = None) -> None:
    """Waits, in the threads that call it, until the kernels ahead have ended and what they wrote
    can be read. Only what is older may be read before: weights, and what was there when the kernel
    ahead started, if that one waits before it allows (see `paged_attention.gpu_decode`)."""
    if interpret is None:
        plgpu.griddepcontrol_wait()
