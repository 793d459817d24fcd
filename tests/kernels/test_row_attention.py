"""Attention of rows on a CPU over plain and coded planes, against the formulas in plain torch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.coded_row_attention import attend_coded_rows
from sigma0.kernels.depth_attention import DepthRows, depth_attention_reference
from sigma0.kernels.row_attention import RowPlaces, attend_rows
from tests.kernels import coded_cases
from tests.marks import needs_library, slow

pytestmark = needs_library
PLANES, SIZE, PER_SEQUENCE = 4, 8, 6
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def by_block(flat, blocks):
    """`[planes, blocks, H_kv, size, d]`, as the reference takes K/V."""
    return flat[:, :-1].view(PLANES, blocks, -1, *flat.shape[2:]).transpose(2, 3)


def case(seed, dtype=torch.float32, heads=4, kv_heads=2, width=24, paged=True, holes=True, rows=7):
    """Planes, new K/V, queries and the places of rows; everything that no row may see is NaN."""
    generator = torch.Generator().manual_seed(seed)
    sequences, positions = 3, SIZE * PER_SEQUENCE
    blocks = sequences * PER_SEQUENCE if paged else sequences
    shape = (PLANES, sequences * positions + 1, kv_heads, width)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    current = torch.stack(
        [
            torch.randint(0, sequences, (rows,), generator=generator),
            torch.randint(0, positions, (rows,), generator=generator),
            torch.randint(0, PLANES, (rows,), generator=generator),
        ]
    )
    # no two rows at one place
    current = torch.unique(current, dim=1)
    rows = current.shape[1]
    table = torch.randperm(blocks, generator=generator).view(sequences, -1) if paged else None
    seen = torch.rand(sequences, positions, generator=generator) > 0.2
    seen[current[0], current[1]] = True
    lowest = [current[1][current[0] == sequence].tolist() for sequence in range(sequences)]
    starts = torch.tensor([min([start, *seen_from]) for start, seen_from in zip((0, 3, 9), lowest, strict=True)])
    places = RowPlaces(
        current[0],
        current[1],
        current[2],
        blocks,
        table,
        starts,
        seen if holes else None,
    )
    query = torch.randn(rows, heads, width, generator=generator).to(dtype)
    new = [torch.randn(rows, kv_heads, width, generator=generator).to(dtype) for _ in range(2)]
    return keys, values, query, *new, places


def expected(keys, values, query, new_keys, new_values, places, scaling):
    """The K/V after the rows have written theirs, and the attention of the reference in float64."""
    keys, values = keys.clone(), values.clone()
    size = (keys.shape[1] - 1) // places.count
    sequences, positions = places.sequences, places.cache_positions
    blocks = sequences if places.blocks is None else places.blocks[sequences, positions // size]
    flat = blocks * size + positions % size
    keys[places.planes, flat], values[places.planes, flat] = new_keys, new_values
    rows = DepthRows(
        sequences,
        positions,
        places.planes,
        places.starts,
        places.seen,
        None if places.blocks is None else places.blocks.int(),
        int(positions.max()) + 1,
    )
    wide = [by_block(part.double(), places.count) for part in (keys, values)]
    return keys, values, depth_attention_reference(query.double(), *wide, rows, scaling)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(list(TOLERANCES)),
    st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    st.sampled_from([8, 24, 32, 128]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 30),
)
def test_rows_attend_as_the_formula_says(seed, dtype, heads, width, paged, holes, rows):
    parts = case(seed, dtype, *heads, width, paged, holes, rows)
    keys, values, wanted = expected(*parts, 0.3)
    attended = attend_rows(*parts, 0.3)
    assert torch.equal(parts[0], keys) and torch.equal(parts[1], values)
    torch.testing.assert_close(attended.double(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_row_reads_nothing_that_it_does_not_see():
    """Not even to weigh it with 0: 0 times NaN is NaN."""
    keys, values, query, new_keys, new_values, places = case(5)
    wanted = attend_rows(keys.clone(), values.clone(), query, new_keys, new_values, places, 0.3)
    visible = torch.zeros(keys.shape[:2], dtype=torch.bool)
    for sequence, last, plane in zip(
        places.sequences.tolist(), places.cache_positions.tolist(), places.planes.tolist(), strict=True
    ):
        for position in range(min(int(places.starts[sequence]), last), last + 1):
            if places.seen[sequence, position]:
                block = int(places.blocks[sequence, position // SIZE])
                visible[plane, block * SIZE + position % SIZE] = True
    for part in (keys, values):
        part[~visible] = torch.nan
    attended = attend_rows(keys, values, query, new_keys, new_values, places, 0.3)
    assert torch.equal(attended, wanted)


def test_rows_of_nobody_write_nothing_and_are_zero():
    keys, values, query, new_keys, new_values, places = case(3)
    idle = torch.arange(len(query)) % 3 == 1
    before = keys.clone()
    some = replace(places, cache_positions=places.cache_positions.masked_fill(idle, -1))
    attended = attend_rows(keys, values, query, new_keys, new_values, some, 0.3)
    current = {name: getattr(places, name)[~idle] for name in ("sequences", "cache_positions", "planes")}
    others = (part[~idle] for part in (query, new_keys, new_values))
    alone = attend_rows(before, values.clone(), *others, replace(places, **current), 0.3)
    assert torch.equal(attended[~idle], alone)
    assert not attended[idle].any()
    assert torch.equal(keys, before)


def test_more_threads_change_nothing():
    parts = case(2, heads=8, kv_heads=4, width=128, rows=40)
    alone = attend_rows(*parts, 0.3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(attend_rows(*parts, 0.3), alone)
    finally:
        torch.set_num_threads(threads)


def test_scores_that_are_not_numbers_stay_so_for_their_row():
    keys, values, query, new_keys, new_values, places = case(4)
    query[2] = torch.nan
    attended = attend_rows(keys, values, query, new_keys, new_values, places, 0.3)
    broken = attended.isnan().flatten(1).any(1)
    assert broken.tolist() == [row == 2 for row in range(len(query))]


def test_an_operator_is_one_node_of_a_graph():
    parts = case(6)
    graphs = []

    def keep(graph, examples):
        graphs.append(graph)
        return graph

    def attend(keys, values, query, new_keys, new_values):
        return attend_rows(keys, values, query, new_keys, new_values, parts[-1], 0.3)

    twin = [part.clone() for part in parts[:2]]
    wanted = attend_rows(*twin, *parts[2:], 0.3)
    result = torch.compile(attend, backend=keep, fullgraph=True)(*parts[:-1])
    assert torch.equal(result, wanted)
    assert [node.target for node in graphs[0].graph.nodes if node.op == "call_function"].count(
        torch.ops.sigma0.attend_rows
    ) == 1


EVERY_SHAPE = [slow(name, torch.float32) for name in coded_cases.SHAPES]


@pytest.mark.parametrize("name, dtype", [*EVERY_SHAPE, *(("every width", dtype) for dtype in TOLERANCES)])
def test_rows_attend_to_coded_planes_and_read_nothing_else(name, dtype):
    coded_cases.assert_agrees(attend_coded_rows, coded_cases.SHAPES[name], 2, TOLERANCES[dtype], dtype)


# One head width, since every other is compiled anew.
@pytest.mark.slow
@settings(max_examples=60)
@given(coded_cases.drawn_shapes([1, 2, 4, 8], [(32, 8), (32, 16), (32, 32)]))
def test_any_rows_attend_to_any_coded_planes(drawn):
    coded_cases.assert_agrees(attend_coded_rows, drawn[1], drawn[0], TOLERANCES[torch.float32], rows=6)


def test_the_bits_of_a_row_over_coded_planes_depend_on_no_other_row_and_no_bound():
    coded_cases.assert_rows_stand_alone(attend_coded_rows)


def test_tails_of_another_dtype_are_refused():
    query, tails, coded, at = coded_cases.case(1, coded_cases.SHAPES["residual"])
    with pytest.raises(ValueError, match=r"holds values in torch.float64"):
        attend_coded_rows(query, [tails[0], tails[1].double()], coded, at, coded_cases.SCALING)
