"""Every sampling parameter against NumPy: alone, in pairs, in mixed batches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_sampler as reference
import pytest

from jaxserve.execution import sampling, slot_state, step, token_masks
from jaxserve.execution.buckets import SampleKind
from jaxserve.execution.runner import LogprobReader, _sample
from jaxserve.scheduler.sequence import Batch, Row, Sequence
from jaxserve.types import Request, SamplingParams, TokenSampling

V = 203
ROWS = 8
SLOTS = 12
PADDED = 5
"""Token ids at the end that the tokenizer doesn't have."""

rng = np.random.default_rng(4)

TABLE: dict[str, list[dict]] = {
    "temperature": [{"temperature": t} for t in (0.0, 1e-6, 0.3, 1.0, 2.0)],
    "top_k": [{"top_k": k} for k in (1, 2, 50, V - 1, V + 50)],
    "top_p": [{"top_p": p} for p in (1e-7, 0.2, 0.9, 1 - 1e-7, 1.0)],
    "min_p": [{"min_p": p} for p in (0.01, 0.3, 1.0)],
    "typical_p": [{"typical_p": p} for p in (1e-7, 0.2, 0.9, 1.0)],
    "repetition_penalty": [{"repetition_penalty": p} for p in (0.5, 1.3, 5.0)],
    "presence_penalty": [{"presence_penalty": p} for p in (-2.0, 0.7)],
    "frequency_penalty": [{"frequency_penalty": p} for p in (-0.5, 2.0)],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": n} for n in (1, 2, 3, 50)],
    "logit_bias": [
        {"logit_bias": {7: 100.0}},
        {"logit_bias": {t: -100.0 for t in range(0, 150)}},
        {"logit_bias": {3: 5.5, V - 1: 100.0, 0: -1.0}},
    ],
    "allowed_token_ids": [
        {"allowed_token_ids": (31,)},
        {"allowed_token_ids": (32, 5, 5, 197)},
        {"allowed_token_ids": tuple(range(0, V, 2))},
    ],
    "bad_words": [
        {"bad_words": tuple((t,) for t in range(0, V, 3))},
        {"bad_words": ((1, 2), (9, 8, 7), (3,), (4, 4, 1, 2, 3, 4))},
    ],
    "min_tokens": [
        {"min_tokens": 3, "stop_token_ids": tuple(range(0, 100))},
        {"min_tokens": 2000, "stop_token_ids": tuple(range(1, 190))},
    ],
    "stop_token_ids": [{"stop_token_ids": tuple(range(0, 100))}],
    "seed": [{"seed": s} for s in (0, 1, 2**63 - 1, -(2**63))],
    "logprobs": [{"logprobs": n} for n in (0, 3, 20, -1)],
    "prompt_logprobs": [{"prompt_logprobs": n} for n in (0, 3, 20, -1)],
    "token_ids_logprob": [{"token_ids_logprob": (5,)}, {"token_ids_logprob": (V - 1, 0, 0, 9)}],
    "logprobs_mode": [
        {"logprobs_mode": "processed_logprobs", "logprobs": 20, "top_p": 0.8},
        {"logprobs_mode": "raw_logprobs", "logprobs": 20, "top_p": 0.8},
    ],
}
"""Parameters that this file is about, with values to try."""

ELSEWHERE = {
    "max_tokens": "tests/scheduler",
    "stop": "tests/entry/test_detokenizer.py",
    "n": "tests/entry/test_client.py",
    "ignore_eos": "tests/entry/test_client.py",
    "grammar": "tests/engine/test_grammar.py",
    "prompt_logprobs_start": "tests/engine/test_sampling_options.py",
    **dict.fromkeys(
        ("use_beam_search", "length_penalty", "early_stopping"), "tests/e2e/test_search.py"
    ),
    **dict.fromkeys(
        (
            "best_of",
            "stop_regex",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "truncate_prompt_tokens",
            "echo",
            "stream_interval",
        ),
        "tests/entry/test_choices.py",
    ),
}
"""Those that never reach the sampler, but for a grammar's masks; and what tests them."""


