import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.memory.page_pool import NULL_PAGE, PagePool


def test_hands_out_every_page_but_the_null_page():
    pool = PagePool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert NULL_PAGE == 0
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 pages asked, 0 free"):
        pool.allocate(1)


def test_page_is_free_again_when_its_last_holder_lets_go():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.retain([page])
    assert pool.num_shared == 1
    pool.release([page])
    assert (pool.num_shared, pool.num_free) == (0, 1)
    pool.release([page])
    assert pool.num_free == 2


def test_refuses_to_share_or_release_a_free_page():
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="page 1 is free"):
        pool.retain([1])
    with pytest.raises(AssertionError, match="page 1 was released more often"):
        pool.release([1])


def test_check_names_a_page_whose_holders_differ():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.check(pages)
    with pytest.raises(AssertionError, match="differ"):
        pool.check(pages[:1])


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 9))))
def test_every_page_is_free_or_held(operations):
    pool = PagePool(8)
    held: list[int] = []
    for operation, number in operations:
        if operation == "allocate" and number <= pool.num_free:
            held += pool.allocate(number)
        elif operation == "retain" and held:
            held.append(held[number % len(held)])
            pool.retain(held[-1:])
        elif operation == "release" and held:
            pool.release([held.pop(number % len(held))])
        pool.check(held)
        assert pool.num_free == pool.num_usable - len(set(held))
