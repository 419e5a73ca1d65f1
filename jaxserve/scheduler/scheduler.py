"""Decides what each step computes, and owns sequences, slots and pages.

The loop schedules a step while the one before is still on the device, and commits that one after:

    batch = scheduler.schedule()        # step N+1; may use tokens of step N, still on the device
    ...                                 # pack and send it
    scheduler.commit(before, tokens)    # step N

Slots and pages that a sequence gives up may be handed out again at once, although the step in
flight still uses them: the device runs steps in order, so whatever the old holder writes, the new
one overwrites before it reads.
"""

import bisect
import dataclasses
from collections import deque

from jaxserve.memory.page_pool import PagePool
from jaxserve.memory.radix_cache import RadixCache
from jaxserve.scheduler.policy import POLICIES, RANKS
from jaxserve.scheduler.sequence import Batch, Committed, PageUpdate, Row, Sequence
from jaxserve.types import ContextExceeded, EngineStats, FinishReason, InvalidRequest, Request

NEVER = 1 << 62
"""A position that no sequence reaches."""

MATCH_REFRESH_STEPS = 16
"""How old the policy's knowledge of cached prefixes may get."""


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of memory, all decided (compare EngineConfig)."""

    max_num_seqs: int
    max_batched_tokens: int
    """Tokens of one step; at least `max_num_seqs`, so that every running sequence can take one."""
    max_model_len: int
    page_size: int
    num_pages: int
    """Page 0, which is never handed out, included."""
    policy: str = "fcfs"
    prefix_cache: bool = True

    def __post_init__(self):
        assert self.max_batched_tokens >= self.max_num_seqs >= 1, self
        assert min(self.num_pages - 1, self.page_size, self.max_model_len) >= 1, self

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request, prompt and generated: what the context and all pages hold."""
        return min(self.max_model_len, (self.num_pages - 1) * self.page_size)


