"""Model families, and how they are built. Importing this package itself imports no jax."""

from jaxserve.models.config import ModelConfig, shard_heads

__all__ = ["ModelConfig", "shard_heads"]
