"""Compiles grammars in threads, keeps them, and fills the masks of steps. Imports no jax."""

import collections
import concurrent.futures
import threading
import time

import llguidance
import numpy as np

from jaxserve.constrained.matcher import LlguidanceMatcher, find_end, short_message
from jaxserve.constrained.source import GrammarError, to_llguidance
from jaxserve.constrained.vocabulary import Vocabulary
from jaxserve.observation import compile_histogram
from jaxserve.scheduler.sequence import Batch
from jaxserve.types import Grammar, InvalidRequest, TokenSampling

NUM_THREADS = 2
MAX_CACHED = 128
END_TOKENS, END_NODES = 1024, 4000
"""Bounds of the search for a grammar's shortest text."""
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class Compiled:
    """A grammar that can be followed."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        """Raises: GrammarError."""
        source = to_llguidance(grammar, vocabulary.is_special)
        self.vocabulary = vocabulary
        self.start = llguidance.LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_LIMITS)
        if not self.start.is_error():
            self.start.compute_bitmask()
        if "NoExtension" in self.start.get_error():
            raise GrammarError("no text of this model's tokens can match")
        if self.start.is_error():
            raise GrammarError(short_message(self.start.get_error()))
        self.shortest = find_end(self.start, vocabulary, END_TOKENS, END_NODES)


class Job:
    """A request's wait for its grammar."""

    def __init__(
        self, grammar: Grammar, future: concurrent.futures.Future[Compiled], owner: "Grammars"
    ):
        self._grammar = grammar
        self._future = future
        self._owner = owner
        self._deadline_s = time.monotonic() + owner.timeout_s

    def is_over(self) -> bool:
        return self._future.done() or time.monotonic() >= self._deadline_s

    def matcher(self, sampling: TokenSampling) -> LlguidanceMatcher:
        """A new sequence's matcher. Raises: InvalidRequest where there is none, saying why."""
        field, owner = self._grammar.field, self._owner
        try:
            if not self._future.done():
                owner.num_timeouts += 1
                raise GrammarError(f"takes longer than {owner.timeout_s:g} s to compile")
            compiled = self._future.result()
        except GrammarError as error:
            owner.num_failures += 1
            raise InvalidRequest(field, str(error)) from None
        return LlguidanceMatcher(
            compiled.vocabulary,
            compiled.start,
            compiled.shortest,
            stop_token_ids=sampling.stop_token_ids,
            token_by_token=_must_sample_each(sampling),
        )


def _must_sample_each(sampling: TokenSampling) -> bool:
    """Whether something is told or counted of every token as it is sampled."""
    return bool(
        sampling.logprobs is not None
        or sampling.token_ids_logprob
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


class Grammars:
    """The grammars of one engine. Used by its loop's thread; compiling happens in others."""

    def __init__(self, vocab_size: int, timeout_s: float):
        """`timeout_s`: how long a request waits for its grammar, other ones before it included."""
        self.timeout_s = timeout_s
        self.num_requests = 0
        self.num_hits = 0
        self.num_failures = 0
        self.num_timeouts = 0
        self.compile_seconds = compile_histogram()
        self._vocab_size = vocab_size
        self._threads = concurrent.futures.ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix="jaxserve-grammar"
        )
        self._vocabulary: concurrent.futures.Future[Vocabulary] | None = None
        self._fill = llguidance.LLExecutor()
        self._cache: collections.OrderedDict[
            tuple[str, str], concurrent.futures.Future[Compiled]
        ] = collections.OrderedDict()
        self._counting = threading.Lock()

    def use_vocabulary(self, tokenizer_json: str, eos_token_ids: list[int]) -> None:
        """Tells the tokens that grammars are made of; before the first `compile`."""
        self._vocabulary = self._threads.submit(
            Vocabulary, tokenizer_json, eos_token_ids, self._vocab_size
        )

    def compile(self, grammar: Grammar) -> Job:
        """Begins to compile a grammar, unless it's there or under way."""
        self.num_requests += 1
        key = (grammar.kind, grammar.text)
        future = self._cache.get(key)
        if future is None or future.cancelled():
            future = self._cache[key] = self._threads.submit(self._compile, grammar)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        else:
            self.num_hits += 1
        self._cache.move_to_end(key)
        return Job(grammar, future, self)

    def _compile(self, grammar: Grammar) -> Compiled:
        if self._vocabulary is None:
            raise GrammarError("the model has no tokenizer")
        vocabulary = self._vocabulary.result()
        started_s = time.monotonic()
        try:
            return Compiled(grammar, vocabulary)
        finally:
            with self._counting:
                self.compile_seconds.observe(time.monotonic() - started_s)

    def masks(self, batch: Batch, num_rows: int) -> np.ndarray | None:
        """What each row of a step may sample, u32[num_rows, ceil(V/32)] with bit v%32 of word v//32
        for token v; None if no row has a grammar.

        Everything must be committed that was scheduled before `batch`.
        """
        followed = [
            (r, row.sequence.matcher)
            for r, row in enumerate(batch.rows)
            if row.samples
            and isinstance(row.sequence.matcher, LlguidanceMatcher)
            and row.sequence.status != "finished"
        ]
        if not followed:
            return None
        assert self._vocabulary is not None
        masks = np.full((num_rows, self._vocabulary.result().num_words), 0xFFFFFFFF, np.uint32)
        grammars = [(r, m) for r, m in followed if not m.fill_special(masks[r])]
        if grammars:
            self._fill.unsafe_compute_mask_ptr(
                [(m.native, r) for r, m in grammars], masks.ctypes.data, masks[0].nbytes, num_rows
            )
        for r, matcher in grammars:
            matcher.finish_mask(masks[r])
        words = -(-self._vocab_size // 32)
        return masks if masks.shape[1] == words else np.ascontiguousarray(masks[:, :words])

    def close(self) -> None:
        """Waits for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
