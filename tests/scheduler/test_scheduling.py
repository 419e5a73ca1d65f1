"""What a step computes, who is admitted, who has to give way: one behaviour a test."""

import itertools
import typing

import msgspec
import pytest

from jaxserve.config import EngineConfig
from jaxserve.scheduler.policy import MAX_OVERTAKEN, POLICIES, RANKS, WINDOW
from jaxserve.scheduler.scheduler import MATCH_REFRESH_STEPS, Scheduler, SchedulerConfig
from jaxserve.scheduler.sequence import Batch, Committed, Sequence
from jaxserve.types import ContextExceeded, InvalidRequest, Request, TokenSampling

TOKEN = 7


def make_scheduler(**changes) -> Scheduler:
    values = {
        "max_num_seqs": 4,
        "max_batched_tokens": 64,
        "max_model_len": 4096,
        "page_size": 16,
        "num_pages": 257,
    }
    return Scheduler(SchedulerConfig(**(values | changes)))


number = itertools.count()


def make_request(
    prompt: list[int] | int, max_tokens: int = 8, request_id: str = "", **fields
) -> Request:
    """`prompt` as a number: that many tokens that no other prompt begins with."""
    if isinstance(prompt, int):
        prompt = [1000 + next(number)] * prompt
    sampling = {key: fields.pop(key) for key in ("min_tokens", "stop_token_ids") if key in fields}
    return Request(
        request_id=request_id or f"request-{next(number)}",
        token_ids=prompt,
        sampling=TokenSampling(max_tokens=max_tokens, **sampling),
        **fields,
    )


def schedule(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def run_step(scheduler: Scheduler, token: int = TOKEN) -> tuple[Batch, list[Committed]]:
    batch = schedule(scheduler)
    committed = scheduler.commit(batch, [token] * len(batch.sampling_rows))
    scheduler.check()
    return batch, committed


def run_until_idle(scheduler: Scheduler) -> list[Batch]:
    batches = []
    while scheduler.has_work:
        batches.append(run_step(scheduler)[0])
        assert len(batches) < 10_000
    return batches


def ids(batch: Batch) -> list[str]:
    return [row.sequence.request.request_id for row in batch.rows]


# Steps


def test_prompt_longer_than_the_budget_is_computed_in_chunks_that_fill_it():
    scheduler = make_scheduler()
    scheduler.add(make_request(150, max_tokens=3))
    rows = [batch.rows[0] for batch in run_until_idle(scheduler)]
    assert [(row.start, row.num_tokens) for row in rows] == [
        (0, 64),
        (64, 64),
        (128, 22),
        (150, 1),
        (151, 1),
    ]
    assert [row.samples for row in rows] == [False, False, True, True, True]


def test_decodes_get_their_token_in_every_step_of_a_long_prefill():
    scheduler = make_scheduler()
    decoding = [scheduler.add(make_request(4, max_tokens=50)) for _ in range(2)]
    run_step(scheduler)
    long = scheduler.add(make_request(300))
    while long.num_computed < 300:
        batch, _ = run_step(scheduler)
        assert [row.sequence for row in batch.rows[:2]] == decoding
        assert batch.num_decode_rows == 2 or batch.rows[2].samples
        assert batch.kind == "mixed"
        assert batch.num_tokens == 64 or long.num_computed == 300
    assert run_step(scheduler)[0].kind == "decode"


def test_new_sequence_takes_what_the_budget_has_left():
    scheduler = make_scheduler()
    scheduler.add(make_request(50))
    scheduler.add(make_request(50))
    scheduler.add(make_request(50))
    assert [row.num_tokens for row in schedule(scheduler).rows] == [50, 14]
    # The decode, the rest of the second prompt, and of the third what is left.
    assert [row.num_tokens for row in schedule(scheduler).rows] == [1, 36, 27]


def test_overlapped_step_uses_the_token_that_is_still_on_the_device():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(5, max_tokens=3))
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert (second.rows[0].start, second.rows[0].token_pending) == (5, True)
    assert sequence.num_pending == 2
    scheduler.commit(first, [TOKEN])
    third = schedule(scheduler)
    assert (third.rows[0].start, third.rows[0].token_pending) == (6, True)
    assert schedule_nothing(scheduler)  # the last token is in flight
    scheduler.commit(second, [TOKEN])
    (last,) = scheduler.commit(third, [TOKEN])
    assert last.finish_reason == "length"
    assert list(sequence.token_ids[5:]) == [TOKEN] * 3


