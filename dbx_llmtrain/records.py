"""What travels between the driver and the ranks, and what the user gets back: data only.

Every record is a frozen pydantic model: ``model_dump_json`` and ``model_validate_json`` are the
wire format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_serializer

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.estimates import MemoryEstimate, ModelShape
from dbx_llmtrain.forecasts import Decision, StrategyRow, TimeEstimate
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.reports import Record
from dbx_llmtrain.section_types import NonNegativeInt

if TYPE_CHECKING:
    from dbx_llmtrain.display_curves import Curves


class FileEntry(Record):
    """A file of an artifact: path relative to its folder, size in bytes, SHA-256.

    ``origin`` is the absolute path of a file that lies elsewhere than in the artifact's folder.
    """

    path: str
    size: int
    sha256: str
    origin: str | None = None


class Artifact(Record):
    """A folder that every node needs on its own disk: the model, the prepared data, or for
    preparing it the tokenizer.

    ``source`` is on storage that every node sees; ``fingerprint`` names the content and is the
    folder's name on each node (``<local_dir>/<kind>/<fingerprint>``).
    """

    kind: Literal["models", "tokenizers", "data"]
    source: str
    fingerprint: str
    files: tuple[FileEntry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


class Audit(Record):
    """Where every row and token of the data went.

    ``read_rows == train_rows + eval_rows + test_rows + sum(dropped.values())``; a training source
    of weight w counts as read w times. A row may give several examples (``train_examples``), of
    which some may be left out (``dropped_examples``, by reason). Token counts are of the training
    rows: ``tokens`` all of them, ``trained_tokens`` those with a label (a document's first token
    never has one), ``trained_end_tokens`` the end tokens among them. ``lengths`` counts the
    training examples by their tokens: entry i those of 2**i up to 2**(i+1) - 1.

    Of all splits: ``truncated_rows``, ``cut_tokens`` (cut away from them) and ``dropped_tokens``
    (those of rows, examples and pieces that were left out after they were encoded; rows that no
    weight took are not). ``source_rows`` counts every row of the sources once.
    """

    read_rows: int
    source_rows: int = 0
    train_rows: int
    eval_rows: int
    test_rows: int = 0
    train_examples: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    dropped_examples: dict[str, int] = Field(default_factory=dict)
    truncated_rows: int = 0
    cut_tokens: int = 0
    dropped_tokens: int = 0
    tokens: int
    trained_tokens: int
    trained_end_tokens: int = 0
    packs: int
    packing_efficiency: float
    lengths: tuple[int, ...] = ()


class SplitInfo(Record):
    """A split of a prepared data set: ``examples`` (packs) that a step counts, the ``rows`` in
    them, ``tokens``, and ``trained`` tokens after the shift.

    ``tokens + cut_tokens + dropped_tokens`` were encoded for it: ``cut_tokens`` are those cut away
    from its ``truncated_rows``, ``dropped_tokens`` those of what was left out. ``rows_in_train`` of
    its rows (by content) are in the training split too. ``digest`` names the examples: tokens, what
    is trained of them, and their order.
    """

    examples: int
    rows: int
    tokens: int
    trained: int
    truncated_rows: int = 0
    cut_tokens: int = 0
    dropped_tokens: int = 0
    rows_in_train: int = 0
    digest: str = ""


class PreparedData(Record):
    """A prepared data set: the folder's artifact, what is in it, and the audit.

    ``splits`` has ``train``, and where rows are held out ``eval`` (or ``eval-<name>`` each) and
    ``test``; a split is the folder of that name in the data set.
    """

    artifact: Artifact
    audit: Audit
    format: str
    splits: dict[str, SplitInfo]
    sources: dict[str, str]
    """Role (``train``, ``eval``, ``eval-<name>``, ``test``) to its sources as they were given."""
    end_tokens: tuple[int, ...] = ()
    """Ids of the trained tokens that end an answer: generation has to stop at each of them."""
    chat_template: str | None = None
    """Text of the template that took the place of the tokenizer's own; the export has it too."""

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Names of the splits that are evaluated during training."""
        return tuple(sorted(name for name in self.splits if name.partition("-")[0] == "eval"))

    @property
    def train_examples(self) -> int:
        """Examples of the training split."""
        return self.splits["train"].examples

    @property
    def eval_examples(self) -> int:
        """Examples of all evaluation splits."""
        return sum(self.splits[name].examples for name in self.eval_splits)

    @property
    def eval_rows(self) -> int:
        """Held-out rows of all evaluation splits."""
        return sum(self.splits[name].rows for name in self.eval_splits)

    def __repr__(self) -> str:
        from dbx_llmtrain.display import data_text

        return data_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display import data_html

        return data_html(self)


class ModelInfo(Record):
    """What the driver learnt of the model from its files."""

    artifact: Artifact
    source: str
    revision: str | None = None
    model_type: str
    parameters: int | None = None
    vocab_size: int
    max_positions: int | None = None
    sliding_window: int | None = None
    shape: ModelShape | None = None


class TrackingPlan(Record):
    """The MLflow run that the driver opened. ``by_rank``: rank 0 logs to it itself."""

    uri: str
    experiment_id: str
    run_id: str
    by_rank: bool


class LaunchPlan(Record):
    """What every launch of ranks has. ``attempt`` tells the records of this one from those of an
    earlier one in the same folder."""

    attempt: str
    run_name: str
    run_dir: str
    config: TrainConfig
    world_size: int
    local_mode: bool
    use_gpu: bool
    local_dir: str | None

    @field_serializer("config")
    def _as_given(self, config: TrainConfig) -> dict[str, Any]:
        """The fields that were set. A default is no setting: read back as one it could be refused,
        as ``train.betas`` is beside an optimizer that has none."""
        return config.to_dict()


class RunPlan(LaunchPlan):
    """Everything a rank needs to know; nothing in it is decided again by a rank.

    ``accumulation`` is the number of micro-batches of the busiest rank in a full step.
    """

    strategy: Literal["single", "ddp", "fsdp", "deepspeed"]
    precision: Literal["fp32", "bf16", "fp16"]
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """As configured, with everything that was left to us decided."""
    gradient_checkpointing: NonNegativeInt = 0
    """Every so many blocks compute their activations again; 0: none."""
    attention: str
    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    examples: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    decay_steps: int | None = None
    """Steps after the warm-up in which the learning rate falls; ``None``: it does not."""
    model: ModelInfo
    data: PreparedData
    purpose: Literal["train", "evaluate"] = "train"
    """``evaluate``: the ranks compute the held-out losses of one model and train nothing."""
    resume_from: str | None = None
    weights_from: str | None = None
    """The checkpoint whose weights are evaluated, where those are not the model's own."""
    metrics: FileEntry | None = None
    """The user's own metrics function in the run folder, pickled by value, with its hash."""
    began: float | None = None
    """When the call began, seconds since the epoch on the driver's clock: ``train.max_time`` counts
    from it."""
    closing: float = 0.0
    """Seconds that the driver needs, by estimate, from when the ranks have ended until the call
    returns: ``train.max_time`` leaves them."""
    stop_after: int | None = None
    """The ranks end after this step with a checkpoint, as if they had been asked to."""
    trial: bool = False
    tracking: TrackingPlan | None = None
    decisions: tuple[Decision, ...] = ()
    strategies: tuple[StrategyRow, ...] = ()
    """What every strategy would take; one of them is ``chosen``. Empty: the shape is not known."""
    time: TimeEstimate | None = None

    @property
    def memory(self) -> MemoryEstimate | None:
        """What the chosen strategy takes."""
        return next((row.estimate for row in self.strategies if row.chosen), None)

    def __repr__(self) -> str:
        from dbx_llmtrain.display_plan import plan_text

        return plan_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_plan import plan_html

        return plan_html(self)


