"""Block pool: no block is held twice, none is lost, and a prefix hit holds the very ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.serve.engine.block_pool import BlockPool, block_hash, root_hash


def allocate(pool, after=None):
    """One block; None where all are held."""
    return next(iter(pool.allocate_run(1, after=after)), None)


def register_all(pool, ids, blocks, salt=None):
    last_hash = root_hash(salt)
    for index, block in enumerate(blocks):
        last_hash = block_hash(last_hash, ids[index * pool.size : (index + 1) * pool.size])
        pool.register(block, last_hash)


def test_registered_blocks_are_found_by_the_ids_before_them_too():
    pool = BlockPool(8, 2)
    blocks = [allocate(pool) for _ in range(3)]
    register_all(pool, [1, 2, 3, 4, 5, 6], blocks)
    assert pool.match_prefix([1, 2, 3, 4, 9, 9], 6)[0] == blocks[:2]
    assert pool.match_prefix([9, 9, 3, 4], 4) == ([], b"")
    assert pool.match_prefix([1, 2, 3, 4], 3)[0] == blocks[:1], "a block is found whole or not at all"


def test_unreferenced_blocks_stay_until_room_is_needed_and_ends_of_texts_go_first():
    pool = BlockPool(3, 1)
    blocks = [allocate(pool) for _ in range(3)]
    register_all(pool, [7, 8, 9], blocks)
    pool.free(blocks)
    assert pool.available == 3 and pool.cached == 3
    assert allocate(pool) == blocks[2]
    assert pool.match_prefix([7, 8, 9], 3)[0] == blocks[:2] and pool.available == 0


def test_one_prefix_is_registered_once():
    pool = BlockPool(2, 2)
    first, second = allocate(pool), allocate(pool)
    register_all(pool, [1, 2], [first])
    register_all(pool, [1, 2], [second])
    pool.free([second])
    assert pool.cached == 0 and pool.match_prefix([1, 2], 2)[0] == [first]


def test_sequences_share_blocks_where_their_salts_are_the_same():
    pool = BlockPool(8, 2)
    salted, other, bare = ([allocate(pool), allocate(pool)] for _ in range(3))
    register_all(pool, [1, 2, 3, 4], salted, "a")
    register_all(pool, [1, 2, 3, 4], other, "b")
    assert pool.match_prefix([1, 2, 3, 4], 4)[0] == []
    register_all(pool, [1, 2, 3, 4], bare)
    for salt, blocks in (("a", salted), ("b", other), (None, bare)):
        assert pool.match_prefix([1, 2, 3, 4], 4, root_hash(salt))[0] == blocks
    assert pool.match_prefix([1, 2], 2, root_hash("c")) == ([], root_hash("c"))


def test_a_run_of_blocks_is_found_where_there_is_one():
    pool = BlockPool(10, 1)
    assert pool.allocate_run(3, near=4) == [4, 5, 6]
    assert pool.allocate_run(2, near=4) == [7, 8], "the next run from there on"
    assert pool.allocate_run(3, near=4) == [0, 1, 2], "or from the beginning"
    assert pool.allocate_run(3) == [] and pool.used == 8, "all or nothing"
    assert pool.allocate_run(2) == [3, 9], "in pieces where there is no run"


def test_a_sequence_grows_in_place_as_long_as_the_next_block_is_free():
    pool = BlockPool(6, 1)
    first, second = allocate(pool), pool.allocate_run(1, near=3)
    assert (first, second) == (0, [3])
    assert [allocate(pool, after=0), allocate(pool, after=1)] == [1, 2]
    assert allocate(pool, after=2) == 4, "3 is held"
    pool.free([1])
    assert allocate(pool, after=4) == 5 and allocate(pool, after=5) == 1


def test_what_is_evicted_for_a_run_lies_together():
    pool = BlockPool(6, 1)
    blocks = pool.allocate_run(6)
    register_all(pool, [5, 6, 7, 8, 9, 10], blocks)
    pool.free(blocks)
    assert pool.allocate_run(3) == [3, 4, 5] and pool.cached == 3


def test_ids_cannot_be_told_apart_otherwise():
    assert block_hash(b"", [1, 23]) != block_hash(b"", [12, 3])
    assert block_hash(block_hash(b"", [1]), [2]) != block_hash(block_hash(b"", [2]), [1])


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(total, size):
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(total, size)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "match", "register"]), st.integers(0, 3)), max_size=80))
def test_every_block_is_free_cached_or_held(steps):
    pool = BlockPool(5, 2)
    held: list[list[int]] = []
    texts = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 9], [1, 2, 3, 4]]
    for action, number in steps:
        if action == "allocate":
            block = allocate(pool)
            if block is not None:
                assert all(block not in blocks for blocks in held), "a held block was given away"
                held.append([block])
        elif action == "match":
            matched, _ = pool.match_prefix(texts[number], 4)
            if matched:
                held.append(matched)
        elif action == "register" and held and len(held[0]) == 1:
            pool.register(held[0][0], block_hash(b"", texts[number][:2]))
        elif action == "free" and held:
            pool.free(held.pop(number % len(held)))
        distinct = {block for blocks in held for block in blocks}
        assert pool.used == len(distinct) and pool.available == pool.total - len(distinct)
        assert pool.cached <= pool.available
