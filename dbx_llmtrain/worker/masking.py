"""Masked language modelling: which tokens of a document are hidden from the model and predicted.

As in BERT (Devlin et al. 2019): every token that may be masked is chosen with the same probability;
of the chosen ones 80% become the mask token, 10% a random token, and 10% stay. What is drawn for a
document depends on the seed, the epoch and the document's content alone, so every rank knows it of
every document, whichever rank computes it, packed or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dbx_llmtrain.errors import ConfigError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dbx_llmtrain.text.split import Split

_MASKED, _RANDOM = 0.8, 0.1
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Masking:
    """``mask_token`` is the id that hides a token, ``random_tokens`` the ids (n,) that a random
    token is drawn from: no special ones, some of which change how a model counts positions."""

    seed: int
    probability: float
    mask_token: int
    random_tokens: NDArray[np.int64]

    def hide(
        self, split: Split, document: int, epoch: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """What the model reads of a document, its true token ids, and which tokens are predicted.

        ``epoch`` is ``None`` for an evaluation, which masks a document the same way every time, in
        every run.
        """
        ids, chosen, bits = self._draw(split, document, epoch, 3)
        true = ids.astype(np.int64)
        read = np.where(chosen & (bits[1] < _below(_MASKED)), self.mask_token, true)
        swap = chosen & (bits[1] >= _below(_MASKED)) & (bits[1] < _below(_MASKED + _RANDOM))
        drawn = bits[2][swap] % np.uint64(len(self.random_tokens))
        read[swap] = self.random_tokens[drawn]
        return read, true, chosen

    def count(self, split: Split, example: int, epoch: int | None) -> int:
        """Predicted tokens of an example."""
        numbers = split.numbers(example)
        return sum(int(self._draw(split, number, epoch, 1)[1].sum()) for number in numbers)

    def _draw(
        self, split: Split, document: int, epoch: int | None, rows: int
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.uint64]]:
        """Token ids, which of them are predicted, and ``rows`` 64-bit numbers for each."""
        ids, allowed = split.document(document)
        key, start = split.source(document)
        stream = [0] * 4 if epoch is None else [1, self.seed & _LOW, self.seed >> 32, epoch]
        content = np.frombuffer(bytes.fromhex(key), ">u4").tolist()
        words = np.array([*stream, start, *content], np.uint32)
        # The raw output of a named bit generator: the same in every version of numpy.
        bits = np.random.PCG64(words).random_raw((rows, len(ids)))
        return ids, allowed & (bits[0] < _below(self.probability)), bits


def _below(probability: float) -> np.uint64:
    """A 64-bit number is below this with a probability."""
    return np.uint64(int(probability * 2.0**64))


def make_masking(tokenizer: Any, *, seed: int, probability: float, vocab_size: int) -> Masking:
    """The masking for a tokenizer and a model with ``vocab_size`` embeddings.

    Raises ``ConfigError`` for a tokenizer without a mask token.
    """
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            [
                Problem(
                    "data.objective",
                    "mlm needs a tokenizer with a mask token, this one has none: use a model for "
                    "masked tokens (BERT, RoBERTa, ModernBERT), or another objective",
                )
            ]
        )
    special = set(tokenizer.all_special_ids)
    ordinary = [id_ for id_ in range(min(len(tokenizer), vocab_size)) if id_ not in special]
    return Masking(seed, probability, int(tokenizer.mask_token_id), np.array(ordinary, np.int64))
