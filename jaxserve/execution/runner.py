"""Runs steps: compiles every shape at start, keeps what lives on the device, and never compiles
afterwards.

A step is two calls, `forward` and `sample`; neither waits for the device. `collect` does, for the
sampled tokens.
"""

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.execution import sampling, slot_state, step, token_masks
from jaxserve.execution.buckets import Buckets, SampleKind, SampleShape, StepShape
from jaxserve.execution.lowering import Lowerers
from jaxserve.execution.programs import NUM_THREADS, Exported, Program, Programs
from jaxserve.memory import kv_cache
from jaxserve.models.registry import BuiltModel
from jaxserve.scheduler.sequence import Batch, Row
from jaxserve.types import ALL_LOGPROBS, BucketStats, ConfigError, TokenLogprobs, TokenSampling
from pallas_kernels.decode_matmul.api import BLOCK_ROWS, MAX_ROWS
from pallas_kernels.paged_attention.api import (
    Implementation,
    paged_attention,
    rotate_and_write,
)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def compiler_options(platform: str, shape: StepShape) -> dict[str, Any]:
    """Of a step. What was measured: an 8B Llama on an H200, JAX 0.11.2.

    A command buffer keeps kernels from starting before the ones ahead have ended (see
    `pallas_kernels.early_launch`), which is 1 to 4 % of a decode step of up to 256 rows. Before its
    first kernel may start it is brought up to date: 2 ms for a prefill, whose long kernels gain
    nothing from it. It saves the host half of what sending a step costs, and 1 % of a step of 480
    rows.

    Of products of more rows, which are XLA's, cuBLAS has the fastest; trying Triton's too takes a
    third of the time to compile a step.
    """
    if platform != "gpu":
        return {}
    options: dict[str, Any] = {}
    if shape.kind == "mixed" or shape.tokens <= MAX_ROWS:
        options["xla_gpu_enable_command_buffer"] = ""
    if shape.kind == "mixed" or shape.tokens > BLOCK_ROWS:
        options["xla_gpu_enable_triton_gemm"] = False
    return options


Progress = Callable[[str, int, int], None]
"""Called with what was compiled, how many are done, and of how many."""


@dataclasses.dataclass
class Pending:
    """A step that has been sent to the device and not been read."""

    batch: Batch
    sampled: sampling.Sampled
    pooled: jax.Array | None = None
    """f32[2, S, D]: each row's last hidden state, and the sum of them; for embeddings."""


