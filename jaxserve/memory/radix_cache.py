"""The prefix cache: a tree of KV pages, each found by its tokens and those of all pages before it.

Every page in the tree is one node, a page's id is its node's name, and the tree is one flat dict:

    (root, tokens of page 0) -> 7      (7, tokens of page 1) -> 3      (7, other tokens) -> 12

A root is a tuple of what keeps equal tokens from sharing: salt, adapter, version of the weights. To
share prefixes by a tree with least recently used leaves is RadixAttention's idea (arXiv:2312.07104,
section 3).

Pages of the tree hold one reference each in the pool. Whoever uses a page uses all pages above it
and holds a reference to each (`lock`), so a page with one reference is unlocked, and so is all that
hangs below it.
"""

import heapq
from array import array
from collections.abc import Sequence

import numpy as np

from jaxserve.memory.page_pool import NULL_PAGE, PagePool
from jaxserve.observation import PrefixNode

Node = tuple | int
"""A root or a page."""
TOKEN_BYTES = array("i").itemsize


class RadixCache:
    """Finds the pages that hold the KV of given tokens; evicts the least recently used leaves."""

    def __init__(self, pool: PagePool, page_size: int):
        self.pool = pool
        self.page_size = page_size
        self.nodes: dict[tuple[Node, bytes], int] = {}
        self.keys: list[tuple[Node, bytes] | None] = [None] * pool.num_pages
        """Each page's key in `nodes`, (page or root above, tokens); None: not in the tree."""
        self.num_children = [0] * pool.num_pages
        self.last_used = [0] * pool.num_pages
        """The clock when a user last let go of the page as the deepest it had."""
        self.hits = array("q", [-1]) * pool.num_pages
        """How often `count_hit` was told of each page; -1: not in the tree."""
        self.num_evicted = 0
        self.clock = 0
        self.leaves: list[tuple[int, int]] = []
        """Heap of (last used, page): every unlocked leaf, and outdated entries, to be skipped."""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def num_unlocked(self) -> int:
        """Pages that nobody but the tree holds: what `evict` can free."""
        return len(self.nodes) - self.pool.num_shared

    def match(self, root: tuple, token_ids: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix of `token_ids`, in order, not locked yet.

        Leaves at least one token to compute, since a sequence needs the logits of its last.
        """
        pages: list[int] = []
        size = self.page_size
        above: Node = root
        for end in range(size, len(token_ids), size):
            page = self.nodes.get((above, _key(token_ids[end - size : end])))
            if page is None:
                break
            pages.append(page)
            above = page
        return pages

    def insert(
        self, above: Node, token_ids: Sequence[int], pages: Sequence[int]
    ) -> tuple[int, int | None]:
        """Adds `pages`, the KV of `token_ids`, one below the other and the first below `above`, a
        root or a page in the tree; up to the first whose content the tree has in another page.

        Returns how many were added, which their holder thereby has locked, and that other page,
        not locked.
        """
        data, size = _key(token_ids), self.page_size * TOKEN_BYTES
        assert len(data) == len(pages) * size, (
            f"{len(token_ids)} tokens are not {len(pages)} whole pages"
        )
        added, existing = 0, None
        for page in pages:
            key = (above, data[added * size : (added + 1) * size])
            existing = self.nodes.setdefault(key, page)
            if existing != page:
                break
            assert self.keys[page] is None, f"page {page} is in the tree already"
            self.keys[page] = key
            self.hits[page] = 0
            if isinstance(above, int):
                self.num_children[above] += 1
            above = page
            added += 1
        self.pool.retain(pages[:added])
        return added, existing if added < len(pages) else None

    def lock(self, pages: Sequence[int]) -> None:
        """Keeps `pages`, a path from a root or the next page of one, from being evicted."""
        self.pool.retain(pages)

    def unlock(self, pages: Sequence[int]) -> None:
        """Ends a lock on `pages`, a whole path from a root down."""
        self.pool.release(pages)
        if pages:
            self.clock += 1
            self.last_used[pages[-1]] = self.clock
            self._offer(pages[-1])

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` pages, least recently used leaves first; returns how many."""
        num_freed = 0
        while num_freed < num_pages and self.leaves:
            used, page = heapq.heappop(self.leaves)
            key = self.keys[page]
            if key is None or used != self.last_used[page] or not self._evictable(page):
                continue
            above = key[0]
            del self.nodes[key]
            self.keys[page] = None
            self.last_used[page] = 0
            self.hits[page] = -1
            self.pool.release((page,))
            num_freed += 1
            if isinstance(above, int):
                self.num_children[above] -= 1
                self._offer(above)
        self.num_evicted += num_freed
        return num_freed

    def count_hit(self, pages: Sequence[int]) -> None:
        """Notes that a request found `pages`, a path from a root."""
        for page in pages:
            self.hits[page] += 1

    def most_hit(self, limit: int) -> list[PrefixNode]:
        """Up to `limit` pages of the tree, those most often hit, each after the one above it.

        About a millisecond for 65,536 pages.
        """
        limit = min(limit, len(self.nodes))
        if not limit:
            return []
        hits = np.frombuffer(self.hits, np.int64)
        best = np.argpartition(-hits, limit - 1)[:limit]
        chosen: dict[int, PrefixNode] = {}
        for page in best[np.argsort(-hits[best], kind="stable")].tolist():
            path: list[int] = []
            above: Node = page
            while isinstance(above, int) and above not in chosen:
                path.append(above)
                above = self._key_of(above)[0]
            for one in reversed(path[-(limit - len(chosen)) :] if len(chosen) < limit else ()):
                chosen[one] = self._describe(one)
        return list(chosen.values())

    def _describe(self, page: int) -> PrefixNode:
        above, tokens = self._key_of(page)
        return PrefixNode(
            page,
            above if isinstance(above, int) else NULL_PAGE,
            self.hits[page],
            self.pool.refs[page] - 1,
            array("i", tokens).tolist(),
        )

    def _key_of(self, page: int) -> tuple[Node, bytes]:
        key = self.keys[page]
        assert key is not None, f"{page} is not in the tree"
        return key

    def check(self) -> None:
        """Asserts that the tree is whole and that `evict` will find every unlocked leaf."""
        children = [0] * self.pool.num_pages
        for key, page in self.nodes.items():
            assert self.keys[page] == key, f"page {page}: {self.keys[page]} is not {key}"
            above = key[0]
            assert self.hits[page] >= 0, f"page {page} has no count of hits"
            if isinstance(above, int):
                children[above] += 1
                assert self.hits[above] >= self.hits[page], f"{page} has more hits than {above}"
                assert self.keys[above] is not None, (
                    f"page {page} hangs below {above}, not in the tree"
                )
                refs = self.pool.refs
                assert refs[above] >= min(refs[page], 2), (
                    f"page {page} is locked, {above} above is not"
                )
        assert children == self.num_children, f"children {children}, counted {self.num_children}"
        num_keys = sum(key is not None for key in self.keys)
        assert num_keys == len(self.nodes), f"{num_keys} keys, {len(self.nodes)} nodes"
        found = set(self.leaves)
        for page in self.nodes.values():
            offered = (self.last_used[page], page) in found
            assert offered or not self._evictable(page), (
                f"page {page} could be evicted, not offered"
            )

    def _evictable(self, page: int) -> bool:
        return self.num_children[page] == 0 and self.pool.refs[page] == 1

    def _offer(self, page: int) -> None:
        """Enters `page` for eviction if it's an unlocked leaf."""
        if not self._evictable(page):
            return
        if len(self.leaves) > 2 * len(self.nodes):
            self.leaves = [
                (self.last_used[p], p) for p in self.nodes.values() if self._evictable(p)
            ]
            heapq.heapify(self.leaves)
        else:
            heapq.heappush(self.leaves, (self.last_used[page], page))


def _key(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
