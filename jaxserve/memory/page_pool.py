"""Which KV pages are free, and how many hold each of the others.

A page has a reference for each sequence that uses it and one if the prefix cache has it. Only
cached pages are ever shared, so a page with two holders or more is a cached page that some sequence
uses.
"""

from collections.abc import Iterable

NULL_PAGE = 0
"""Takes the writes of padding tokens; never handed out."""


class PagePool:
    """Page ids 1 to `num_pages` - 1, with reference counts.

    A page may be handed out again at once although a step in flight still reads or writes it: the
    device runs steps in the order they were sent, and the new holder's first write comes in a later
    one.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, NULL_PAGE, -1))
        self.refs = [0] * num_pages
        self.num_shared = 0
        """Pages with two holders or more."""

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def allocate(self, num_pages: int) -> list[int]:
        """Takes free pages, of which there must be enough; each has one reference, the caller's."""
        assert 0 <= num_pages <= len(self.free), f"{num_pages} pages asked, {len(self.free)} free"
        pages = [self.free.pop() for _ in range(num_pages)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each of `pages`, which are held already."""
        refs = self.refs
        for page in pages:
            count = refs[page]
            assert count > 0, f"page {page} is free and can't be shared"
            refs[page] = count + 1
            if count == 1:
                self.num_shared += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a reference from each of `pages`; those without any are free again."""
        refs = self.refs
        for page in pages:
            count = refs[page] - 1
            assert count >= 0, f"page {page} was released more often than held"
            refs[page] = count
            if count == 1:
                self.num_shared -= 1
            elif count == 0:
                self.free.append(page)

    def check(self, holders: Iterable[int]) -> None:
        """Asserts that each page is held exactly as often as it occurs in `holders`, or is free."""
        expected = [0] * self.num_pages
        for page in holders:
            expected[page] += 1
        wrong = {
            p: (r, e) for p, (r, e) in enumerate(zip(self.refs, expected, strict=True)) if r != e
        }
        assert not wrong, f"pages with (references, holders) that differ: {wrong}"
        assert expected[NULL_PAGE] == 0, "page 0 is held"
        free = sorted(self.free)
        unheld = [page for page in range(1, self.num_pages) if not expected[page]]
        assert free == unheld, f"free list {free}, pages without holder {unheld}"
        shared = sum(refs > 1 for refs in self.refs)
        assert shared == self.num_shared, f"{shared} shared pages, counted {self.num_shared}"
