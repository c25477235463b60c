"""The held-out loss: exact, whatever the batches, and unnoticed by training."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dbx_llmtrain.text.prepared import Example, Split, write_split
from dbx_llmtrain.worker.data import share_batches, shares
from dbx_llmtrain.worker.evaluate import chosen_examples, combined, evaluate, perplexity
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.masks import block_mask
from tests import reference, tiny
from tests.unit.test_loop import ALONE, Run

LENGTHS = (3, 40, 5, 30, 4, 25, 6)


def _split(folder: Path, *, packing: bool = False) -> tuple[list[Example], Split]:
    rows = tiny.examples(LENGTHS, seed=1)
    write_split(folder, rows, max_length=64, packing=packing)
    return rows, Split(folder)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_c47_c48_every_token_counts_once(
    tmp_path: Path, micro_batch: int, packing: bool, padded: bool
) -> None:
    rows, split = _split(tmp_path, packing=packing)
    module = LossModule(tiny.llama())
    module.padded = padded
    report = evaluate(module, split, ALONE, micro_batch=micro_batch, padded=padded)
    expected = float(reference.mean_loss(module.model, rows).detach())
    assert abs(report.loss - expected) < 1e-6
    assert report.rows == 7
    assert report.trained_tokens == sum(sum(row.trained[1:]) for row in rows)
    assert report.perplexity == pytest.approx(math.exp(expected), rel=1e-6)


def test_c49_training_with_and_without_evaluation_is_bitwise_the_same(tmp_path: Path) -> None:
    _, held_out = _split(tmp_path / "held_out")
    states = []
    for number, evaluated in enumerate((False, True)):
        torch.manual_seed(0)
        model = tiny.gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        run = Run(tmp_path / str(number), tiny.examples(), model=model, steps=4)
        padded = run.root.padded = True
        run.order = type(run.order)(run.split, 0, 4, 2, padded=padded)
        torch.manual_seed(7)
        for _ in run.steps():
            if evaluated:
                evaluate(run.root, held_out, ALONE, micro_batch=2, padded=padded)
        states.append(run.state())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_c51_training_and_evaluation_count_the_same_row_alike(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), global_batch=8, learning_rate=1e-30)
    evaluated = evaluate(run.root, run.split, ALONE, micro_batch=3)
    (report,) = run.steps()
    assert evaluated.trained_tokens == report.trained
    assert abs(evaluated.loss - report.loss) < 1e-6


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_c51_a_row_has_the_same_tokens_labels_and_mask_in_both_splits(
    tmp_path: Path, packing: str
) -> None:
    rows = tiny.examples(LENGTHS, seed=1)
    for name in ("train", "eval"):
        write_split(tmp_path, rows, max_length=48, packing=packing, split=name, in_order=False)
    first, second = (
        share_batches(split, shares(np.arange(len(split)), 1), 0, micro_batch=3)
        for split in (Split(tmp_path, "train"), Split(tmp_path, "eval"))
    )
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(value, other.inputs()[name]) for name, value in one.inputs().items())
        masks = [block_mask(batch.segment_ids, torch.float32) for batch in (one, other)]
        assert torch.equal(*masks)


def test_c47_several_splits_together_weigh_by_token(tmp_path: Path) -> None:
    rows = tiny.examples(LENGTHS, seed=1)
    module = LossModule(tiny.llama())
    reports = []
    for name, part in {"eval-a": rows[:2], "eval-b": rows[2:], "eval-c": rows[:0]}.items():
        write_split(tmp_path, part, max_length=64, packing=True, split=name)
        reports.append(evaluate(module, Split(tmp_path, name), ALONE, micro_batch=2))
    whole = combined(reports)
    expected = float(reference.mean_loss(module.model, rows).detach())
    assert abs(whole.loss - expected) < 1e-6
    assert whole.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
    assert (whole.rows, whole.trained_tokens) == (7, sum(sum(row.trained[1:]) for row in rows))
    assert combined(reports[:1]) is reports[0]
    assert math.isnan(combined([reports[2], reports[2]]).loss)


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_c47_rows_that_were_cut_are_counted_by_their_pieces(tmp_path: Path, packing: str) -> None:
    rows = [Example(row.input_ids, [True] * len(row.trained)) for row in tiny.examples((30, 20, 7))]
    stats = write_split(tmp_path, rows, max_length=8, packing=packing, split_long=True)
    pieces = [
        Example(ids.tolist(), marks.tolist())
        for split in [Split(tmp_path)]
        for example in range(len(split))
        for ids, marks in split.documents(example)
    ]
    assert sum(len(piece.input_ids) for piece in pieces) == 57
    module = LossModule(tiny.llama())
    report = evaluate(module, Split(tmp_path), ALONE, micro_batch=2)
    scored = [piece for piece in pieces if len(piece.input_ids) > 1]
    assert abs(report.loss - float(reference.mean_loss(module.model, scored).detach())) < 1e-6
    assert report.rows == stats.documents == len(pieces) > stats.rows == 3


def test_rows_without_a_trained_token_have_no_loss(tmp_path: Path) -> None:
    write_split(tmp_path, [Example([5, 6], [False, False])], max_length=8, packing=True)
    report = evaluate(LossModule(tiny.llama()), Split(tmp_path), ALONE, micro_batch=2)
    assert (math.isnan(report.loss), report.trained_tokens, report.rows) == (True, 0, 1)


def test_c44_a_perplexity_too_large_for_a_float_is_infinite() -> None:
    assert perplexity(1e6) == math.inf
    assert perplexity(1.0) == math.e


def test_the_same_examples_stand_for_a_set_every_time(tmp_path: Path) -> None:
    rows, split = _split(tmp_path)
    chosen = chosen_examples(split, "eval", 0, 3)
    assert chosen.tolist() == chosen_examples(split, "eval", 0, 3).tolist()
    assert len(set(chosen.tolist())) == 3
    many = [chosen_examples(split, "eval", seed, 3).tolist() for seed in range(40)]
    lengths = [{LENGTHS[example] for example in found} for found in many]
    assert {length for found in lengths for length in found} == set(LENGTHS), "of every length"
    assert len({str(found) for found in many}) > 10, "by the seed"
    others = {str(chosen_examples(split, f"eval-{i}", 0, 3).tolist()) for i in range(10)}
    assert len(others) > 3, "each set has its own"
    for most in (None, 7, 100):
        assert chosen_examples(split, "eval", 0, most).tolist() == list(range(7))
    report = evaluate(LossModule(tiny.llama()), split, ALONE, micro_batch=2, examples=chosen)
    expected = reference.mean_loss(tiny.llama(), [rows[example] for example in chosen])
    assert abs(report.loss - float(expected.detach())) < 1e-6
    assert report.rows == 3


def test_c47_a_set_in_two_parts_is_the_whole_set(tmp_path: Path) -> None:
    rows, split = _split(tmp_path)
    chosen = chosen_examples(split, "eval", 0, 3)
    rest = np.setdiff1d(np.arange(7), chosen)
    module = LossModule(tiny.llama())
    parts = [
        evaluate(module, split, ALONE, micro_batch=2, examples=each) for each in (chosen, rest)
    ]
    whole = combined(parts)
    assert abs(whole.loss - float(reference.mean_loss(module.model, rows).detach())) < 1e-6
    assert whole.rows == 7