class Scheduler:
    """Continuous batching over paged memory with shared prefixes.

    Progress: pages go to running sequences in the order of their admission, to those
    of a lower rank first, and one that finds none takes them from the last. So the first always
    advances: alone, it fits, because `add` refuses what doesn't. What is preempted goes to the
    front of the line.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.cache = RadixCache(self.pool, config.page_size)
        self.policy = POLICIES[config.policy]
        self._rank = RANKS[config.policy]
        self.sequences: dict[str, Sequence] = {}
        """Those not finished, by request id."""
        self.waiting: list[Sequence] = []
        """Preempted ones first, then by arrival."""
        self.running: list[Sequence] = []
        """By rank (see policy), then in the order of admission."""
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.in_flight: deque[Batch] = deque()
        """Scheduled and not committed, oldest first."""
        self.cache_version = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.num_forced_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def add(self, request: Request, *, ready: bool = True) -> Sequence:
        """Puts a request in line; it's not admitted before its `is_ready`.

        Raises: ContextExceeded if it could never fit, InvalidRequest if it has no tokens or its id
        is in use.
        """
        num_prompt, max_tokens = len(request.token_ids), request.sampling.max_tokens
        limit = self.config.max_request_tokens
        if not num_prompt:
            raise InvalidRequest("prompt", "is empty; allowed: at least one token")
        if request.request_id in self.sequences:
            raise InvalidRequest(
                "request_id", f"{request.request_id!r} is in use by another request"
            )
        if num_prompt >= limit:
            raise ContextExceeded(
                "prompt", f"has {num_prompt} tokens; allowed: at most {limit - 1}"
            )
        if num_prompt + max_tokens > limit:
            raise ContextExceeded(
                "max_tokens",
                f"is {max_tokens}, with the prompt's {num_prompt} tokens "
                f"{num_prompt + max_tokens}; allowed: {limit} in all",
            )
        sequence = self.sequences[request.request_id] = Sequence.of(request)
        sequence.is_ready = ready
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Ends a request now and gives its pages back; False if there is no such request any more.

        What a step in flight samples for it is dropped at commit.
        """
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, reason)
        return sequence is not None

    def schedule(self) -> Batch | None:
        """The next step, or None if nothing can be computed before tokens in flight are committed.

        Each running sequence may take a token; what else the budget has goes to those that have
        more to compute, in the order of `running`, then to new ones. The batch must be run, and
        packed before anything else is called here.
        """
        decodes: list[Row] = []
        scored: list[Row] = []
        others: list[Row] = []
        updates: list[PageUpdate] = []
        admitted: list[Sequence] = []
        running, page_size = self.running, self.config.page_size
        spare = self.config.max_batched_tokens - len(running)
        # rows that no running sequence needs, for the prompts being scored
        spare_rows = self.config.max_num_seqs - len(running)
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(running):  # preemption shortens it from the end
            sequence = running[index]
            index += 1
            total = len(sequence.token_ids) + sequence.num_pending
            if total >= sequence.max_total:  # its last token is in flight
                spare += 1
                spare_rows += 1
                continue
            start = sequence.num_computed
            is_scoring = start < sequence.num_prompt and sequence.is_scoring
            num_tokens = total - start
            if num_tokens > 1:
                num_tokens = min(num_tokens, 1 + spare)
                if is_scoring:
                    num_tokens = min(num_tokens, _room_to_score(sequence, 1 + spare_rows))
            if start + num_tokens > len(sequence.pages) * page_size:
                num_tokens = self._grow(sequence, num_tokens)
            if num_tokens:
                row = self._advance(sequence, num_tokens, updates)
                if is_scoring:
                    spare_rows -= _add_rows_to_score(row, scored, others) - 1
                else:
                    is_decode = num_tokens == 1 and row.samples and not sequence.pools
                    (decodes if is_decode else others).append(row)
            spare -= num_tokens - 1

        # Whoever was just preempted would be the first to come back: not in the same step.
        if (
            self.waiting
            and spare > 0
            and spare_rows > 0
            and self.free_slots
            and num_preemptions == self.num_preemptions
        ):
            waiting = self.waiting
            if not all(sequence.is_ready for sequence in waiting):
                waiting = [sequence for sequence in waiting if sequence.is_ready]
            for sequence in self.policy(waiting, self._num_matched):
                if min(spare, spare_rows) <= 0 or not self.free_slots or not self._admit(sequence):
                    break
                if not sequence.num_preemptions:
                    admitted.append(sequence)
                num_tokens = min(spare, len(sequence.token_ids) - sequence.num_computed)
                is_scoring = sequence.is_scoring
                if is_scoring:
                    num_tokens = min(num_tokens, _room_to_score(sequence, spare_rows))
                num_tokens = self._grow(sequence, num_tokens)
                row = self._advance(sequence, num_tokens, updates)
                spare -= num_tokens
                if is_scoring:
                    spare_rows -= _add_rows_to_score(row, scored, others)
                else:
                    is_decode = num_tokens == 1 and row.samples and not sequence.pools
                    (decodes if is_decode else others).append(row)
                    spare_rows -= 1

        decodes += scored
        rows = decodes + others if others else decodes
        if not rows:
            return None
        num_tokens = len(decodes) + sum(row.num_tokens for row in others)
        sampling_rows = decodes
        if others or scored:
            sampling_rows = [row for row in rows if row.samples]
        batch = Batch(rows, len(decodes), num_tokens, sampling_rows, updates, admitted)
        self.num_steps += 1
        self.computed_tokens += num_tokens
        self.in_flight.append(batch)
        return batch

    def commit(self, batch: Batch, tokens: list[int]) -> list[Committed]:
        """Makes the tokens that `batch` sampled known and finishes the sequences that they end.

        `tokens` has one for each of `batch.sampling_rows`, negative where the model's output was no
        number: that ends the sequence with `error`. Those of requests that ended meanwhile
        are dropped, those of preempted ones count; a grammar may add to one, or replace it.
        Batches are committed in the order they were scheduled, also those that sample nothing.
        """
        oldest = self.in_flight.popleft()
        assert batch is oldest, "batches must be committed in the order they were scheduled"
        committed: list[Committed] = []
        for index, (row, token) in enumerate(zip(batch.sampling_rows, tokens, strict=True)):
            sequence = row.sequence
            if sequence.status == "finished":
                continue
            sequence.num_pending -= 1
            new: list[int] = []
            reason: FinishReason | None = None
            if token < 0:
                reason = "error"
            elif sequence.matcher is None:
                new = [token]
            else:
                new, reason = self._follow_grammar(sequence, token)
            token_ids, stop_token_ids = sequence.token_ids, sequence.stop_token_ids
            for count, one in enumerate(new, start=1):
                token_ids.append(one)
                if (
                    one in stop_token_ids
                    and sequence.num_generated >= sequence.request.sampling.min_tokens
                ):
                    new, reason = new[:count], "stop"
                    break
            if reason is None and len(token_ids) >= sequence.max_total:
                reason = "length"
            self.generated_tokens += len(new)
            if reason:
                self._finish(sequence, reason)
            if new or reason:
                committed.append(Committed(index, sequence, new, reason))
        return committed

    def commit_scores(self, batch: Batch) -> list[tuple[int, Sequence]]:
        """Makes the log-probabilities of prompts known that `batch` brought; before its `commit`.

        Returns which of its `scoring_rows` count, with their sequences: not those of requests that
        ended, nor what a preempted sequence computed again.
        """
        news: list[tuple[int, Sequence]] = []
        for index, row in enumerate(batch.scoring_rows):
            sequence = row.sequence
            if sequence.status != "finished" and row.start == sequence.num_scored:
                sequence.num_scored += 1
                news.append((index, sequence))
        return news

    def _follow_grammar(
        self, sequence: Sequence, token: int
    ) -> tuple[list[int], FinishReason | None]:
        """What a sequence goes on with after a sampled token.

        Where that isn't this one token, the step in flight, which took it to be, must not sample:
        what it computed of the token stays, and the others follow in a chunk.
        """
        assert sequence.matcher is not None
        room = sequence.max_total - len(sequence.token_ids)
        tokens, reason = sequence.matcher.advance(token, room)
        self.num_forced_tokens += max(0, len(tokens) - 1)
        if tokens[:1] != [token]:  # what a step in flight may have computed isn't so
            sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids))
        if reason is None and tokens != [token]:
            if any(batch.withdraw(sequence) for batch in self.in_flight):
                sequence.num_pending -= 1
            if not tokens and sequence.status == "running":
                self._preempt(sequence)  # the step computed what isn't so
        return tokens, reason

    def flush_cache(self) -> int:
        """Hides all KV computed so far from later admissions, as after new weights.

        Sequences that run keep theirs. Returns how many pages that freed.
        """
        self.cache_version += 1
        return self.cache.evict(len(self.cache))

    def stats(self) -> EngineStats:
        """Gauges and counters; `pages_cached` are those that only the prefix cache holds."""
        num_unlocked = self.cache.num_unlocked
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            pages_used=self.pool.num_usable - self.pool.num_free - num_unlocked,
            pages_cached=num_unlocked,
            pages_total=self.pool.num_usable,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            evicted_pages=self.cache.num_evicted,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            generated_tokens=self.generated_tokens,
            num_forced_tokens=self.num_forced_tokens,
        )

    def check(self) -> None:
        """Asserts that every page, slot and sequence is accounted for. Slow."""
        self.cache.check()
        holders = list(self.cache.nodes.values())
        for sequence in self.running:
            assert sequence.status == "running", sequence
            holders += sequence.pages
            above = sequence.root
            for page in sequence.pages[: sequence.num_shared]:
                key = self.cache.keys[page]
                assert key is not None, f"{page} is not in the tree: {sequence}"
                assert key[0] == above, f"{page} is not below {above}: {sequence}"
                above = page
            own = sequence.pages[sequence.num_shared :]
            assert all(self.cache.keys[page] is None for page in own), (
                f"own page in the tree: {sequence}"
            )
            assert sequence.num_computed <= len(sequence.pages) * self.config.page_size, sequence
        self.pool.check(holders)
        for sequence in self.waiting:
            assert sequence.status == "waiting", sequence
            assert (sequence.pages, sequence.slot, sequence.num_computed) == ([], -1, 0), sequence
        slots = sorted(self.free_slots + [sequence.slot for sequence in self.running])
        assert slots == list(range(self.config.max_num_seqs)), f"slots {slots}"
        alive = {id(sequence) for sequence in self.waiting + self.running}
        assert alive == {id(sequence) for sequence in self.sequences.values()}, "a sequence is lost"
        pending = {key: 0 for key in alive}
        for batch in self.in_flight:
            for row in batch.sampling_rows:
                if id(row.sequence) in pending:
                    pending[id(row.sequence)] += 1
        for sequence in self.sequences.values():
            assert sequence.num_pending == pending[id(sequence)], (
                f"{pending[id(sequence)]} in flight: {sequence}"
            )

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _num_available(self) -> int:
        return self.pool.num_free + self.cache.num_unlocked

    def _num_matched(self, sequence: Sequence) -> int:
        """Pages of a waiting sequence that the prefix cache has or had a few steps ago."""
        step, num_pages = sequence.match_hint
        if step < 0 or self.num_steps - step >= MATCH_REFRESH_STEPS:
            num_pages = len(self._match(sequence))
            sequence.match_hint = (self.num_steps, num_pages)
        return num_pages

    def _match(self, sequence: Sequence) -> list[int]:
        if sequence.request.pooling == "mean":  # needs every token's hidden state
            return []
        return self.cache.match(self._root(sequence), sequence.token_ids)

    def _root(self, sequence: Sequence) -> tuple[int, str, str]:
        return (self.cache_version, sequence.request.adapter, sequence.request.cache_salt)

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot and its cached prefix, if there are pages for all of it.

        Each of those running keeps a page to grow into, or the newcomer would soon be preempted.
        (There is a budget for newcomers only when all running ones have pages for all they have.)
        With none running anything fits.
        """
        if sequence.num_pending:  # preempted; it can't go on before its token in flight is known
            return False
        shared = self._match(sequence)
        if sequence.is_scoring:
            shared = shared[: sequence.num_scored // self.config.page_size]
        self.cache.lock(shared)
        needed = self._num_pages(len(sequence.token_ids)) - len(shared)
        if self.running and self._num_available() < needed + len(self.running):
            self.cache.unlock(shared)
            return False
        if self.waiting[0] is not sequence:
            self.waiting[0].num_overtaken += 1
        self.waiting.remove(sequence)
        sequence.status = "running"
        sequence.slot = self.free_slots.pop()
        sequence.root = self._root(sequence)
        sequence.pages = shared
        sequence.num_shared = len(shared)
        sequence.num_computed = len(shared) * self.config.page_size
        sequence.num_told = 0
        sequence.share_at = NEVER
        if self.config.prefix_cache:
            sequence.share_at = sequence.num_computed + self.config.page_size
        bisect.insort(self.running, sequence, key=self._rank)
        if not sequence.num_preemptions:
            sequence.num_cached = sequence.num_computed
            self.cache.count_hit(shared)
            self.prompt_tokens += sequence.num_prompt
            self.cached_tokens += sequence.num_cached
        return True

    def _grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Gets a running sequence pages for its next `num_tokens` or, if short, for fewer or none.

        Evicts what nobody uses; if not a single page is left, preempts the last of those running,
        but never `sequence` or one before it. Returns how many tokens there are pages for.
        """
        needed = self._num_pages(sequence.num_computed + num_tokens) - len(sequence.pages)
        while needed > 0 and not self._num_available() and self.running[-1] is not sequence:
            self._preempt(self.running[-1])
        needed = min(needed, self._num_available())
        if needed > 0:
            self.cache.evict(needed - self.pool.num_free)
            sequence.pages += self.pool.allocate(needed)
        return min(num_tokens, len(sequence.pages) * self.config.page_size - sequence.num_computed)

    def _advance(self, sequence: Sequence, num_tokens: int, updates: list[PageUpdate]) -> Row:
        """Takes the next `num_tokens`, for which there are pages, into the step."""
        start, num_known = sequence.num_computed, len(sequence.token_ids)
        end = sequence.num_computed = start + num_tokens
        samples = end == num_known + sequence.num_pending
        if samples:
            sequence.num_pending += 1
        # Single tokens may be a "decode" step's, where no row may see what another writes.
        sharable = start if num_tokens == 1 else end
        if min(sharable, num_known) >= sequence.share_at:
            self._share(sequence, sharable, start)
        if sequence.num_told < len(sequence.pages):
            pages = sequence.pages[sequence.num_told :]
            updates.append(PageUpdate(sequence.slot, sequence.num_told, pages))
            sequence.num_told = len(sequence.pages)
        return Row(sequence, sequence.slot, start, num_tokens, samples, end > num_known)

    def _share(self, sequence: Sequence, end: int, write_start: int) -> None:
        """Puts pages in the prefix tree whose tokens are known and before `end`; they are computed,
        be it in this step.

        Even other rows of the step may use them: a layer writes KV before it attends. A page that
        the tree has already is replaced by the tree's; but if the step writes to it (from
        `write_start` on), that is left to the next, so that no row writes what others read.
        """
        size, pages, token_ids = self.config.page_size, sequence.pages, sequence.token_ids
        last = min(end, len(token_ids)) // size
        while (first := sequence.num_shared) < last:
            added, page = self.cache.insert(
                sequence.prefix_node, token_ids[first * size : last * size], pages[first:last]
            )
            index = sequence.num_shared = first + added
            if page is not None:
                if (index + 1) * size > write_start:
                    break
                self.cache.lock((page,))
                self.pool.release((pages[index],))
                pages[index] = page
                sequence.num_told = min(sequence.num_told, index)
                sequence.num_shared += 1
        sequence.share_at = (sequence.num_shared + 1) * size

    def _preempt(self, sequence: Sequence) -> None:
        """Puts a running sequence back to the front of the line; its pages stay in the tree."""
        self._release(sequence)
        sequence.status = "waiting"
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.waiting.insert(0, sequence)
        self.num_preemptions += 1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status == "running":
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = "finished"
        sequence.finish_reason = reason
        del self.sequences[sequence.request.request_id]

    def _release(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence; its whole pages stay in the prefix tree."""
        if self.config.prefix_cache:
            self._share(sequence, sequence.num_computed, NEVER)
        self.cache.unlock(sequence.pages[: sequence.num_shared])
        self.pool.release(sequence.pages[sequence.num_shared :])
        sequence.pages = []
        sequence.num_shared = 0
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        self.running.remove(sequence)


def _room_to_score(sequence: Sequence, num_rows: int) -> int:
    """Tokens of a prompt being scored that fit `num_rows`: those that need no score fit in one."""
    return num_rows + max(0, sequence.num_scored - sequence.num_computed - 1)


def _add_rows_to_score(row: Row, scored: list[Row], others: list[Row]) -> int:
    """Takes a row of a prompt apart: what is before the tokens to score stays one row, each of the
    others is a row of its own, and the prompt's last token samples instead. Returns how many."""
    sequence = row.sequence
    start, end = row.start, row.start + row.num_tokens
    first = min(max(start, sequence.num_scored), end)
    if first > start:
        others.append(Row(sequence, row.slot, start, first - start, False, False))
    scored += [
        Row(
            sequence,
            row.slot,
            position,
            1,
            samples=position == sequence.num_prompt - 1,
            token_pending=False,
            scores=position < sequence.num_prompt - 1,
        )
        for position in range(first, end)
    ]
    return (first > start) + end - first