@dataclasses.dataclass
class Collected:
    """A step's tokens, one for each of its batch's `sampling_rows`."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[TokenLogprobs]
    """One for each of its `scoring_rows`."""
    pooled: list[tuple[Row, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    """Rows of requests for embeddings: the last hidden state, and the sum of them."""


class Runner:
    """The compiled steps, and the device state that they pass on: KV pages, each slot's last token
    and what else the sampler keeps of a slot.

    All are donated to each step and replaced by what it returns.
    """

    def __init__(
        self,
        model: BuiltModel,
        mesh: jax.sharding.Mesh,
        buckets: Buckets,
        *,
        page_size: int,
        kv_dtype: jnp.dtype,
        attention: Implementation,
        embeddings: bool = False,
        programs: Programs | None = None,
        lowerers: Lowerers | None = None,
    ):
        """`embeddings`: mixed steps give what `Pending.pooled` holds. `programs`: compiles, and may
        keep what it compiled. `lowerers`: lower steps; `compile` closes them."""
        self.model = model
        self.buckets = buckets
        self.page_size = page_size
        self.num_pages = 0
        self.programs = programs or Programs()
        self._lowerers = lowerers
        self._mesh = mesh
        self._attention: Implementation = attention
        self._kv_dtype = kv_dtype
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._kv_sharding = model.placement.sharding((None, None, "kv_heads", None))
        self._steps: dict[StepShape, Any] = {}
        self._heads: dict[int, Any] = {}
        """By rows: what makes logits of a mixed step's rows."""
        self._samples: dict[SampleShape, Any] = {}
        self._masks: dict[int, Any] = {}
        """By rows: what applies token masks for the kinds of sampling that know none."""
        self._bucket_stats: dict[StepShape, BucketStats] = {}
        self._start_row: Any = None
        self._packer = step.Packer(buckets.max_num_seqs, buckets.pages, model.config.vocab_size)
        self._leaves: tuple[jax.Array, ...] = ()
        self._kv: tuple[jax.Array, ...] = ()
        self._last_token: jax.Array | None = None
        self._slots: slot_state.SlotState | None = None
        self._no_masks: dict[int, jax.Array] = {}
        """A mask that allows every token, by its number of rows."""
        self._compiles: CompileCounter | None = None
        self._embeddings = embeddings
        self._pooled: jax.Array | None = None
        """Of the step last sent, if it was mixed."""

    # ---- start-up

    @property
    def num_compiled(self) -> int:
        counts = len(self._steps), len(self._heads), len(self._samples), len(self._masks)
        return sum(counts) + (self._start_row is not None)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, on each device."""
        shape = self._kv_sharding.shard_shape(self._kv_shape(1))
        return int(np.prod(shape)) * self._kv_dtype.itemsize * self.model.config.num_layers

    def compile(
        self, num_pages: int | None, usable_bytes: int, most_kv_bytes: int, progress: Progress
    ) -> None:
        """Compiles every shape, and decides how many KV pages there are: `num_pages`, or what
        weights and steps leave of `usable_bytes` on each device, `most_kv_bytes` of it at the most.

        What steps need beside weights and pages is known once the largest is compiled. All are
        compiled for as many pages as an eighth of the memory leaves room for, and anew in the rare
        case that it needs more.
        Raises: ConfigError when not even one sequence of one page fits.
        """
        steps = self.buckets.steps()
        # the largest first: it decides, and none that is slow is left to run alone at the end
        steps.sort(key=lambda shape: (shape.tokens, shape.kind), reverse=True)
        rest: list[tuple[Callable[[Any], None], Any, str]] = [
            (self._compile_head, rows, f"head x {rows}") for rows in self.buckets.logit_rows
        ]
        rest += [(self._compile_sample, s, str(s)) for s in self.buckets.samples()]
        rest += [(self._compile_mask, r, f"mask x {r}") for r in self.buckets.logit_rows]
        rest.append((self._compile_start_row, None, "row start"))
        left = usable_bytes - self._weight_bytes - self._slot_bytes
        reserve = left // 8
        # beside those that work, one for each step that is lowered elsewhere
        num_threads = NUM_THREADS + (len(steps) if self._lowerers else 0)
        progress(str(steps[0]), 0, len(steps) + len(rest))
        with self.programs.open(), concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
            try:
                others: dict[concurrent.futures.Future[None], str] = {}
                while True:
                    if num_pages is None:
                        self.num_pages = self._pages_beside(reserve, left, most_kv_bytes)
                    else:
                        self.num_pages = num_pages
                    sent = {threads.submit(self._compile_step, s): str(s) for s in steps}
                    others = others or {threads.submit(f, what): shown for f, what, shown in rest}
                    if num_pages is not None:
                        break
                    next(iter(sent)).result()
                    temporary = self._steps[steps[0]].memory_analysis().temp_size_in_bytes
                    if temporary <= reserve:
                        break
                    reserve = int(temporary * 1.1)
                    for future in sent:
                        future.cancel()
                    self.num_pages = 0  # so those that are lowered elsewhere go no further
                    concurrent.futures.wait(sent)
                sent |= others
                for count, future in enumerate(concurrent.futures.as_completed(sent), start=1):
                    future.result()
                    progress(sent[future], count, len(sent))
            except BaseException:
                self._close_lowerers()
                threads.shutdown(cancel_futures=True)
                raise
        self._close_lowerers()

    def _close_lowerers(self) -> None:
        if self._lowerers is not None:
            self._lowerers.close()

    @property
    def _weight_bytes(self) -> int:
        """On each device."""
        return sum(
            int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
            for leaf in self.model.abstract.values()
        )

    @property
    def _slot_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in self._abstract_slots())

    def _pages_beside(self, reserve: int, left: int, most_kv_bytes: int) -> int:
        """How many pages fit in `left` bytes with `reserve` of them for steps.

        Raises: ConfigError for fewer than two.
        """
        fit = min(left - reserve, most_kv_bytes) // self.page_bytes
        most = self.buckets.max_num_seqs * self.buckets.pages + 1
        num_pages = min(kv_cache.round_down(max(fit, 0), 5), most)
        if num_pages < 2:
            raise ConfigError(
                f"memory_fraction leaves {max(left, 0) >> 20} MiB a device beside "
                f"{self._weight_bytes >> 20} MiB of weights, of which steps need {reserve >> 20}; "
                f"that is not enough for KV pages of {self.page_bytes >> 10} KiB"
            )
        return num_pages

    def start(self, leaves: Sequence[jax.Array]) -> None:
        """Takes the parameters (in the order of `model.abstract`) and allocates the KV pages."""
        self._leaves = tuple(leaves)
        self._kv = kv_cache.allocate(
            self._kv_shape(self.num_pages),
            self.model.config.num_layers,
            self._kv_dtype,
            self._kv_sharding,
        )
        self._last_token = jax.device_put(
            np.zeros(self.buckets.max_num_seqs, np.int32), self._replicated
        )
        self._slots = jax.jit(self._empty_slots, out_shardings=self._replicated)()
        for rows in self.buckets.logit_rows:
            mask = token_masks.all_allowed(rows, self._mask_words)
            self._no_masks[rows] = jax.device_put(mask, self._replicated)
        self._compiles = CompileCounter(threading.get_ident())
        jax.monitoring.register_event_duration_secs_listener(self._compiles)

    def close(self) -> None:
        """Stops counting compilations."""
        if self._compiles is not None:
            jax.monitoring.unregister_event_duration_listener(self._compiles)
            self._compiles = None

    @property
    def num_runtime_compiles(self) -> int:
        """Compilations since `start` in the thread that called it: always 0, or it's a fault."""
        return 0 if self._compiles is None else self._compiles.count

    @property
    def runtime_compile_s(self) -> float:
        """Seconds that they took."""
        return 0.0 if self._compiles is None else self._compiles.seconds

    @property
    def bucket_stats(self) -> tuple[BucketStats, ...]:
        """Of the step shapes that were used."""
        return tuple(self._bucket_stats.values())

    @property
    def kv_bytes(self) -> int:
        """Of the whole cache, over all devices."""
        return sum(pages.nbytes for pages in self._kv)

    # ---- steps

    def forward(self, batch: Batch) -> jax.Array:
        """Sends the batch's step to the device: KV written, logits of each row's last token,
        f32[rows, V]."""
        shape = self.buckets.step(batch.kind, batch.num_tokens, len(batch.rows))
        out = self.send(shape, self._packer.pack(batch, shape), len(batch.rows))
        used = self._bucket_stats.get(shape) or BucketStats(shape.kind, shape.tokens, 0, 0)
        self._bucket_stats[shape] = BucketStats(
            shape.kind, shape.tokens, used.num_steps + 1, used.num_tokens + batch.num_tokens
        )
        return out

    def send(self, shape: StepShape, packed: np.ndarray, num_seqs: int) -> jax.Array:
        """Sends a step with its packed inputs; logits of its `num_seqs` rows, and padding."""
        out, self._kv, *pooled = self._steps[shape](
            self._leaves, self._kv, self._last_token, packed
        )
        self._pooled = pooled[0] if pooled else None
        if shape.kind == "decode":
            return out
        return self._heads[self.buckets.num_logits(num_seqs)](self._leaves, out)

    def sample(
        self, batch: Batch, logits: jax.Array, grammar_masks: np.ndarray | None = None
    ) -> Pending:
        """Sends the sampling of the batch's rows to the device; the tokens stay there for the next
        step too.

        `grammar_masks`: u32[rows, ceil(V/32)], as step.Packer.pack_sampling has them. The logits
        are donated.
        """
        num_rows = logits.shape[0]
        given = self._packer.pack_sampling(batch, num_rows, grammar_masks)
        for packed in given.starts:
            self._slots = self._start_row(self._slots, packed)
        masks = self._no_masks[num_rows] if given.masks is None else given.masks
        if given.masks is not None and given.kind < SampleKind.FULL:
            logits = self._masks[num_rows](logits, masks)
        is_stateful = given.kind == SampleKind.STATEFUL
        sampled, self._last_token, slots = self._samples[SampleShape(given.kind, num_rows)](
            logits,
            self._last_token,
            given.options,
            masks if given.kind >= SampleKind.FULL else None,
            self._slots if is_stateful else None,
        )
        if is_stateful:
            self._slots = slots
        # those of all tokens are read only where a row asks for them
        for array in sampled[:-1]:
            if array.size:
                array.copy_to_host_async()
        pooled = self._pooled if any(row.sequence.pools for row in batch.rows) else None
        if pooled is not None:
            pooled.copy_to_host_async()
        return Pending(batch, sampled, pooled)

    def collect(self, pending: Pending) -> Collected:
        """Waits for a step's tokens."""
        collected = self._collect_tokens(pending)
        if pending.pooled is not None:
            last, total = np.asarray(pending.pooled)
            collected.pooled = [
                (row, last[r], total[r])
                for r, row in enumerate(pending.batch.rows)
                if row.sequence.pools
            ]
        return collected

    def _collect_tokens(self, pending: Pending) -> Collected:
        batch = pending.batch
        # the sampler ran over all rows of the step
        rows = [r for r, row in enumerate(batch.rows) if row.samples]
        tokens = np.asarray(pending.sampled.tokens)[rows].tolist()
        if not pending.sampled.logprobs.size:
            return Collected(tokens, [None] * len(tokens), [])
        read = LogprobReader(pending.sampled)
        logprobs = [
            read.row(r, row.sequence.request.sampling.logprobs, row.sequence.request.sampling)
            for r, row in zip(rows, batch.sampling_rows, strict=True)
        ]
        scored = [
            read.row(
                r, row.sequence.request.sampling.prompt_logprobs, row.sequence.request.sampling
            )
            for r, row in enumerate(batch.rows)
            if row.scores
        ]
        return Collected(tokens, logprobs, [one for one in scored if one is not None])

    # ---- compiling

    def _kv_shape(self, num_pages: int) -> tuple[int, int, int, int]:
        config = self.model.config
        return kv_cache.kv_shape(num_pages, self.page_size, self.model.kv_heads, config.head_dim)

    def _array(self, shape: Sequence[int], dtype: Any, sharding: NamedSharding | None = None):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self._replicated)

    @functools.cached_property
    def _traits(self) -> tuple[Any, ...]:
        """What programs are made from, beside their own shape and arguments."""
        model = self.model
        return model.config, model.placement.layout, self.page_size, self._attention

    @property
    def _precision(self) -> str | None:
        """GPUs and TPUs round the operands of a float32 product unless told not to."""
        is_exact = self._kv_dtype == jnp.float32 and not self.model.placement.on_cpu
        return "highest" if is_exact else None

    def _compile_step(self, shape: StepShape) -> None:
        self._steps[shape] = self.programs.get(self.step_program(shape))

    def step_program(self, shape: StepShape) -> Program:
        """A step for the mesh's devices, which need not be here to lower it."""
        num_pages = self.num_pages  # which `compile` may change meanwhile
        kv = tuple(
            self._array(self._kv_shape(num_pages), self._kv_dtype, self._kv_sharding)
            for _ in range(self.model.config.num_layers)
        )
        return Program(
            name=f"forward_{shape.kind}_{shape.tokens}x{shape.seqs}",
            function=functools.partial(self._forward, shape=shape),
            arguments=(
                tuple(self.model.abstract.values()),
                kv,
                self._array((self.buckets.max_num_seqs,), jnp.int32),
                self._array((step.packed_size(shape),), jnp.int32),
            ),
            traits=(*self._traits, shape, self._num_rows(shape)),
            donate=(1,),
            out_shardings=(self._replicated, self._kv_sharding, *self._pooled_sharding(shape)),
            precision=self._precision,
            options=compiler_options(self._mesh.devices.flat[0].platform, shape),
            elsewhere=self._lowerers
            and functools.partial(self._lower_elsewhere, self._lowerers, shape, num_pages),
        )

    def _lower_elsewhere(
        self, lowerers: Lowerers, shape: StepShape, num_pages: int
    ) -> Exported | None:
        exported = lowerers.export(shape, num_pages)
        if self.num_pages != num_pages:  # `compile` has begun anew
            raise concurrent.futures.CancelledError
        return exported

    def _num_rows(self, shape: StepShape) -> int:
        """Of a step's output: logits of a decode step, hidden states of a mixed one."""
        if shape.kind == "decode":
            return self.buckets.num_logits(shape.seqs)
        return self.buckets.max_num_seqs

    def _compile_head(self, rows: int) -> None:
        config, dtype = self.model.config, next(iter(self.model.abstract.values())).dtype
        program = Program(
            name=f"head_{rows}",
            function=functools.partial(self._head, rows=rows),
            arguments=(
                tuple(self.model.abstract.values()),
                self._array((self.buckets.max_num_seqs, config.hidden_size), dtype),
            ),
            traits=(*self._traits, rows),
            donate=(),
            out_shardings=self._replicated,
            precision=self._precision,
        )
        self._heads[rows] = self.programs.get(program)

    @property
    def _mask_words(self) -> int:
        return token_masks.mask_words(self.model.config.vocab_size)

    def _empty_slots(self) -> slot_state.SlotState:
        return slot_state.empty(self.buckets.max_num_seqs, self.model.config.vocab_size)

    def _abstract_slots(self) -> Any:
        """A SlotState of shapes and types."""
        shapes = jax.eval_shape(self._empty_slots)
        return jax.tree.map(lambda x: self._array(x.shape, x.dtype), shapes)

    def _pooled_sharding(self, shape: StepShape) -> tuple[NamedSharding, ...]:
        """Of the third output of steps that have one."""
        return (self._replicated,) if self._embeddings and shape.kind == "mixed" else ()

    def _compile_sample(self, shape: SampleShape) -> None:
        masks = self._array((shape.rows, self._mask_words), jnp.uint32)
        program = Program(
            name=f"sample_{shape.kind.name.lower()}_{shape.rows}",
            function=functools.partial(_sample, kind=shape.kind),
            arguments=(
                self._array((shape.rows, self.model.config.vocab_size), jnp.float32),
                self._array((self.buckets.max_num_seqs,), jnp.int32),
                self._array((len(step.RowOptions._fields), shape.rows), jnp.int32),
                masks if shape.kind >= SampleKind.FULL else None,
                self._abstract_slots() if shape.kind == SampleKind.STATEFUL else None,
            ),
            traits=(shape,),
            donate=(1, 4),
            out_shardings=self._replicated,
        )
        self._samples[shape] = self.programs.get(program)

    def _compile_start_row(self, _: None) -> None:
        packed = self._array((slot_state.PACKED_SIZE,), jnp.int32)
        program = Program(
            name="start_row",
            function=slot_state.start_row,
            arguments=(self._abstract_slots(), packed),
            traits=(),
            donate=(0,),
            out_shardings=self._replicated,
        )
        self._start_row = self.programs.get(program)

    def _compile_mask(self, rows: int) -> None:
        program = Program(
            name=f"mask_{rows}",
            function=sampling.apply_mask,
            arguments=(
                self._array((rows, self.model.config.vocab_size), jnp.float32),
                self._array((rows, self._mask_words), jnp.uint32),
            ),
            traits=(),
            donate=(0,),
            out_shardings=self._replicated,
        )
        self._masks[rows] = self.programs.get(program)

    def _forward(self, leaves, kv, last_token, packed, *, shape: StepShape):
        token_ids, positions, meta, logit_rows = step.unpack(
            packed, last_token, shape, self.page_size
        )

        def attend(q, k, v, kv_pages, *, sliding_window, sm_scale):
            return paged_attention(
                q,
                k,
                v,
                kv_pages,
                meta,
                sm_scale=sm_scale,
                kind=shape.kind,
                sliding_window=sliding_window,
                impl=self._attention,
                mesh=self._mesh,
            )

        def write(qkv, cos, sin, kv_pages, *, sliding_window):
            return rotate_and_write(
                qkv,
                cos,
                sin,
                kv_pages,
                meta,
                kind=shape.kind,
                sliding_window=sliding_window,
                impl=self._attention,
                mesh=self._mesh,
            )

        model = self.model.merge(leaves)
        hidden, kv = model.forward(token_ids, positions, kv, attend, write)
        pooled = ()
        if self._pooled_sharding(shape):
            pooled = (pool(model.states(hidden), meta.query_start, logit_rows),)
        if shape.kind == "mixed":
            hidden = hidden[logit_rows]
        hidden = jnp.pad(hidden, ((0, self._num_rows(shape) - shape.seqs), (0, 0)))
        return model.logits(hidden) if shape.kind == "decode" else hidden, kv, *pooled

    def _head(self, leaves, hidden, *, rows: int):
        return self.model.merge(leaves).logits(hidden[:rows])


