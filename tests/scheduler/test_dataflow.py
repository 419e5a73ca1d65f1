"""Random operations of the scheduler against a device that computes what real KV would hold.

The fake device stores at each KV position a hash of everything that determines it (salt, adapter,
all tokens up to it) and samples tokens from the hash at the last one. It executes packed steps in
order, as late as the overlapped loop lets it. A page handed out too early, shared wrongly, left out
of a page table or written while shared shows up as a row that reads something other than its own
prefix, or as tokens that differ from those of the request run alone.
"""

import dataclasses
import itertools
import random
import zlib
from array import array
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduler.policy import POLICIES
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxserve.scheduler.sequence import Batch
from jaxserve.types import ContextExceeded, FinishReason, Grammar, Request, TokenSampling

VOCAB = 3
STOP = 2


def prefix_hashes(root: str, token_ids: list[int]) -> list[int]:
    """What the KV of each of `token_ids` depends on; root: adapter/salt."""
    # Not hash() of the string, which differs from process to process.
    state = zlib.crc32(root.encode())
    hashes = []
    for token in token_ids:
        state = hash((state, token))
        hashes.append(state)
    return hashes


def root_of(request: Request) -> str:
    return f"{request.adapter}/{request.cache_salt}"


def sample(state: int, seed: int) -> int:
    return random.Random(state ^ seed).randrange(VOCAB)


class FakeMatcher:
    """Does all that a grammar's may, now and then, as the tokens so far decide."""

    error = ""

    def __init__(self):
        self.state = 0
        self.is_again = False

    def advance(self, token: int, room: int) -> tuple[list[int], FinishReason | None]:
        self.state = hash((self.state, token, room))
        rng = random.Random(self.state)
        kind = "only" if self.is_again else rng.choice(("only",) * 6 + ("more", "other", "again"))
        self.is_again = kind == "again"
        others = [rng.randrange(VOCAB) for _ in range(rng.randrange(min(room, 6)))]
        if kind == "other":
            return others, "length"
        if kind == "again":
            return [], None
        return [token, *others] if kind == "more" else [token], None


def generate_alone(request: Request) -> tuple[list[int], str]:
    """The tokens and the finish reason of `request` when nothing else exists."""
    token_ids = list(request.token_ids)
    sampling, num_prompt = request.sampling, len(token_ids)
    limit = num_prompt + sampling.max_tokens
    matcher = FakeMatcher() if sampling.grammar else None
    reason = None
    while not reason:
        new = [sample(prefix_hashes(root_of(request), token_ids)[-1], sampling.seed)]
        if matcher:
            new, reason = matcher.advance(new[0], limit - len(token_ids))
        for token in new:
            token_ids.append(token)
            num_generated = len(token_ids) - num_prompt
            if token in sampling.stop_token_ids and num_generated >= sampling.min_tokens:
                return token_ids[num_prompt:], "stop"
        if len(token_ids) == limit:
            reason = "length"
    return token_ids[num_prompt:], reason


@dataclasses.dataclass
class PackedRow:
    request: Request
    slot: int
    start: int
    token_ids: list[int]
    """All tokens up to the row's last that the host knows; the device has the others."""
    end: int
    samples: bool
    min_version: int
    """Of the weights, when the sequence was last admitted or later."""


@dataclasses.dataclass
class PackedStep:
    rows: list[PackedRow]
    page_updates: list[tuple[int, int, list[int]]]
    version: int
    settled: set[int]
    """Pages that were in the prefix tree before this step was scheduled."""
    kind: str


