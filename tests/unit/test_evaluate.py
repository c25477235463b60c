"""The held-out loss: exact, whatever the batches, and unnoticed by training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dbx_llmtrain.text.prepared import Example, Split, write_split
from dbx_llmtrain.worker.evaluate import evaluate, perplexity
from dbx_llmtrain.worker.loss import LossModule
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


def test_rows_without_a_trained_token_have_no_loss(tmp_path: Path) -> None:
    write_split(tmp_path, [Example([5, 6], [False, False])], max_length=8, packing=True)
    report = evaluate(LossModule(tiny.llama()), Split(tmp_path), ALONE, micro_batch=2)
    assert (math.isnan(report.loss), report.trained_tokens, report.rows) == (True, 0, 1)


def test_c44_a_perplexity_too_large_for_a_float_is_infinite() -> None:
    assert perplexity(1e6) == math.inf
    assert perplexity(1.0) == math.e
