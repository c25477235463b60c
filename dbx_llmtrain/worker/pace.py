"""How long a run's last step and its end take, by what was measured so far: ``train.max_time`` has
to leave room for them, until the call has returned."""

from __future__ import annotations

from dataclasses import dataclass

from dbx_llmtrain.records import RunPlan

_BYTES_PER_SECOND = 100e6
"""Of writing, while none has been measured."""

_TELLING = 256e6
"""Bytes from which on the time of writing tells the speed, and not what it costs to begin."""

_CHECKPOINT_TO_MODEL = 6
"""Bytes of a checkpoint by those of the model's files, where the plan does not know: weights and
two averages in fp32, of a model in bf16."""

_PASSES_OF_EXPORT = 3
"""An export is written, copied and read again."""

_AGAIN = 0.5
"""Of the time that loading a model took, what opening it again takes: all is imported by then. (How
long reading its files takes is counted by their size.)"""

_MORE = 1.25
"""Times as long as foreseen: a machine that others use is not always as quick."""


@dataclass
class Pace:
    """Seconds of the last ``step``, of the ``losses`` of the last evaluation, over ``between``
    examples, and of the ``rest`` of it (answers, own metrics), of the last ``checkpoint``; and the
    ``speed`` of writing it, bytes a second. ``whole``: examples that are evaluated at the end.
    ``opening`` is what it took to load the model, as is done again with what is exported.
    """

    plan: RunPlan
    between: int = 0
    whole: int = 0
    opening: float = 0.0
    step: float = 0.0
    losses: float = 0.0
    rest: float = 0.0
    checkpoint: float | None = None
    speed: float = _BYTES_PER_SECOND

    def saved(self, seconds: float, size: int) -> None:
        """A checkpoint of ``size`` bytes took so long until it was complete."""
        self.checkpoint = seconds
        if size >= _TELLING and seconds > 0:
            self.speed = size / seconds

    def to_come(self) -> float:
        """Seconds of one more step, a checkpoint that is on its way, and all that follows the last
        step: evaluation, checkpoint and export; of the best model reading, evaluation and export;
        and what the driver does when the ranks have ended, as the plan has it."""
        plan = self.plan
        size = plan.model.artifact.size
        memory = plan.memory
        written = memory.checkpoint if memory else _CHECKPOINT_TO_MODEL * size
        checkpoint = self.checkpoint if self.checkpoint is not None else written / self.speed
        opening = _AGAIN * self.opening
        export = opening + _PASSES_OF_EXPORT * size / self.speed
        judged = self._an_example() * self.whole + self.rest
        judged += export if plan.config.checkpoint.export else 0.0
        best = checkpoint + opening + judged if plan.config.checkpoint.keep_best else 0.0
        return _MORE * (self.step + 2 * checkpoint + judged + best + plan.closing)

    def _an_example(self) -> float:
        """Seconds of evaluating one, which takes less than training on it."""
        if self.losses and self.between:
            return self.losses / self.between
        return self.step / self.plan.global_batch_size
