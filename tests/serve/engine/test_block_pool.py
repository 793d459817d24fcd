"""Pages: none is held twice, none is lost, and what is found holds the very text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.serve.engine.block_pool import PagePool, page_name, root_name


def know_all(pool, ids, pages, salt=None):
    name = root_name(salt)
    for place, page in enumerate(pages):
        name = page_name(name, ids[place * pool.size : (place + 1) * pool.size])
        pool.know(page, name)


def test_pages_run_out_and_come_back():
    pool = PagePool(2, 4)
    pages = [pool.take(), pool.take()]
    assert sorted(pages) == [0, 1] and pool.take() is None and pool.used == 2
    pool.release(pages)
    assert pool.available == 2 and pool.used == 0 and pool.cached == 0


def test_known_pages_are_found_by_the_text_before_them_too():
    pool = PagePool(8, 2)
    pages = [pool.take() for _ in range(3)]
    know_all(pool, [1, 2, 3, 4, 5, 6], pages)
    assert pool.match([1, 2, 3, 4, 9, 9], 6)[0] == pages[:2]
    assert pool.match([9, 9, 3, 4], 4) == ([], b"")
    assert pool.match([1, 2, 3, 4], 3)[0] == pages[:1], "a page is found whole or not at all"


def test_idle_pages_stay_until_room_is_needed_and_ends_of_texts_go_first():
    pool = PagePool(3, 1)
    pages = [pool.take() for _ in range(3)]
    know_all(pool, [7, 8, 9], pages)
    pool.release(pages)
    assert pool.available == 3 and pool.cached == 3
    assert pool.take() == pages[2]
    assert pool.match([7, 8, 9], 3)[0] == pages[:2] and pool.available == 0


def test_one_text_is_known_once():
    pool = PagePool(2, 2)
    first, second = pool.take(), pool.take()
    know_all(pool, [1, 2], [first])
    know_all(pool, [1, 2], [second])
    pool.release([second])
    assert pool.cached == 0 and pool.match([1, 2], 2)[0] == [first]


def test_texts_share_pages_where_their_salts_are_the_same():
    pool = PagePool(8, 2)
    salted, other, bare = ([pool.take(), pool.take()] for _ in range(3))
    know_all(pool, [1, 2, 3, 4], salted, "a")
    know_all(pool, [1, 2, 3, 4], other, "b")
    assert pool.match([1, 2, 3, 4], 4)[0] == []
    know_all(pool, [1, 2, 3, 4], bare)
    for salt, pages in (("a", salted), ("b", other), (None, bare)):
        assert pool.match([1, 2, 3, 4], 4, root_name(salt))[0] == pages
    assert pool.match([1, 2], 2, root_name("c")) == ([], root_name("c"))


def test_ids_cannot_be_told_apart_otherwise():
    assert page_name(b"", [1, 23]) != page_name(b"", [12, 3])
    assert page_name(page_name(b"", [1]), [2]) != page_name(page_name(b"", [2]), [1])


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(total, size):
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(total, size)


@given(st.lists(st.tuples(st.sampled_from(["take", "release", "match", "know"]), st.integers(0, 3)), max_size=80))
def test_every_page_is_free_idle_or_held(steps):
    """Against a plain count of holders."""
    pool = PagePool(5, 2)
    held: list[list[int]] = []
    texts = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 9], [1, 2, 3, 4]]
    for action, number in steps:
        if action == "take":
            page = pool.take()
            if page is not None:
                assert all(page not in pages for pages in held), "a held page was given away"
                held.append([page])
        elif action == "match":
            found, _ = pool.match(texts[number], 4)
            if found:
                held.append(found)
        elif action == "know" and held and len(held[0]) == 1:
            pool.know(held[0][0], page_name(b"", texts[number][:2]))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        distinct = {page for pages in held for page in pages}
        assert pool.used == len(distinct) and pool.available == pool.total - len(distinct)
        assert pool.cached <= pool.available
