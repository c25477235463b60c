"""Batches: what is in them, and which rows a step and a rank get."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from dbx_llmtrain.text.prepared import (
    Example,
    PackRules,
    PartWriter,
    Split,
    write_packs,
    write_split,
)
from dbx_llmtrain.worker.data import (
    IGNORED,
    Order,
    collate,
    empty_batch,
    share_batches,
    shares,
    step_examples,
)
from dbx_llmtrain.worker.loop import prepared_ahead
from dbx_llmtrain.worker.loss import trained_positions
from dbx_llmtrain.worker.order import Arrangement
from tests import tiny


def _split(folder: Path, count: int, *, packing: bool = False) -> Split:
    rows = tiny.examples([3 + 5 * i % 17 for i in range(count)])
    write_split(folder, rows, max_length=32, packing=packing)
    return Split(folder)


def _document(ids: list[int], trained: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, np.int32), np.array(trained)


def test_a_batch_lays_documents_end_to_end() -> None:
    first = [_document([5, 6, 7], [True, True, True]), _document([8, 9], [False, True])]
    second = [_document([4, 3], [False, False])]
    batch = collate([first, second], pad_id=1)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]]
    assert batch.labels.tolist() == [[IGNORED, 6, 7, IGNORED, 9], [IGNORED] * 5]
    assert batch.positions.tolist() == [0, 1, 3]
    assert (batch.rows, batch.tokens, batch.trained) == (3, 7, 3)
    assert torch.equal(batch.positions, trained_positions(batch.labels))
    assert batch.to("cpu") is batch


def test_c27_the_first_token_of_every_document_is_ignored(tmp_path: Path) -> None:
    rows = [Example(list(range(3, 3 + n)), [True] * n) for n in (7, 5, 9)]
    write_split(tmp_path, rows, max_length=32, packing=True)
    batch = collate([Split(tmp_path).documents(0)], 0)
    starts = batch.position_ids == 0
    assert int(starts.sum()) == 3
    assert bool((batch.labels[starts] == IGNORED).all())
    assert batch.trained == 6 + 4 + 8


def test_c45_counts_are_exact_integers() -> None:
    batch = collate([[_document([5, 6, 7], [True] * 3)]], 0)
    assert {type(batch.trained), type(batch.tokens), type(batch.rows)} == {int}
    assert batch.positions.dtype == torch.int64


def test_an_empty_batch_weighs_nothing() -> None:
    batch = empty_batch(3)
    assert (batch.rows, batch.tokens, batch.trained) == (0, 0, 0)
    assert batch.input_ids.tolist() == [[3, 3]]


def test_the_rows_of_a_step_depend_on_seed_epoch_and_step_alone() -> None:
    epoch = [step_examples(7, 0, step, 10, 4) for step in range(3)]
    assert [len(part) for part in epoch] == [4, 4, 2]
    assert sorted(np.concatenate(epoch)) == list(range(10))
    # numpy's named generator gives this order on every machine and version.
    expected = np.random.Generator(np.random.PCG64([7, 0])).permutation(10)
    assert np.concatenate(epoch).tolist() == expected.tolist()


def test_c82_every_epoch_has_its_own_order() -> None:
    orders = {tuple(step_examples(0, epoch, 0, 50, 50)) for epoch in range(3)}
    assert len(orders) == 3
    assert tuple(step_examples(0, 1, 0, 50, 50)) in orders
    assert tuple(step_examples(1, 0, 0, 50, 50)) not in orders


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 5, 7, 13])
def test_c34_every_row_is_trained_exactly_once_per_epoch(
    tmp_path: Path, world_size: int, count: int
) -> None:
    split = _split(tmp_path, count)
    seen: Counter[tuple[int, ...]] = Counter()
    for rank in range(world_size):
        order = Order(split, 0, 4, 2, rank=rank, world_size=world_size)
        for step in range(order.steps_per_epoch):
            for batch in order.step(step).batches:
                seen.update(tuple(row.tolist()) for row in _rows_of(batch))
    assert set(seen.values()) == {1}
    assert sum(seen.values()) == count


def _rows_of(batch: object) -> list[torch.Tensor]:
    ids, segments = batch.input_ids, batch.segment_ids  # type: ignore[attr-defined]
    return [row[mark > 0] for row, mark in zip(ids, segments, strict=True) if bool(mark.any())]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_c112_every_rank_runs_the_same_number_of_micro_batches(
    tmp_path: Path, world_size: int, micro_batch: int, padded: bool
) -> None:
    split = _split(tmp_path, 13, packing=True)
    for step in range(3):
        ranks = [
            Order(split, 0, 5, micro_batch, rank=r, world_size=world_size, padded=padded).step(step)
            for r in range(world_size)
        ]
        assert len({len(work.batches) for work in ranks}) == 1
        totals = {(w.trained_total, w.tokens_total, w.rows_total) for w in ranks}
        assert totals == {
            tuple(
                sum(getattr(b, name) for w in ranks for b in w.batches)
                for name in ("trained", "tokens", "rows")
            )
        }


def test_c35_one_row_on_two_ranks_is_trained_once(tmp_path: Path) -> None:
    split = _split(tmp_path, 1)
    ranks = [Order(split, 0, 4, 2, rank=rank, world_size=2).step(0) for rank in range(2)]
    assert [[batch.rows for batch in work.batches] for work in ranks] == [[1], [0]]


def test_c33_the_last_window_of_an_epoch_is_short_and_not_lost(tmp_path: Path) -> None:
    order = Order(_split(tmp_path, 7), 0, 3, 1)
    assert order.steps_per_epoch == 3
    assert [len(order.step(step).batches) for step in range(6)] == [3, 3, 1, 3, 3, 1]


ARRANGEMENTS = [
    {},
    {"shuffle": False},
    {"group_by_length": True},
    {"longest_first": True},
    {"group_by_length": True, "longest_first": True},
]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@pytest.mark.parametrize("count", [3, 4, 41, 230])
def test_c29_however_it_is_ordered_an_epoch_has_every_row_once(
    tmp_path: Path, count: int, arrangement: dict[str, bool]
) -> None:
    order = Order(_split(tmp_path, count), 5, 4, 2, **arrangement)
    for epoch in range(3):
        first = epoch * order.steps_per_epoch
        steps = [order.examples(first + step).tolist() for step in range(order.steps_per_epoch)]
        assert [len(step) for step in steps[:-1]] == [4] * (len(steps) - 1)
        assert sorted(row for step in steps for row in step) == list(range(count))


def test_without_shuffling_the_source_s_order_is_kept_in_every_epoch(tmp_path: Path) -> None:
    order = Order(_split(tmp_path, 10), 5, 4, 2, shuffle=False)
    for epoch in range(2):
        steps = [order.examples(3 * epoch + step).tolist() for step in range(3)]
        assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_grouping_puts_like_lengths_in_a_step_and_mixes_the_steps(tmp_path: Path) -> None:
    split = _split(tmp_path, 230)
    spreads = {}
    for grouped in (False, True):
        order = Order(split, 5, 4, 2, group_by_length=grouped)
        steps = [split.tokens[order.examples(step)] for step in range(order.steps_per_epoch)]
        spreads[grouped] = sum(int(step.max() - step.min()) for step in steps)
        means = [float(step.mean()) for step in steps]
        assert means != sorted(means)
        assert means != sorted(means, reverse=True)
    assert spreads[True] < spreads[False] / 10
    # Another epoch has other steps, the same seed the same ones.
    rows = [order.examples(step).tolist() for step in range(order.steps_per_epoch)]
    again = Order(split, 5, 4, 2, group_by_length=True)
    assert [again.examples(step).tolist() for step in range(order.steps_per_epoch)] == rows
    other = {tuple(sorted(order.examples(order.steps_per_epoch + step))) for step in range(58)}
    assert len(other & {tuple(sorted(step)) for step in rows}) < 10


@pytest.mark.parametrize("grouped", [False, True])
def test_the_longest_examples_come_first_in_the_first_epoch_alone(
    tmp_path: Path, grouped: bool
) -> None:
    split = _split(tmp_path, 41)
    order = Order(split, 5, 4, 2, longest_first=True, group_by_length=grouped)
    first = split.tokens[order.examples(0)]
    assert sorted(first) == sorted(split.tokens)[-4:]
    assert order.examples(order.steps_per_epoch).tolist() != order.examples(0).tolist()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("count", [41, 230])
def test_the_longest_example_is_in_the_first_step_and_the_rest_is_as_it_was(
    tmp_path: Path, grouped: bool, count: int
) -> None:
    split = _split(tmp_path, count)
    tokens = split.tokens
    for seed in range(8):
        for world_size in (1, 2, 3):
            order = Order(split, seed, 4, 2, group_by_length=grouped, world_size=world_size)
            assert tokens[order.examples(0)].max() == tokens.max(), "whatever the ranks"
        if not grouped:
            drawn = [
                np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)
                for epoch in (0, 1)
            ]
            moved = np.nonzero(Arrangement(seed).epoch(0, tokens, 4) != drawn[0])[0].tolist()
            assert moved == [] or (moved[0] == 0 and tokens[drawn[0][moved[1:]]] == [tokens.max()])
            assert Arrangement(seed).epoch(1, tokens, 4).tolist() == drawn[1].tolist()


def test_grouped_steps_stay_whole_when_the_longest_comes_first() -> None:
    """Only a longest example of the short last step comes without its step."""
    tokens = np.arange(1, 12)  # 11 examples: two steps of 4 and one of 3 in some order
    for seed in range(20):
        order = Arrangement(seed, group_by_length=True).epoch(0, tokens, 4)
        first = sorted(tokens[order[:4]])
        assert 11 in first
        assert sorted(order) == list(range(11))
        assert first == [8, 9, 10, 11]


def test_a_rehearsal_has_the_longest_rows_in_all_its_steps() -> None:
    tokens = np.arange(1, 41)
    order = Arrangement(3, longest_first=2).epoch(0, tokens, 4)
    assert tokens[order[:8]].tolist() == [40, 39, 38, 37, 36, 35, 34, 33]
    assert sorted(order.tolist()) == list(range(40))
    one = Arrangement(3, longest_first=True).epoch(0, tokens, 4)
    assert tokens[one[:4]].tolist() == [40, 39, 38, 37]


def test_an_epoch_of_one_short_step_is_ordered_too() -> None:
    order = Arrangement(0).epoch(0, np.array([3, 9]), 4)
    assert sorted(order) == [0, 1]
    assert len(Arrangement(0).epoch(0, np.zeros(0, np.int64), 4)) == 0


def test_any_step_can_be_looked_up_without_those_before_it(tmp_path: Path) -> None:
    split = _split(tmp_path, 41)
    for arrangement in ARRANGEMENTS:
        run = Order(split, 5, 4, 2, **arrangement)
        rows = [run.examples(step).tolist() for step in range(33)]
        assert Order(split, 5, 4, 2, **arrangement).examples(32).tolist() == rows[32]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_c36_rows_are_seen_once_whatever_parts_and_ranks_there_are(
    tmp_path: Path, world_size: int
) -> None:
    """There are no iterable data sets: every rank maps all parts (here 3) and looks its rows up by
    number, so shards cannot be counted wrongly."""
    rows = tiny.examples([3 + 5 * i % 17 for i in range(13)])
    index = []
    for number in range(3):
        name = f"{number}.arrow"
        index.append(tmp_path / "index" / name)
        with PartWriter(tmp_path / "rows" / name, index[-1]) as part:
            for place in range(number, 13, 3):
                part.write(rows[place], key=f"{place:032x}", order=place, split="train")
    write_packs(tmp_path, index, "train", PackRules(32, "none"))
    seen: Counter[tuple[int, ...]] = Counter()
    for rank in range(world_size):
        order = Order(Split(tmp_path), 0, 4, 2, rank=rank, world_size=world_size)
        for step in range(order.steps_per_epoch):
            for batch in order.step(step).batches:
                seen.update(tuple(row.tolist()) for row in _rows_of(batch))
    assert seen == Counter(tuple(row.input_ids) for row in rows)


@pytest.mark.parametrize("readers", [0, 1])
def test_c37_rows_are_seen_once_with_and_without_a_reader(tmp_path: Path, readers: int) -> None:
    """There are no reading processes, each with a copy of the rows: one thread reads a step ahead
    in the same order (1), or the loop asks for the step itself (0)."""
    split = _split(tmp_path, 9)
    order = Order(split, 0, 4, 2)
    steps = range(order.steps_per_epoch)
    works = prepared_ahead(order, 0, len(steps)) if readers else map(order.step, steps)
    seen: Counter[tuple[int, ...]] = Counter()
    for work in works:
        for batch in work.batches:
            seen.update(tuple(row.tolist()) for row in _rows_of(batch))
    documents = (split.documents(number) for number in range(len(split)))
    assert seen == Counter(tuple(ids.tolist()) for found in documents for ids, _ in found)


def test_c82_ranks_are_disjoint_whatever_the_accumulation(tmp_path: Path) -> None:
    split = _split(tmp_path, 41)
    for step in range(12):
        for micro_batch in (1, 3):
            found = [
                tuple(row.tolist())
                for rank in range(2)
                for batch in Order(split, 5, 8, micro_batch, rank=rank, world_size=2)
                .step(step)
                .batches
                for row in _rows_of(batch)
            ]
            wanted = Order(split, 5, 8, 1).examples(step)
            rows = [tuple(split.documents(int(row))[0][0].tolist()) for row in wanted]
            assert found == rows


def test_the_next_epoch_follows_on(tmp_path: Path) -> None:
    order = Order(_split(tmp_path, 5), 3, 2, 1)
    assert order.examples(3).tolist() == step_examples(3, 1, 0, 5, 2).tolist()


def test_padded_rows_hold_one_document_within_the_capacity(tmp_path: Path) -> None:
    split = _split(tmp_path, 13, packing=True)
    capacity = 2 * int(split.tokens.max())
    whole = shares(np.arange(len(split)), 1)
    batches = share_batches(split, whole, 0, micro_batch=2, padded=True)
    assert sum(batch.rows for batch in batches) == 13
    assert all(int(batch.segment_ids.max()) == 1 for batch in batches)
    assert all(batch.input_ids.numel() <= capacity for batch in batches)