def schedule_nothing(scheduler: Scheduler) -> bool:
    return scheduler.schedule() is None


def test_page_updates_keep_a_page_table_up_to_date():
    scheduler = make_scheduler(max_batched_tokens=40)
    table: list[list[int]] = [[] for _ in range(4)]
    sizes = []
    for size in (30, 70, 20, 10):
        scheduler.add(make_request(size, max_tokens=40))
    while scheduler.has_work:
        batch = schedule(scheduler)
        for update in batch.page_updates:
            table[update.slot][update.first :] = update.pages
        for row in batch.rows:
            assert table[row.slot] == row.sequence.pages
        sizes.append(len(batch.page_updates))
        scheduler.commit(batch, [TOKEN] * len(batch.sampling_rows))
    assert sizes.count(0) > len(sizes) / 2


def test_batches_are_committed_in_order():
    scheduler = make_scheduler()
    scheduler.add(make_request(5))
    schedule(scheduler)
    second = schedule(scheduler)
    with pytest.raises(AssertionError, match="in the order they were scheduled"):
        scheduler.commit(second, [TOKEN])


# How sequences end


def test_stop_token_ends_a_sequence_and_the_token_in_flight_is_dropped():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(5, stop_token_ids=(9,)))
    first, second = schedule(scheduler), schedule(scheduler)
    (committed,) = scheduler.commit(first, [9])
    assert (committed.tokens, committed.finish_reason) == ([9], "stop")
    assert not scheduler.has_work
    assert scheduler.commit(second, [TOKEN]) == []
    assert list(sequence.token_ids[5:]) == [9]
    scheduler.check()


def test_stop_token_before_min_tokens_does_not_end_a_sequence():
    scheduler = make_scheduler()
    scheduler.add(make_request(5, stop_token_ids=(9,), min_tokens=3))
    reasons = [run_step(scheduler, token=9)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, "stop"]


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_at_any_moment_gives_everything_back(num_steps):
    scheduler = make_scheduler(prefix_cache=False)
    scheduler.add(make_request(150, request_id="mine"))
    batches = [schedule(scheduler) for _ in range(num_steps)]
    assert scheduler.abort("mine")
    assert not scheduler.abort("mine")
    assert not scheduler.has_work
    scheduler.check()
    assert scheduler.pool.num_free == 256
    for batch in batches:
        assert scheduler.commit(batch, [TOKEN] * len(batch.sampling_rows)) == []


def test_id_of_an_aborted_request_can_be_used_while_its_step_is_in_flight():
    scheduler = make_scheduler()
    scheduler.add(make_request(5, request_id="mine"))
    first = schedule(scheduler)
    scheduler.abort("mine")
    again = scheduler.add(make_request(5, request_id="mine"))
    second = schedule(scheduler)
    assert scheduler.commit(first, [TOKEN]) == []
    assert [committed.sequence for committed in scheduler.commit(second, [TOKEN])] == [again]


# What is refused


def test_add_refuses_what_can_never_fit():
    scheduler = make_scheduler(num_pages=5)  # 64 tokens
    scheduler.add(make_request(32, max_tokens=32))
    with pytest.raises(ContextExceeded, match=r"max_tokens: is 33, .* 65; allowed: 64"):
        scheduler.add(make_request(32, max_tokens=33))
    with pytest.raises(ContextExceeded, match="prompt: has 64 tokens; allowed: at most 63"):
        scheduler.add(make_request(64, max_tokens=1))
    scheduler = make_scheduler(max_model_len=20)
    with pytest.raises(ContextExceeded):
        scheduler.add(make_request(11, max_tokens=10))
    assert not scheduler.has_work


def test_add_refuses_an_empty_prompt_and_an_id_in_use():
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequest, match="prompt"):
        scheduler.add(make_request([]))
    scheduler.add(make_request(3, request_id="mine"))
    with pytest.raises(InvalidRequest, match="'mine' is in use"):
        scheduler.add(make_request(3, request_id="mine"))


# Shared prefixes


