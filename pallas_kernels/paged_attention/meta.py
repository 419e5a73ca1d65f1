"""What a step tells attention about its rows, and what stays the same from step to step."""

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Int

Kind = Literal["decode", "mixed"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMeta:
    """Which tokens belong to which sequence, and where their keys and values are kept.

    Rows with a single query that is the sequence's newest token come first (`num_decode_rows` of
    them), then rows with chunks, then padding rows. Tokens lie in row order without gaps; padding
    tokens come last.

        row      0   1   2        3       4 (padding)
        token    0   1   2 3 4 5  6 7 8   9 (padding)
        query_start = [0, 1, 2, 6, 9, 9]    num_decode_rows = 2

    In a "decode" call each row, padding rows too, has the same number of queries instead.

    Page 0 takes the writes of padding tokens and is never given to a sequence. Entries of
    `page_table` beyond a row's `kv_lens` may hold anything.
    """

    page_table: Int[Array, "S P"]
    kv_lens: Int[Array, "S"]  # cached tokens with this step's counted in; 0 for padding rows
    query_start: Int[Array, "S+1"]  # first token of each row; not read when kind is "decode"
    slot_mapping: Int[Array, "T"]  # page * page_size + offset at which a token's k and v go
    num_decode_rows: Int[Array, ""]  # not read when kind is "decode"


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static side of a call, hashable: what a kernel is compiled for; one device's sizes."""

    kind: Kind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: str
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    queries_per_row: int = 1  # of a "decode" call

    @property
    def group(self) -> int:
        """Query heads that share a kv head (G)."""
        return self.num_heads // self.num_kv_heads

    def shard(self, num_devices: int) -> "AttentionSpec":
        """What each of `num_devices` sees when heads are spread over them."""
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // num_devices,
            num_kv_heads=self.num_kv_heads // num_devices,
        )