class FakeDevice:
    def __init__(self, config: SchedulerConfig):
        self.page_size = config.page_size
        self.num_pages = config.num_pages
        self.table = [[0] * config.num_pages for _ in range(config.max_num_seqs)]
        self.sampled = [{} for _ in range(config.max_num_seqs)]
        """What was sampled for each slot, by position."""
        self.kv: dict[int, tuple[int, int]] = {}
        """(prefix hash, version of the weights) by position in the cache."""

    def index(self, slot: int, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return self.table[slot][page] * self.page_size + offset

    def run(self, step: PackedStep) -> dict[int, int]:
        """Returns what was sampled, by slot."""
        for slot, first, pages in step.page_updates:
            self.table[slot][first : first + len(pages)] = pages
        hashes = []
        # A decode step reads what is older than its own new tokens before it writes them.
        early = [
            [self.kv.get(self.index(row.slot, p)) for p in range(row.start)]
            for row in step.rows
            if step.kind == "decode"
        ]
        for row in step.rows:
            for position in range(len(row.token_ids), row.end):
                row.token_ids.append(self.sampled[row.slot][position])
            hashes.append(prefix_hashes(root_of(row.request), row.token_ids))
            for position in range(row.start, len(row.token_ids)):
                index = self.index(row.slot, position)
                page = index // self.page_size
                assert 0 < page < self.num_pages, f"writes to page {page}"
                assert page not in step.settled, f"writes to shared page {page}"
                self.kv[index] = (hashes[-1][position], step.version)
        tokens = {}
        for index, (row, expected) in enumerate(zip(step.rows, hashes, strict=True)):
            read = [self.kv.get(self.index(row.slot, p)) for p in range(len(row.token_ids))]
            if early:
                read[: row.start] = early[index]
            assert [kv and kv[0] for kv in read] == expected, f"{row} reads another prefix"
            oldest = min(kv[1] for kv in read if kv)
            assert oldest >= row.min_version, f"{row} reads KV of old weights"
            if row.samples:
                token = sample(expected[-1], row.request.sampling.seed)
                self.sampled[row.slot][row.end] = token
                tokens[row.slot] = token
        return tokens


class Engine:
    """The engine's loop over a fake device; checks everything after each operation.

    `overlap` is how many steps are in flight when the next is scheduled: 0 is synchronous.
    """

    def __init__(self, config: SchedulerConfig, overlap: int):
        self.config = config
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config)
        self.allocated: set[int] = set()
        """Pages handed out since the last step; those that were evicted for it may be written."""
        allocate = self.scheduler.pool.allocate

        def record_allocated(num_pages: int) -> list[int]:
            pages = allocate(num_pages)
            self.allocated.update(pages)
            return pages

        self.scheduler.pool.allocate = record_allocated
        self.overlap = overlap
        self.pending: deque[tuple[Batch, PackedStep]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.scored: dict[str, list[int]] = {}
        """Positions of the prompt whose logits were told."""
        self.finished: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.deadlines: dict[str, int] = {}
        self.min_versions: dict[str, int] = {}
        self.num_steps = 0
        self.num_kinds = {"decode": 0, "mixed": 0}

    def submit(self, request: Request) -> None:
        # Under fcfs the oldest advances at every step, so who has k others ahead is done after
        # k + 1 times the steps that the longest request can take.
        longest = 3 * self.config.max_request_tokens + 4
        self.deadlines[request.request_id] = (
            self.num_steps + (len(self.scheduler.sequences) + 1) * longest
        )
        sequence = self.scheduler.add(request)
        sequence.matcher = FakeMatcher() if request.sampling.grammar else None
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.scored[request.request_id] = []
        self.min_versions[request.request_id] = self.scheduler.cache_version
        self.check()

    def abort(self, request_id: str) -> None:
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        self.finished[request_id] = "abort"
        self.check()

    def flush(self) -> None:
        self.scheduler.flush_cache()
        for sequence in self.scheduler.waiting:
            self.min_versions[sequence.request.request_id] = self.scheduler.cache_version
        self.check()

    def step(self) -> None:
        if self.overlap == 0:
            self.collect()
        settled = set(self.scheduler.cache.nodes.values())
        self.allocated.clear()
        running = list(self.scheduler.running)
        batch = self.scheduler.schedule()
        packed = self.pack(batch, settled - self.allocated) if batch else None
        if batch:
            self.check_batch(batch)
        if running and self.config.policy == "fcfs":
            oldest = running[0]
            scheduled = batch is not None and any(row.sequence is oldest for row in batch.rows)
            total = len(oldest.token_ids) + oldest.num_pending
            assert scheduled or total == oldest.max_total, "the oldest doesn't advance"
        assert batch or self.pending or not self.scheduler.has_work, "stuck"
        if batch and packed:
            self.pending.append((batch, packed))
        if len(self.pending) > self.overlap or not batch:
            self.collect()
        self.num_steps += 1
        self.check()

    def pack(self, batch: Batch, settled: set[int]) -> PackedStep:
        rows = []
        for row in batch.rows:
            end = row.start + row.num_tokens
            known = row.sequence.token_ids[:end]
            assert row.token_pending == (len(known) < end)
            assert end < row.sequence.max_total, "computes what nobody will ask for"
            request = row.sequence.request
            min_version = self.min_versions[request.request_id]
            packed = PackedRow(request, row.slot, row.start, known, end, row.samples, min_version)
            rows.append(packed)
        updates = [(update.slot, update.first, update.pages) for update in batch.page_updates]
        return PackedStep(rows, updates, self.scheduler.cache_version, settled, batch.kind)

    def check_batch(self, batch: Batch) -> None:
        assert 0 < batch.num_tokens <= self.config.max_batched_tokens
        assert batch.num_tokens == sum(row.num_tokens for row in batch.rows)
        assert all(row.num_tokens > 0 for row in batch.rows)
        assert len(batch.rows) <= self.config.max_num_seqs
        sequences = {row.slot: row.sequence for row in batch.rows}
        ends = {}
        for row in sorted(batch.rows, key=lambda row: row.start):
            assert sequences[row.slot] is row.sequence
            assert ends.setdefault(row.slot, row.start) == row.start, "a gap, or another's slot"
            ends[row.slot] += row.num_tokens
            if row.scores:
                assert row.start < row.sequence.num_prompt - 1
                assert not row.samples
        for samples in (True, False):  # before a prompt's rows that score, one that doesn't
            rows = [row for row in batch.rows if not row.scores and row.samples == samples]
            assert len({row.slot for row in rows}) == len(rows)
        is_decode = [row.num_tokens == 1 and (row.samples or row.scores) for row in batch.rows]
        assert is_decode == sorted(is_decode, reverse=True)
        assert batch.num_decode_rows == sum(is_decode)
        assert batch.sampling_rows == [row for row in batch.rows if row.samples]
        self.num_kinds[batch.kind] += 1

    def collect(self) -> None:
        if not self.pending:
            return
        batch, packed = self.pending.popleft()
        sampled = self.device.run(packed)
        tokens = [sampled[row.slot] for row in batch.sampling_rows]  # but for withdrawn ones
        for index, sequence in self.scheduler.commit_scores(batch):
            row = batch.scoring_rows[index]
            assert row.sequence is sequence
            self.scored[sequence.request.request_id].append(row.start)
        for committed in self.scheduler.commit(batch, tokens):
            request_id = committed.sequence.request.request_id
            assert request_id not in self.finished, "a token after the end"
            assert committed.sequence is batch.sampling_rows[committed.index].sequence
            if not committed.sequence.matcher:
                assert committed.tokens == [tokens[committed.index]]
            self.outputs[request_id] += committed.tokens
            if committed.finish_reason:
                assert committed.sequence.finish_reason == committed.finish_reason
                self.finished[request_id] = committed.finish_reason
                assert self.config.policy != "fcfs" or self.num_steps <= self.deadlines[request_id]

    def check(self) -> None:
        self.scheduler.check()
        stats = self.scheduler.stats()
        free = self.scheduler.pool.num_free
        assert stats.pages_used + stats.pages_cached + free == self.config.num_pages - 1
        assert stats.num_running + stats.num_waiting == len(self.scheduler.sequences)

    def check_tree(self) -> None:
        """Each page of the prefix tree holds what its tokens and those above leave there; when no
        step is in flight."""
        size, keys = self.config.page_size, self.scheduler.cache.keys
        for page in self.scheduler.cache.nodes.values():
            token_ids: list[int] = []
            above = page
            while isinstance(above, int):
                above, tokens = keys[above]
                token_ids = [*array("i", tokens), *token_ids]
            expected = prefix_hashes("/".join(above[1:]), token_ids)
            found = [self.device.kv[page * size + offset][0] for offset in range(size)]
            assert found == expected[-size:], f"page {page} is not of {token_ids}"

    def drain(self) -> None:
        limit = (
            self.num_steps + 100 + 10 * len(self.scheduler.sequences) * self.config.max_model_len
        )
        while self.scheduler.has_work or self.pending:
            self.step()
            assert self.num_steps < limit, "some request never finishes"

    def check_outputs(self) -> None:
        """Every request ended, with the tokens and the reason it ends with when it runs alone."""
        assert self.finished.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            expected, reason = generate_alone(request)
            output = self.outputs[request_id]
            if self.finished[request_id] == "abort":
                assert output == expected[: len(output)]
            else:
                assert (output, self.finished[request_id]) == (expected, reason)
                asked = request.sampling.prompt_logprobs is not None
                num_scored = len(request.token_ids) - 1 if asked else 0
                first = request.sampling.prompt_logprobs_start
                assert self.scored[request_id] == list(range(first, num_scored))
        self.check_tree()
        stats = self.scheduler.stats()
        assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.generated_tokens == sum(map(len, self.outputs.values()))
        self.scheduler.flush_cache()
        assert self.scheduler.pool.num_free == self.config.num_pages - 1


def random_requests(rng: random.Random, config: SchedulerConfig, grammars: bool = False):
    """Endless requests, with shared prefixes, long prompts, several choices, salts, adapters."""
    longest = config.max_request_tokens
    bases = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
    number = itertools.count()
    while True:
        num_prompt = rng.randint(1, rng.choice((longest // 4 + 1, longest - 1)))
        base = rng.choice(bases)[: rng.randint(0, num_prompt)]
        prompt = base + [rng.randrange(VOCAB) for _ in range(num_prompt - len(base))]
        max_tokens = rng.randint(1, min(longest - num_prompt, rng.choice((3, 12, longest))))
        salt, adapter = rng.choice(("", "", "", "salt")), rng.choice(("", "", "", "adapter"))
        stop_token_ids = rng.choice(((), (), (STOP,)))
        min_tokens = rng.randint(0, max_tokens)
        prompt_logprobs = rng.choice((None, None, None, 0))
        grammar = rng.choice((None, None, Grammar.regex(".*"))) if grammars else None
        start = rng.choice((0, num_prompt - 1, rng.randrange(num_prompt)))
        for choice in range(rng.choice((1, 1, 1, 3))):
            yield Request(
                request_id=f"request-{next(number)}",
                token_ids=prompt,
                sampling=TokenSampling(
                    max_tokens=max_tokens,
                    min_tokens=min_tokens,
                    seed=choice % 2,
                    stop_token_ids=stop_token_ids,
                    prompt_logprobs=prompt_logprobs,
                    prompt_logprobs_start=start if prompt_logprobs is not None else 0,
                    grammar=grammar,
                ),
                priority=rng.randrange(3),
                cache_salt=salt,
                adapter=adapter,
            )


def run_random(engine: Engine, seed: int, num_operations: int, max_unfinished: int = 12) -> None:
    rng = random.Random(seed)
    # A token is in flight beyond the one that a grammar may replace, but no more.
    requests = random_requests(rng, engine.config, grammars=engine.overlap < 2)
    for _ in range(num_operations):
        operation = rng.random()
        unfinished = list(engine.scheduler.sequences)
        if operation < 0.3 and len(unfinished) < max_unfinished:
            engine.submit(next(requests))
        elif operation < 0.36 and unfinished:
            engine.abort(rng.choice(unfinished))
        elif operation < 0.362:
            engine.flush()
        else:
            engine.step()
    engine.drain()
    engine.check_outputs()


def tiny(**changes) -> SchedulerConfig:
    values = {
        "max_num_seqs": 5,
        "max_batched_tokens": 12,
        "max_model_len": 40,
        "page_size": 4,
        "num_pages": 13,
    }
    return SchedulerConfig(**(values | changes))


@pytest.mark.parametrize("overlap", [1, 0], ids=["overlapped", "synchronous"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_5000_operations_in_tiny_memory_lose_nothing(policy, overlap):
    engine = Engine(tiny(policy=policy), overlap)
    run_random(engine, seed=1, num_operations=5000)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 30
    assert stats.cached_tokens > 1000
    assert min(engine.num_kinds.values()) > 200
    assert len(engine.finished) > 500


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    overlap=st.integers(0, 2),
    policy=st.sampled_from(list(POLICIES)),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(0, 40),
    page_size=st.sampled_from([1, 2, 4, 8]),
    num_pages=st.integers(2, 30),
    max_model_len=st.integers(2, 50),
    prefix_cache=st.booleans(),
)
def test_any_configuration_computes_what_each_request_gets_alone(
    seed, overlap, policy, max_num_seqs, budget, page_size, num_pages, max_model_len, prefix_cache
):
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_num_seqs + budget,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        policy=policy,
        prefix_cache=prefix_cache,
    )
    if config.max_request_tokens < 2:
        return
    engine = Engine(config, overlap)
    run_random(engine, seed, num_operations=150)
    if not prefix_cache:
        assert engine.scheduler.stats().cached_tokens == 0


@pytest.mark.parametrize("seed", range(5))
def test_overlapped_equals_synchronous(seed):
    outputs = []
    for overlap in (0, 1, 2):
        engine = Engine(tiny(), overlap)
        requests = random_requests(random.Random(seed), engine.config)
        for request in itertools.islice(requests, 30):
            engine.submit(request)
        engine.drain()
        engine.check_outputs()
        outputs.append((engine.outputs, engine.finished))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("num_prompt", range(1, 40))
def test_largest_request_that_is_accepted_finishes_alone_and_among_others(num_prompt):
    config = tiny(num_pages=11, max_model_len=1000)
    limit = config.max_request_tokens
    assert limit == 40
    largest = Request(
        request_id="largest",
        token_ids=[0] * num_prompt,
        sampling=TokenSampling(max_tokens=limit - num_prompt),
    )
    for others in (0, 4):
        engine = Engine(config, overlap=1)
        for request in itertools.islice(random_requests(random.Random(num_prompt), config), others):
            engine.submit(request)
        engine.submit(largest)
        engine.drain()
        engine.check_outputs()
    with pytest.raises(ContextExceeded):
        Scheduler(config).add(
            Request(
                request_id="too large",
                token_ids=[0] * num_prompt,
                sampling=TokenSampling(max_tokens=limit - num_prompt + 1),
            )
        )