def test_second_turn_of_a_chat_computes_its_new_tokens_and_at_most_a_page():
    scheduler = make_scheduler()
    first = scheduler.add(make_request(1000, max_tokens=20))
    run_until_idle(scheduler)
    before = scheduler.stats()
    second = scheduler.add(make_request([*first.token_ids, *range(30)], max_tokens=1))
    run_until_idle(scheduler)
    after = scheduler.stats()
    computed = after.computed_tokens - before.computed_tokens
    assert 30 <= computed <= 30 + 16
    assert second.num_cached == second.num_prompt - computed
    assert after.cached_tokens - before.cached_tokens == second.num_cached


def test_equal_prompts_of_one_step_are_computed_once():
    scheduler = make_scheduler()
    prompt = list(range(40))
    sequences = [scheduler.add(make_request(prompt)) for _ in range(3)]
    batch = schedule(scheduler)
    assert [(row.start, row.num_tokens) for row in batch.rows] == [(0, 40), (32, 8), (32, 8)]
    assert [sequence.num_cached for sequence in sequences] == [0, 32, 32]
    assert scheduler.stats().pages_used == 2 + 3


def test_a_decode_step_shares_no_page_that_it_completes():
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_request([1, 2, 3], max_tokens=100))
    for _ in range(13):
        run_step(scheduler)
    follower = scheduler.add(make_request([1, 2, 3] + [TOKEN] * 14, max_tokens=100))
    batch, _ = run_step(scheduler)  # the first's tokens 0 to 15 are known, 15 is computed now
    assert [(row.start, row.num_tokens) for row in batch.rows] == [(15, 1), (0, 17)]
    assert batch.kind == "mixed"
    run_step(scheduler)
    assert follower.num_shared == 1  # once computed it's the same page
    late = [row.sequence.pages[0] for row in scheduler.schedule().rows]
    assert late[0] == late[1]


def test_a_step_whose_rows_see_each_other_is_mixed():
    scheduler = make_scheduler()
    request = make_request(4)
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=1)
    scheduler.add(msgspec.structs.replace(request, sampling=sampling))
    batch, _ = run_step(scheduler)
    assert [(row.start, row.num_tokens, row.scores) for row in batch.rows] == [
        (0, 1, True), (1, 1, True), (2, 1, True), (3, 1, False),
    ]  # fmt: skip
    assert (batch.num_decode_rows, batch.kind) == (4, "mixed")
    assert run_step(scheduler)[0].kind == "decode"


def test_a_page_whose_last_token_a_grammar_replaced_is_not_shared():
    class Replaces:
        error = ""

        def advance(self, token, room):
            return [TOKEN + 1, TOKEN], "length"

    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(15))
    sequence.matcher = Replaces()
    first, second = schedule(scheduler), schedule(scheduler)
    assert (second.rows[0].start, second.rows[0].token_pending) == (15, True)
    scheduler.commit(first, [TOKEN])
    scheduler.commit(second, [TOKEN])
    assert list(sequence.token_ids[15:]) == [TOKEN + 1, TOKEN]
    late = scheduler.add(make_request(sequence.token_ids))
    run_step(scheduler)  # which computes the page: the step in flight had another token there
    assert (late.num_cached, late.num_computed) == (0, 17)


def test_equal_generated_pages_are_kept_once():
    scheduler = make_scheduler()
    for _ in range(3):
        scheduler.add(make_request([1, 2, 3], max_tokens=100))
    for _ in range(40):
        run_step(scheduler)
    assert scheduler.stats().pages_used == 2 + 3


@pytest.mark.parametrize("field", ["cache_salt", "adapter"])
def test_prefixes_are_shared_within_a_salt_and_an_adapter_only(field):
    scheduler = make_scheduler()
    prompt = list(range(50))
    sequences = []
    for value in ("", "a", "b", "a"):
        sequences.append(scheduler.add(make_request(prompt, max_tokens=1, **{field: value})))
        run_until_idle(scheduler)
    assert [sequence.num_cached for sequence in sequences] == [0, 0, 0, 48]


def test_flushed_prefixes_are_not_used_again_even_if_a_sequence_still_holds_them():
    scheduler = make_scheduler()
    prompt = list(range(50))
    scheduler.add(make_request(prompt, max_tokens=30))
    run_step(scheduler)
    assert scheduler.flush_cache() == 0
    after = scheduler.add(make_request(prompt, max_tokens=1))
    run_step(scheduler)
    assert after.num_cached == 0
    run_until_idle(scheduler)
    assert scheduler.flush_cache() > 0
    assert scheduler.pool.num_free == 256


