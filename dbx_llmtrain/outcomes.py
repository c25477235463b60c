"""What came of something: how a rank ended, and what ``evaluate``, ``generate``, ``export`` and
``register`` give back. Data only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from dbx_llmtrain.errors import Cause
from dbx_llmtrain.records import FileEntry
from dbx_llmtrain.reports import Record

KIND, DATA_FORMAT, RUN_DIR, CHECKPOINT = "kind", "data_format", "run_dir", "checkpoint"
"""Entries of the manifest of an exported folder: ``export`` or ``adapter``, the format of the rows
that the model was trained on, the run it is of, and where it was made of one the checkpoint."""


ROWS, TOKENS = "evaluated_rows", "evaluated_tokens"
"""Of an evaluation by itself: over how many rows and trained tokens its metrics are."""


class Sample(Record):
    """An answer of the model. ``stopped``: it ended by itself, not at the limit of its length."""

    prompt: str
    text: str
    tokens: int
    stopped: bool


class Evaluation(Record):
    """What ``evaluate`` found: ``metrics`` as of a training run (``eval_loss``,
    ``eval_perplexity``, ``eval_<name>_loss``, ``test_loss``, those of one's own), over ``rows`` and
    ``trained_tokens`` of all evaluation sets (of the test rows where there are none)."""

    model: str
    metrics: dict[str, float]
    rows: int
    trained_tokens: int
    samples: tuple[Sample, ...] = ()
    run_id: str | None = None

    def __repr__(self) -> str:
        from dbx_llmtrain.display_outcomes import evaluation_text

        return evaluation_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_outcomes import evaluation_html

        return evaluation_html(self)


class Generations(Record):
    """Answers to prompts, in their order. Indexing, ``len`` and iterating give the texts."""

    model: str
    samples: tuple[Sample, ...]

    @property
    def texts(self) -> list[str]:
        """The answers alone."""
        return [sample.text for sample in self.samples]

    def __getitem__(self, index: int) -> str:
        return self.samples[index].text

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self.texts)

    def __repr__(self) -> str:
        from dbx_llmtrain.display_outcomes import generations_text

        return generations_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_outcomes import generations_html

        return generations_html(self)


class Exported(Record):
    """A Hugging Face folder that was written, re-opened and compared. ``source`` is the checkpoint
    it was made of, ``dtype`` of its weights, ``hub`` where it was pushed to."""

    path: str
    source: str
    step: int
    dtype: str
    bytes: int
    adapter: bool = False
    hub: str | None = None

    def __repr__(self) -> str:
        from dbx_llmtrain.display_outcomes import exported_text

        return exported_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_outcomes import exported_html

        return exported_html(self)


class RegisteredModel(Record):
    """A version of a registered model. ``uri`` loads it: ``mlflow.pyfunc.load_model(uri)``, where
    MLflow uses the store ``tracking_uri`` (``mlflow.set_tracking_uri``)."""

    name: str
    version: str
    uri: str
    run_id: str | None = None
    alias: str | None = None
    flavor: str = "transformers"
    tracking_uri: str = ""
    tags: dict[str, str] = Field(default_factory=dict)

    def __repr__(self) -> str:
        from dbx_llmtrain.display_outcomes import registered_text

        return registered_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_outcomes import registered_html

        return registered_html(self)


class Logged(Record):
    """What ``log`` has sent to MLflow: so many ``values`` of metrics that the run lacked, 0 where
    it had them all. ``created``: the folder had no run there before. ``page`` shows it."""

    run_dir: str
    run_id: str
    tracking_uri: str
    status: str
    values: int
    created: bool
    page: str

    def __repr__(self) -> str:
        from dbx_llmtrain.display_outcomes import logged_text

        return logged_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_outcomes import logged_html

        return logged_html(self)


class RankRecord(Record):
    """How one rank ended, in ``logs/rank-NNNNN.json`` of the run folder.

    ``time`` is seconds since the epoch on the rank's clock; ``result`` is rank 0's outcome.
    ``stopped`` marks a rank that was well until it was told to end (another one had failed, or the
    run was cancelled). ``step`` counts the optimizer steps that are done, ``None`` before all is
    set up; ``phase`` is what it was about to do. ``cause`` is what went wrong, where that is known.
    """

    attempt: str
    rank: int
    node: str
    host: str
    gpu: str | None = None
    status: Literal["finished", "failed"]
    time: float
    stopped: bool = False
    step: int | None = None
    exit_code: int | None = None
    phase: str = ""
    cause: Cause = ""
    error: str = ""
    traceback: str = ""
    log_tail: str = ""
    result: RankResult | None = None


class RankResult(Record):
    """What rank 0 reports of a finished run. ``stop_reason`` says why it ended before its last
    step, empty where it did not."""

    steps: int
    metrics: dict[str, float]
    checkpoint: str | None
    model_path: str | None
    best_checkpoint: str | None = None
    best_model_path: str | None = None
    stop_reason: str = ""
    value: FileEntry | None = None
    """Of a function that ``launch`` ran: the file in the run folder that has what it returned."""


RankRecord.model_rebuild()