def pool(
    states: Float[Array, "T D"], query_start: Int[Array, "S1"], last: Int[Array, " S"]
) -> Float[Array, "2 S D"]:
    """Each sequence's last state, and the sum of its states, in float32."""
    states = states.astype(jnp.float32)
    token = jnp.arange(states.shape[0])
    is_own = (token >= query_start[:-1, None]) & (token < query_start[1:, None])
    total = jnp.einsum("ST,TD->SD", is_own.astype(jnp.float32), states, precision="highest")
    return jnp.stack([states[last], total])


class CompileCounter:
    """Counts what JAX compiles in one thread, and the seconds; others may run JAX code of their
    own."""

    def __init__(self, thread_id: int):
        self.count = 0
        self.seconds = 0.0
        self._thread_id = thread_id

    def __call__(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == COMPILE_EVENT and threading.get_ident() == self._thread_id:
            self.count += 1
            self.seconds += duration_secs


class LogprobReader:
    """The log-probabilities of a step's rows, as the host takes them apart."""

    def __init__(self, sampled: sampling.Sampled):
        self._sampled = sampled
        self._chosen = np.asarray(sampled.logprobs)
        self._top_ids = np.asarray(sampled.top_ids)
        self._top = np.asarray(sampled.top_logprobs)
        self._named = np.asarray(sampled.named_logprobs)

    def row(self, r: int, count: int | None, options: TokenSampling) -> TokenLogprobs | None:
        """Of row `r`, with the `count` likeliest tokens; None where nothing is asked for."""
        named = options.token_ids_logprob
        if count is None and not named:
            return None
        if count == ALL_LOGPROBS:
            row = self._all[r]
            ids = np.argsort(-row, kind="stable")
            top = row[ids]
        else:
            ids, top = self._top_ids[r, : count or 0], self._top[r, : count or 0]
        return TokenLogprobs(
            float(self._chosen[r, 0]),
            ids.tolist(),
            top.tolist(),
            self._named[r, : len(named)].tolist() if named else [],
        )

    @functools.cached_property
    def _all(self) -> np.ndarray:
        return np.asarray(self._sampled.all_logprobs)


def _sample(logits, last_token, packed, masks, state, *, kind: SampleKind):
    options = step.RowOptions.unpack(packed)
    sampled, state = sampling.sample(logits, options, masks, state, kind)
    return sampled, last_token.at[options.token_slot].set(sampled.tokens, mode="drop"), state