def test_cached_pages_make_room_for_new_sequences():
    scheduler = make_scheduler(num_pages=9)
    for _ in range(10):
        scheduler.add(make_request(60, max_tokens=20))
    run_until_idle(scheduler)
    assert scheduler.stats().num_preemptions == 0
    assert scheduler.stats().pages_cached > 0


# Shortage


def test_newest_sequence_gives_way_and_keeps_its_token_in_flight():
    scheduler = make_scheduler(num_pages=6, max_num_seqs=2)
    old = scheduler.add(make_request(16, max_tokens=40, request_id="old"))
    new = scheduler.add(make_request(16, max_tokens=40, request_id="new"))
    later = scheduler.add(make_request(16, max_tokens=1, request_id="later"))
    pending = schedule(scheduler)
    while not new.num_preemptions:
        batch = schedule(scheduler)
        scheduler.commit(pending, [TOKEN] * len(pending.sampling_rows))
        pending = batch
        scheduler.check()
    assert new.status == "waiting"
    assert scheduler.waiting == [new, later]
    assert ids(pending) == ["old"], "nobody is admitted while others are sent away"
    assert new.num_generated == 17, "the token that was in flight is there"
    scheduler.commit(pending, [TOKEN])
    batches = run_until_idle(scheduler)
    assert old.num_generated == new.num_generated == 40
    assert old.num_preemptions == 0
    (recomputed, *_) = [row for b in batches for row in b.rows if row.sequence is new]
    assert recomputed.start == 16, "the pages that were not evicted are found again"


def test_preempted_sequence_is_not_admitted_before_its_token_in_flight_is_known():
    scheduler = make_scheduler(num_pages=5, max_num_seqs=2)
    scheduler.add(make_request(16, max_tokens=40, request_id="old"))
    new = scheduler.add(make_request(16, max_tokens=40))
    in_flight = [schedule(scheduler), schedule(scheduler)]
    while not new.num_preemptions:
        in_flight.append(schedule(scheduler))
        scheduler.commit(in_flight[0], [TOKEN] * len(in_flight.pop(0).sampling_rows))
    assert new.num_pending == 1
    scheduler.abort("old")
    assert schedule_nothing(scheduler)
    for batch in in_flight:
        scheduler.commit(batch, [TOKEN] * len(batch.sampling_rows))
    assert run_step(scheduler)[0].rows[0].sequence is new


def test_nobody_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(num_pages=11, max_num_seqs=3, policy="priority")
    scheduler.add(make_request(70, max_tokens=60))
    new = scheduler.add(make_request(50, max_tokens=60))
    while scheduler.pool.num_free:
        run_step(scheduler)
    small = scheduler.add(make_request(20, max_tokens=1, priority=-1))
    while not new.num_preemptions:
        run_step(scheduler)
    assert small.status == "waiting"
    run_step(scheduler)
    assert small.status == "finished"
    run_until_idle(scheduler)


def test_preempted_sequence_may_end_while_it_waits():
    scheduler = make_scheduler(num_pages=5, max_num_seqs=2)
    scheduler.add(make_request(16, max_tokens=40))
    new = scheduler.add(make_request(16, max_tokens=40, stop_token_ids=(9,)))
    pending = schedule(scheduler)
    while True:
        batch = schedule(scheduler)
        if new.num_preemptions:
            break
        scheduler.commit(pending, [TOKEN, TOKEN])
        pending = batch
    finished = [c for c in scheduler.commit(pending, [TOKEN, 9]) if c.finish_reason]
    assert [(c.sequence, c.finish_reason) for c in finished] == [(new, "stop")]
    assert not scheduler.waiting
    scheduler.check()


def test_admission_leaves_running_sequences_room_to_grow():
    scheduler = make_scheduler(num_pages=17, max_num_seqs=16, max_batched_tokens=256)
    for _ in range(40):
        scheduler.add(make_request(30, max_tokens=30))
    batches = run_until_idle(scheduler)
    stats = scheduler.stats()
    # A sequence needs 4 pages in the end: 4 of them fit, and 5 or 6 are worth a try.
    assert max(len(batch.rows) for batch in batches) >= 4
    assert stats.num_preemptions < 20
    assert stats.computed_tokens < 1.2 * 40 * 60