class TrainResult(Record):
    """What ``train`` returns; the same is in ``result.json`` of the run folder.

    ``metrics`` has at least ``train_loss`` (token mean over the run), ``tokens_per_second``,
    ``peak_memory_bytes`` (worst rank), ``seconds_to_first_step`` and, with held-out rows,
    ``initial_eval_loss`` (before the first step) and ``eval_loss`` (after the last). What is not
    known of a run is not there: of one that goes on from the last checkpoint of another run
    everything about steps, and where the held-out rows have changed ``initial_eval_loss``.

    ``stop_reason`` says why the run ended before its last step (``train.max_time``, early stopping,
    a request). With ``checkpoint.keep_best`` the ``best_...`` paths are those of the best model.

    ``model_uri`` is the address of the model in MLflow, ``registered`` (``models:/NAME/VERSION``)
    that of its version, where ``tracking.log_model`` and ``tracking.register_as`` ask for them.
    """

    run_id: str | None
    run_dir: str
    run_name: str
    checkpoint: str | None
    model_path: str | None
    best_checkpoint: str | None = None
    best_model_path: str | None = None
    steps: int
    stop_reason: str = ""
    restarts: tuple[str, ...] = ()
    model_uri: str | None = None
    registered: str | None = None
    audit: Audit
    metrics: dict[str, float]

    def plot(self) -> Curves:
        """The losses over the steps, from the run folder's events: a picture in a notebook."""
        from dbx_llmtrain.display_curves import read_curves

        return read_curves(self.run_dir, self.run_name)

    def __repr__(self) -> str:
        from dbx_llmtrain.display import result_text

        return result_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display import result_html

        return result_html(self)