def test_every_parameter_is_in_the_table():
    assert TABLE.keys() | ELSEWHERE.keys() == set(SamplingParams.__struct_fields__)
    elsewhere = {"num_tokens", "max_tokens", "grammar", "prompt_logprobs_start"}
    assert set(TokenSampling.__struct_fields__) - elsewhere == TABLE.keys()


@pytest.fixture(scope="module")
def sample():
    kinds = {}

    def run(kind, *arguments):
        if kind not in kinds:
            kinds[kind] = jax.jit(lambda *given: _sample(*given, kind=kind))
        return kinds[kind](*arguments)

    return run


start_row = jax.jit(slot_state.start_row)
uniform = jax.jit(sampling.uniform)
apply_mask = jax.jit(sampling.apply_mask)


def make_sequence(options: dict, num_prompt: int, num_output: int) -> Sequence:
    """One with random tokens of few kinds, so that some of them repeat."""
    tokens = rng.integers(0, 12, num_prompt + num_output).tolist()
    given = {"max_tokens": 4000, "num_tokens": V - PADDED, **options}
    request = Request(
        request_id="r", token_ids=tokens[:num_prompt], sampling=TokenSampling(**given)
    )
    sequence = Sequence.of(request)
    sequence.token_ids = tokens
    return sequence