def test_small_requests_do_not_overtake_a_large_one():
    scheduler = make_scheduler(num_pages=17)
    running = scheduler.add(make_request(100, max_tokens=50))
    for _ in range(3):
        run_step(scheduler)
    large = scheduler.add(make_request(200, max_tokens=10))
    small = scheduler.add(make_request(5, max_tokens=1))
    while running.status != "finished":
        run_step(scheduler)
        assert large.status == small.status == "waiting"
    run_until_idle(scheduler)
    assert scheduler.stats().num_preemptions == 0


# Policies


def test_every_policy_can_be_asked_for_and_says_who_gives_way():
    allowed = typing.get_args(typing.get_type_hints(EngineConfig)["policy"])
    assert set(allowed) == set(POLICIES) == set(RANKS)


def admission_order(scheduler: Scheduler) -> list[str]:
    order = []
    while scheduler.has_work:
        order += [
            request_id for request_id in ids(run_step(scheduler)[0]) if request_id not in order
        ]
    return order


def test_fcfs_admits_by_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 1), ("c", 0)):
        scheduler.add(make_request(20, request_id=name, priority=priority))
    assert admission_order(scheduler) == ["a", "b", "c"]


def test_priority_admits_the_lowest_number_first_then_by_arrival():
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        scheduler.add(make_request(20, request_id=name, priority=priority))
    assert admission_order(scheduler) == ["d", "b", "e", "a", "c"]


@pytest.mark.parametrize(
    ("policy", "preempted"),
    [
        ("priority", "old"),
        ("fcfs", "urgent"),
        ("longest-prefix", "urgent"),
        ("longest-output", "urgent"),
    ],
)
def test_the_least_urgent_gives_way_and_of_equals_the_newest(policy, preempted):
    scheduler = make_scheduler(num_pages=9, policy=policy)
    added = {
        name: scheduler.add(make_request(30, max_tokens=60, request_id=name, priority=priority))
        for name, priority in (("older", 1), ("old", 1), ("urgent", 0))
    }
    run_step(scheduler)
    assert len(scheduler.running) == 3
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert [name for name, one in added.items() if one.num_preemptions] == [preempted]
    run_until_idle(scheduler)


def test_longest_prefix_admits_what_is_cached_first():
    scheduler = make_scheduler(max_num_seqs=1, policy="longest-prefix")
    scheduler.add(make_request(list(range(64)), max_tokens=1))
    run_until_idle(scheduler)
    for name, num_shared in (("none", 0), ("two", 32), ("none-too", 0), ("three", 48)):
        prompt = [*range(num_shared), *range(100, 120)]
        scheduler.add(make_request(prompt, request_id=name))
    assert admission_order(scheduler) == ["three", "two", "none", "none-too"]


def test_longest_prefix_starves_nobody():
    scheduler = make_scheduler(max_num_seqs=1, policy="longest-prefix")
    cached = list(range(64))
    scheduler.add(make_request(cached, max_tokens=1))
    run_until_idle(scheduler)
    unlucky = scheduler.add(make_request(20, max_tokens=1))
    num_overtaking = 0
    while unlucky.status == "waiting":
        while len(scheduler.waiting) < 5:
            scheduler.add(make_request([*cached, next(number)], max_tokens=1))
        batch, _ = run_step(scheduler)
        num_overtaking += unlucky not in [row.sequence for row in batch.rows]
    assert num_overtaking == MAX_OVERTAKEN


