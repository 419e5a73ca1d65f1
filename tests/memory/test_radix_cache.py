import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.memory.page_pool import PagePool
from jaxserve.memory.radix_cache import RadixCache

SIZE = 2
ROOT = ("root",)


def make_cache(num_pages: int = 20) -> RadixCache:
    return RadixCache(PagePool(num_pages), SIZE)


def insert(cache: RadixCache, token_ids: list[int], root: tuple = ROOT) -> list[int]:
    """Caches `token_ids` as a sequence that computed them would; returns the pages, locked."""
    path = cache.pool.allocate(-(-len(token_ids) // SIZE))
    done = 0
    while done < len(path):
        above = path[done - 1] if done else root
        added, other = cache.insert(above, token_ids[done * SIZE :], path[done:])
        done += added
        if other is None:
            assert done == len(path)
            break
        cache.lock([other])
        cache.pool.release([path[done]])
        path[done] = other
        done += 1
    return path


def test_match_finds_the_longest_prefix_in_whole_pages():
    cache = make_cache()
    path = insert(cache, [1, 2, 3, 4, 5, 6])
    assert cache.match(ROOT, [1, 2, 3, 4, 5, 6, 7]) == path
    assert cache.match(ROOT, [1, 2, 3, 4, 5, 9, 7]) == path[:2]
    assert cache.match(ROOT, [1, 2, 3]) == path[:1]
    assert cache.match(ROOT, [2, 2, 3]) == []


def test_match_leaves_a_token_to_compute():
    cache = make_cache()
    path = insert(cache, [1, 2, 3, 4])
    assert cache.match(ROOT, [1, 2, 3, 4]) == path[:1]
    assert cache.match(ROOT, [1, 2]) == []
    assert cache.match(ROOT, [1]) == []


def test_match_keeps_roots_apart():
    cache = make_cache()
    path = insert(cache, [1, 2, 3, 4], ("a",))
    other = insert(cache, [1, 2, 3, 4], ("b",))
    assert not set(path) & set(other)
    assert cache.match(("a",), [1, 2, 3, 4, 5]) == path
    assert cache.match(("c",), [1, 2, 3, 4, 5]) == []


def test_insert_returns_the_page_that_was_there_before():
    cache = make_cache()
    path = insert(cache, [1, 2, 3, 4])
    assert insert(cache, [1, 2, 3, 4]) == path
    assert len(cache) == 2
    cache.pool.check(path * 3)


def test_insert_adds_a_path_up_to_the_first_page_that_the_tree_has():
    cache = make_cache()
    pages = cache.pool.allocate(3)
    assert cache.insert(ROOT, [1, 2, 3, 4, 5, 6], pages) == (3, None)
    others = cache.pool.allocate(4)
    assert cache.insert(ROOT, [1, 2, 9, 9], others[:2]) == (0, pages[0])
    assert cache.insert(pages[0], [9, 9, 8, 8], others[1:3]) == (2, None)
    assert cache.insert(pages[2], [], []) == (0, None)
    assert len(cache) == 5
    cache.check()
    cache.pool.check([*pages * 2, *others[1:3] * 2, others[0], others[3]])
    assert cache.match(ROOT, [1, 2, 9, 9, 8, 8, 0]) == [pages[0], *others[1:3]]


def test_insert_refuses_half_a_page():
    cache = make_cache()
    with pytest.raises(AssertionError, match="3 tokens are not 2 whole pages"):
        insert(cache, [1, 2, 3])


def test_evict_keeps_locked_prefix():
    cache = make_cache()
    path = insert(cache, [1, 2, 3, 4, 5, 6])
    cache.lock(path[:2])
    cache.unlock(path)
    assert cache.num_unlocked == 1
    assert cache.evict(10) == 1
    assert cache.match(ROOT, [1, 2, 3, 4, 5, 6, 7]) == path[:2]
    cache.unlock(path[:2])
    assert cache.evict(10) == 2
    assert (len(cache), cache.pool.num_free) == (0, 19)


def test_evict_takes_the_least_recently_used_leaf_first():
    cache = make_cache()
    paths = [insert(cache, [1, 2, token, token]) for token in range(3)]
    for path in (paths[1], paths[2], paths[0]):
        cache.unlock(path)
    cache.lock(paths[1])  # used again: now the most recent
    cache.unlock(paths[1])
    remaining = []
    while cache.evict(1):
        matched = [len(cache.match(ROOT, [1, 2, token, token, 0])) for token in range(3)]
        remaining.append(matched)
        cache.check()
    assert remaining == [[2, 2, 1], [1, 2, 1], [1, 1, 1], [0, 0, 0]]


def test_evict_counts_the_use_of_longer_prefixes_for_shorter_ones():
    cache = make_cache()
    long, short = insert(cache, [1, 1, 2, 2]), insert(cache, [3, 3])
    cache.unlock(insert(cache, [1, 1]))
    cache.unlock(short)
    cache.unlock(long)  # the last use of page [1, 1] too, although it was let go of before
    assert cache.evict(2) == 2
    assert len(cache.match(ROOT, [1, 1, 0])) == 1
    assert cache.match(ROOT, [3, 3, 0]) == []


def test_outdated_heap_entries_do_not_pile_up():
    cache = make_cache()
    path = insert(cache, [1, 2, 3, 4])
    for _ in range(1000):
        cache.lock(path)
        cache.unlock(path)
    cache.unlock(path)
    for _ in range(1000):
        cache.lock(path)
        cache.unlock(path)
    assert len(cache.leaves) < 10
    cache.check()
    assert cache.evict(2) == 2


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(2, 16))
def test_behaves_like_a_plain_tree(seed, num_pages):
    """Against a dict of prefixes in which each holds the clock of its last use."""
    rng = random.Random(seed)
    cache = make_cache(num_pages)
    pages: dict[tuple, int] = {}
    used: dict[tuple, int] = {}
    users: list[tuple[tuple, list[int]]] = []

    def prefixes(tokens: tuple) -> list[tuple]:
        return [tokens[:end] for end in range(SIZE, len(tokens) + 1, SIZE)]

    def evict_plainly() -> bool:
        locked = {prefix for tokens, _ in users for prefix in prefixes(tokens)}
        parents = {prefix[:-SIZE] for prefix in pages}
        leaves = [prefix for prefix in pages if prefix not in locked and prefix not in parents]
        if leaves:
            oldest = min(leaves, key=used.__getitem__)
            del pages[oldest], used[oldest]
        return bool(leaves)

    for clock in range(80):
        operation = rng.random()
        if operation < 0.45:
            tokens = tuple(rng.randrange(2) for _ in range(SIZE * rng.randint(1, 4)))
            matched = cache.match(ROOT, [*tokens, 0])
            expected = [pages[prefix] for prefix in prefixes(tokens) if prefix in pages]
            assert matched == expected
            cache.lock(matched)
            users.append((tokens[: len(matched) * SIZE], matched))
            needed = len(tokens) // SIZE - len(matched)
            while cache.pool.num_free < needed and cache.evict(1):
                assert evict_plainly()
            if cache.pool.num_free < needed:
                assert not evict_plainly()
                continue
            for prefix in prefixes(tokens)[len(matched) :]:
                (page,) = cache.pool.allocate(1)
                above = matched[-1] if matched else ROOT
                assert cache.insert(above, prefix[-SIZE:], [page]) == (1, None)
                matched.append(page)
                pages[prefix], used[prefix] = page, -1
            users[-1] = (tokens, matched)
        elif operation < 0.85 and users:
            tokens, path = users.pop(rng.randrange(len(users)))
            cache.unlock(path)
            used.update((prefix, clock) for prefix in prefixes(tokens))
        elif operation < 0.95:
            assert cache.evict(1) == int(evict_plainly())
        cache.check()
        cache.pool.check([*cache.nodes.values(), *(page for _, path in users for page in path)])
        assert sorted(cache.nodes.values()) == sorted(pages.values())
        locked = {page for _, path in users for page in path}
        assert cache.num_unlocked == len(set(pages.values()) - locked)


def test_most_hit_pages_come_with_those_above_them():
    pool = PagePool(20)
    cache = RadixCache(pool, 2)
    paths = {}
    for name, length in (("a", 4), ("b", 3), ("c", 2)):
        paths[name] = pool.allocate(length)
        cache.insert((name,), [i // 2 for i in range(2 * length)], paths[name])
    for name, hits in (("a", 1), ("b", 5)):
        for _ in range(hits):
            cache.count_hit(paths[name])
    cache.count_hit(paths["a"][:2])
    nodes = cache.most_hit(5)
    assert [node.page for node in nodes[:3]] == paths["b"]
    assert [(node.page, node.hits) for node in nodes[3:]] == [(p, 2) for p in paths["a"][:2]]
    assert [node.above for node in nodes] == [0, *paths["b"][:2], 0, paths["a"][0]]
    assert nodes[1].token_ids == [1, 1]
    assert len(cache.most_hit(100)) == 9
    assert cache.most_hit(1)[0].page == paths["b"][0], "a page never comes without those above"
    cache.check()


def test_an_evicted_page_has_no_hits_left():
    pool = PagePool(3)
    cache = RadixCache(pool, 2)
    for hits in (3, 0):
        [page] = pool.allocate(1)
        assert cache.insert(("r",), [7, 7], [page]) == (1, None)
        for _ in range(hits):
            cache.count_hit([page])
        cache.unlock([page])
        assert cache.most_hit(9)[0].hits == hits
        assert cache.evict(1) == 1
        assert cache.most_hit(9) == []
    assert cache.num_evicted == 2