def run_batch(sample, cases: list[dict], logits: np.ndarray, kind: SampleKind | None = None):
    """Samples one row for each case and checks it; `kind`: a dearer one than they need."""
    lengths = [(1, 0), (5, 1), (40, 9), (2500, 17), (3, 2200), (30, 30), (2048, 0), (9, 2)]
    sequences = [
        make_sequence(options, *lengths[r % len(lengths)]) for r, options in enumerate(cases)
    ]
    slots = rng.permutation(SLOTS)[: len(cases)].tolist()
    rows = [
        Row(sequence, slot, len(sequence.token_ids) - 1, 1, True, False)
        for sequence, slot in zip(sequences, slots, strict=True)
    ]
    batch = Batch(rows, len(rows), len(rows), rows, [])
    given = step.Packer(SLOTS, 1, V).pack_sampling(batch, ROWS)
    kind = max(given.kind, kind or SampleKind.GREEDY)
    state = None
    if kind == SampleKind.STATEFUL:
        state = jax.tree.map(lambda x: x + 7, slot_state.empty(SLOTS, V))  # of sequences before
        starts = given.starts
        if kind > given.kind:  # a row that needs no state may be beside one that does
            starts = [
                packed
                for one, slot in zip(sequences, slots, strict=True)
                for packed in slot_state.pack_start(one, slot)
            ]
        for packed in starts:
            state = start_row(state, packed)
    masks, unmasked = given.masks, logits
    if kind >= SampleKind.FULL:
        masks = token_masks.all_allowed(ROWS, -(-V // 32)) if masks is None else masks
    elif masks is not None:
        logits, masks = apply_mask(logits, masks), None
    before = None if state is None else np.asarray(state.counts)
    last_token = jnp.full(SLOTS, -9, jnp.int32)
    sampled, last_token, state = sample(kind, logits, last_token, given.options, masks, state)
    tokens = np.asarray(sampled.tokens)
    np.testing.assert_array_equal(np.asarray(last_token)[slots], tokens[: len(rows)])
    assert (np.asarray(last_token) == -9).sum() == SLOTS - len(rows)
    if state is not None and before is not None and (tokens >= 0).any():
        added = np.asarray(state.counts) - before
        expected = np.zeros_like(added)
        counted = [(slot, t) for slot, t in zip(slots, tokens, strict=False) if t >= 0]
        expected[tuple(zip(*counted, strict=True))] = 2
        np.testing.assert_array_equal(added, expected)
    for r, sequence in enumerate(sequences):
        check_row(r, sequence, unmasked[r], sampled, int(tokens[r]))
    return tokens[: len(rows)]


def check_row(r: int, sequence: Sequence, logits: np.ndarray, sampled, token: int) -> None:
    options = sequence.request.sampling
    prompt = sequence.token_ids[: sequence.num_prompt]
    output = sequence.token_ids[sequence.num_prompt :]
    allowed = reference.allowed_logits(logits, options, prompt, output)
    if allowed.max() == -np.inf:
        assert token == sampling.NONE_ALLOWED, options
        return
    kept = reference.kept_logits(allowed, options)
    u = uniform(
        *(np.array([step._signed(options.seed >> s)], np.int32) for s in (0, 32)),
        np.array([len(sequence.token_ids)], np.int32),
    )
    reference.check_token(token, kept, options.temperature, float(u[0]))
    asked = kept if options.logprobs_mode == "processed_logprobs" else logits.astype(np.float64)
    read = LogprobReader(sampled) if sampled.logprobs.size else None
    found = read and read.row(r, options.logprobs, options)
    if options.logprobs is None and not options.token_ids_logprob:
        assert found is None
        return
    assert found is not None
    check_logprobs(found, options.logprobs or 0, options, reference.log_softmax(asked), token)


def check_logprobs(found, count: int, options: TokenSampling, expected, token: int) -> None:
    close = {"atol": 2e-5, "rtol": 2e-5}
    expected = expected.copy()
    for at, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        if (logprob == -np.inf) != (expected[at] == -np.inf):
            # under top_p 1 - 1e-7 rounding decides what the last share is
            assert max(logprob, expected[at]) < -14, f"{at}: {logprob}, not {expected[at]}"
            expected[at] = logprob
    np.testing.assert_allclose(found.logprob, expected[token], **close)
    assert len(found.top_ids) == (V if count == -1 else count)
    np.testing.assert_allclose(found.top_logprobs, expected[found.top_ids], **close)
    best = -np.sort(-expected)[: len(found.top_ids)]
    np.testing.assert_allclose(found.top_logprobs, best, **close)
    named = expected[list(options.token_ids_logprob)]
    np.testing.assert_allclose(found.named, named, **close)


def random_logits() -> np.ndarray:
    logits = rng.normal(0, 3, (ROWS, V)).astype(np.float32)
    logits[:, -PADDED:] += 20  # padding that would win
    return logits


ALONE = [
    {"temperature": temperature, **options}
    for values in TABLE.values()
    for options in values
    for temperature in ((options["temperature"],) if "temperature" in options else (0.0, 1.0))
]
SEE_ALL = {"logprobs": -1, "logprobs_mode": "processed_logprobs"}


def batches(cases: list[dict]) -> list[list[dict]]:
    return [list(batch) for batch in itertools.batched(cases, ROWS)]


def test_every_value_alone_in_the_cheapest_kind_and_in_all_dearer_ones(sample):
    for options in ALONE:
        logits = random_logits()
        state = rng.bit_generator.state
        tokens = run_batch(sample, [options], logits)
        for kind in SampleKind:
            rng.bit_generator.state = state
            np.testing.assert_array_equal(run_batch(sample, [options], logits, kind), tokens)


def test_the_whole_distribution_of_every_value(sample):
    for cases in batches([{**options, **SEE_ALL} for options in ALONE]):
        run_batch(sample, cases, random_logits())


def test_mixed_batches(sample):
    cases = ALONE * 2
    for order in (rng.permutation(len(cases)) for _ in range(2)):
        for batch in batches([cases[i] for i in order]):
            run_batch(sample, batch, random_logits())


def test_pairs(sample):
    cases = []
    for one, other in itertools.combinations(TABLE, 2):
        options = {"temperature": 0.8, "seed": int(rng.integers(99))}
        for name in (one, other):
            options |= TABLE[name][rng.integers(len(TABLE[name]))]
        cases.append(options)
    for batch in batches(cases):
        run_batch(sample, batch, random_logits())
        run_batch(sample, [{**options, **SEE_ALL} for options in batch], random_logits())


def test_greedy_rows_beside_random_ones_take_the_largest(sample):
    for kind in SampleKind:
        for options in ({"temperature": 1.0}, {"top_p": 0.5}, {"logprobs": 1}, {"typical_p": 0.5}):
            cases = [{"temperature": 0.0}, {**options}] * (ROWS // 2)
            run_batch(sample, cases, random_logits(), kind)


def test_padding_of_the_vocabulary_is_never_sampled(sample):
    for kind in SampleKind:
        for temperature in (0.0, 1.0):
            cases = [{"temperature": temperature, "seed": s} for s in range(ROWS)]
            tokens = run_batch(sample, cases, random_logits(), kind)
            assert tokens.max() < V - PADDED


def test_a_row_with_no_token_left_says_so(sample):
    cases = [
        {"allowed_token_ids": (4,), "bad_words": ((4,),), "temperature": t, **options}
        for t in (0.0, 1.0)
        for options in ({}, {"logit_bias": {4: 100.0}}, {"logprobs": 3}, {"typical_p": 0.5})
    ]
    assert (run_batch(sample, cases, random_logits()) == sampling.NONE_ALLOWED).all()


def test_only_what_a_batch_asks_for_is_computed():
    def kind_of(*cases: dict) -> SampleKind:
        rows = [Row(make_sequence(c, 3, 0), i, 2, 1, True, False) for i, c in enumerate(cases)]
        return step.Packer(SLOTS, 1, V).pack_sampling(Batch(rows, 1, 1, rows, []), ROWS).kind

    greedy, random = {"temperature": 0.0}, {}
    assert kind_of(greedy, greedy) == SampleKind.GREEDY
    assert kind_of(greedy, random) == SampleKind.RANDOM
    assert kind_of(random, {"top_p": 0.5}) == SampleKind.FILTERED
    assert kind_of(random, {"bad_words": ((1,),)}) == SampleKind.RANDOM, "masks go before"
    assert kind_of(greedy, {"logprobs": 0}) == SampleKind.FULL
    assert kind_of(greedy, {"presence_penalty": 0.1}) == SampleKind.STATEFUL
    assert kind_of({"repetition_penalty": 1.0, "logit_bias": {}, **greedy}) == SampleKind.GREEDY


def test_prompt_rows_tell_the_next_tokens_logprob(sample):
    for count, named in ((0, ()), (3, ()), (-1, ()), (2, (5, 0))):
        options = {"prompt_logprobs": count, "token_ids_logprob": named, "typical_p": 0.3}
        sequence = make_sequence(options, ROWS, 0)
        rows = [Row(sequence, 3, i, 1, i == 7, False, scores=i < 7) for i in range(ROWS)]
        given = step.Packer(SLOTS, 1, V).pack_sampling(Batch(rows, 8, 8, rows[-1:], []), ROWS)
        state = slot_state.empty(SLOTS, V)
        for packed in given.starts:
            state = start_row(state, packed)
        logits = random_logits()
        masks = token_masks.all_allowed(ROWS, -(-V // 32))
        sampled, last_token, _ = sample(
            given.kind, logits, jnp.zeros(SLOTS, jnp.int32), given.options, masks, state
        )
        assert np.flatnonzero(last_token).tolist() in ([], [3]), "only the last row samples"
        for r in range(ROWS - 1):
            found = LogprobReader(sampled).row(r, count, sequence.request.sampling)
            expected = reference.log_softmax(logits[r].astype(np.float64))
            check_logprobs(
                found, count, sequence.request.sampling, expected, sequence.token_ids[r + 1]
            )