def test_longest_prefix_looks_at_few_of_many_waiting():
    scheduler = make_scheduler(max_num_seqs=2, policy="longest-prefix")
    for _ in range(1000):
        scheduler.add(make_request(40, max_tokens=2))
    num_lookups = 0
    match = scheduler.cache.match

    def count_matches(*arguments):
        nonlocal num_lookups
        num_lookups += 1
        return match(*arguments)

    scheduler.cache.match = count_matches
    for _ in range(100):
        run_step(scheduler)
    num_admitted = 1000 - len(scheduler.waiting)
    looks = (WINDOW + num_admitted) + WINDOW * (100 // MATCH_REFRESH_STEPS)
    assert num_lookups <= num_admitted + looks


def test_longest_output_admits_the_most_tokens_first_then_by_arrival():
    scheduler = make_scheduler(max_num_seqs=1, policy="longest-output")
    for name, max_tokens in (("a", 3), ("b", 9), ("c", 3), ("d", 20), ("e", 9)):
        scheduler.add(make_request(20, max_tokens, request_id=name))
    assert admission_order(scheduler) == ["d", "b", "e", "a", "c"]


def test_longest_output_keeps_preempted_ones_in_front_by_what_they_have_left():
    def make_sequence(max_tokens: int, num_generated: int = 0, num_preemptions: int = 0):
        sequence = Sequence.of(make_request(20, max_tokens))
        sequence.token_ids.extend([TOKEN] * num_generated)
        sequence.num_preemptions = num_preemptions
        return sequence

    nearly_done = make_sequence(50, num_generated=45, num_preemptions=1)
    half_done = make_sequence(20, num_generated=10, num_preemptions=2)
    as_far = make_sequence(11, num_generated=1, num_preemptions=1)
    short, long = make_sequence(9), make_sequence(99)
    waiting = [nearly_done, half_done, as_far, short, long]
    order = POLICIES["longest-output"](waiting, lambda _: 0)
    assert order == [half_done, as_far, nearly_done, long, short]
    assert POLICIES["longest-output"]([], lambda _: 0) == []


def test_longest_output_takes_a_preempted_sequence_back_before_longer_ones():
    scheduler = make_scheduler(num_pages=9, policy="longest-output")
    kept = scheduler.add(make_request(30, max_tokens=60))
    preempted = scheduler.add(make_request(30, max_tokens=50))
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert (kept.status, preempted.status) == ("running", "waiting")
    longer = scheduler.add(make_request(20, max_tokens=80))
    while preempted.status == "waiting":
        assert longer.status == "waiting"
        run_step(scheduler)
    run_until_idle(scheduler)
    assert (preempted.num_generated, longer.num_generated) == (50, 80)


def test_longest_output_fills_with_short_ones_what_the_long_ones_leave():
    scheduler = make_scheduler(max_num_seqs=2, policy="longest-output")
    for name, num_prompt, max_tokens in (("a", 10, 2), ("b", 12, 2), ("c", 9, 3), ("d", 50, 8)):
        scheduler.add(make_request(num_prompt, max_tokens, request_id=name))
    batches = run_until_idle(scheduler)
    # "d" takes 50 of the first step's 64 tokens, and one of its two rows to the end.
    assert [row.num_tokens for row in batches[0].rows] == [50, 9]
    assert ["".join(sorted(ids(batch))) for batch in batches] == (
        ["cd"] * 3 + ["ad"] * 2 + ["bd"] * 2 + ["d"]
    )


@pytest.mark.parametrize(
    ("outputs", "fcfs", "longest_output"),
    [
        # By hand, two rows: a | b are the steps at whose ends they get free.
        (range(1, 6), 9, 8),  # 1+3+5 | 2+4, and 5+2+1 | 4+3
        (range(1, 7), 12, 11),  # 2+4+6 | 1+3+5, and 6+3+2 | 5+4+1
        (range(1, 11), 30, 28),
        ([1, 1, 1, 1, 4], 6, 4),
        ([9, 1, 1, 1], 9, 9),
        # The worst that the rule does with two rows: 7/6 of the best.
        ([2, 3, 2, 3, 2], 6, 7),
    ],
)
def test_steps_of_a_batch_by_policy(outputs, fcfs, longest_output):
    for policy, num_steps in (("fcfs", fcfs), ("longest-output", longest_output)):
        scheduler = make_scheduler(max_num_seqs=2, policy=policy)
        for max_tokens in outputs:
            scheduler.add(make_request(4, max_tokens))
        assert len(run_until_idle(scheduler)) == num_steps, policy


def test_longest_output_leaves_no_row_idle_before_the_end_of_a_batch():
    for num_requests in range(2, 30):
        scheduler = make_scheduler(max_num_seqs=2, policy="longest-output")
        for max_tokens in range(1, num_requests + 1):
            scheduler.add(make_request(4, max_tokens))
        num_tokens = num_requests * (num_requests + 1) // 2
        assert len(run_until_idle(scheduler)) == -(-num_tokens // 2)
