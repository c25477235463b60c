"""The sections of a configuration: their fields, types and defaults. The field docstrings are the
reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dbx_llmtrain import option_names
from dbx_llmtrain.model_sections import ModelConfig, OptimConfig, ParallelConfig
from dbx_llmtrain.section_types import (
    NOT_BOOL,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Share,
)

EVAL_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
EvalName = Annotated[str, Field(pattern=EVAL_NAME)]


class SourceConfig(Section):
    """One data source."""

    path: str
    """File, folder or glob (``.jsonl``, ``.json``, ``.csv``, ``.parquet``), Delta table (a folder
    or ``table:catalog.schema.name``) or hub data set id."""

    name: str | None = None
    """Subset of a hub data set, such as ``main``."""

    split: str | None = None
    """Split of a hub data set, such as ``train`` or ``train[:5%]``. Default ``train``."""

    revision: str | None = None
    """Branch, tag or commit of a hub data set; resolved to a commit."""

    version: NonNegativeInt | str | None = None
    """Version number or timestamp of a Delta table. Default: the newest, noted by its number."""

    weight: Annotated[float, Field(gt=0, le=1000), NOT_BOOL] = 1.0
    """How often each row of a training source is taken: 2 is twice, 0.25 a quarter of the rows
    (chosen by the hash of their content), 1.5 all of them and half of them again."""

    max_rows: PositiveInt | None = None
    """Use at most this many rows, in the order of the source."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            told = [
                f"unknown key {key}: "
                + (f"did you mean {close}?" if close else f"expected {names}")
                for key in map(str, value)
                if key not in cls.model_fields
                for names in [", ".join(cls.model_fields)]
                for close in [option_names.nearest(key, cls.model_fields)]
            ]
            if told:
                raise PydanticCustomError("unknown_key", "{told}", {"told": "; ".join(told)})
        return value


Source = str | SourceConfig


def _kind_of_source(value: Any) -> str | None:
    """Which of the shapes of ``data.train``, ``eval`` and ``test`` a value is meant to have."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return "share"
    if isinstance(value, list | tuple):
        return "list"
    if isinstance(value, SourceConfig):
        return "source"
    if isinstance(value, Mapping):
        is_source = not value or not SourceConfig.model_fields.keys().isdisjoint(value)
        return "source" if is_source else "named"
    return None


def _kind_without_names(value: Any) -> str | None:
    kind = _kind_of_source(value)
    return "source" if kind == "named" else kind


def _one_of(expected: str, *, named: bool = False) -> Discriminator:
    kind = _kind_of_source if named else _kind_without_names
    return Discriminator(kind, custom_error_type="source", custom_error_message=expected)


_Text = Annotated[str, Tag("text")]
_Source = Annotated[SourceConfig, Tag("source")]
_OneSource = Annotated[_Text | _Source, _one_of("text or a mapping of fields")]
_List = Annotated[list[_OneSource], Field(min_length=1), Tag("list")]
_Share = Annotated[Share, Tag("share")]
_Named = Annotated[dict[EvalName, _OneSource], Tag("named")]
_SEVERAL = "text, a mapping of fields or a list of sources"

TrainSources = Annotated[_Text | _Source | _List, _one_of(_SEVERAL)]
TestSources = Annotated[
    _Text | _Source | _List | _Share, _one_of(f"{_SEVERAL} (or a share between 0 and 1)")
]
EvalSources = Annotated[
    _Text | _Source | _List | _Share | _Named,
    _one_of(
        f"{_SEVERAL} (or a share between 0 and 1, or a mapping of names to sources)", named=True
    ),
]


class DataConfig(Section):
    """What it is trained on, and which tokens count."""

    section: ClassVar[str] = "data"

    train: TrainSources | None = None
    """The training rows: a source, or a list of sources that are mixed by their ``weight``. May be
    left out where the rows are passed as ``train(cfg, data=...)``."""

    eval: EvalSources | None = None
    """Held-out rows: a source or a list of them, named ones (``{name: source}``), or the share of
    the training rows to hold out (chosen by the hash of a row's content, never by its position)."""

    test: TestSources | None = None
    """Rows for one more evaluation after the last step: a source, a list of them, or a share."""

    format: Literal[
        "auto", "messages", "sharegpt", "instruction", "prompt_completion", "text", "tokens"
    ] = "auto"
    """Shape of a row. ``auto`` recognises it by its columns and refuses what is ambiguous."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns where they are not the usual ones: ``{our name: theirs}``."""

    formatter: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """``module:function`` of a function that gets a row as a dict and returns one of a supported
    shape, or None to leave it out. A function itself is passed as ``train(cfg, formatter=...)``."""

    objective: Literal["sft", "pretrain", "mlm"] = "sft"
    """``sft``: supervised fine-tuning; ``pretrain``: every token of a text; ``mlm``: masked tokens,
    for models like BERT."""

    mlm_probability: Share = 0.15
    """Share of the tokens that ``objective: mlm`` predicts."""

    train_on: Literal["completion", "assistant", "last_assistant", "all"] | None = None
    """Which tokens are trained. Unset: ``assistant`` for chats, ``completion`` for prompts with an
    answer, ``all`` for plain text. For chats that are not split into prompt and completion,
    ``completion`` is the same as ``assistant``."""

    max_length: PositiveInt = 2048
    """Tokens of a row, and of a pack, at most."""

    overflow: Literal["truncate", "drop", "split", "error"] = "truncate"
    """What becomes of a longer row. A row whose every trained token is cut is dropped, counted;
    ``split`` makes several examples of it."""

    packing: bool | Literal["concat"] = True
    """Lay short rows end to end in one example; they never see each other. ``concat``, for
    ``objective: pretrain``: all texts end to end, cut every ``max_length`` tokens."""

    shuffle: bool = True
    """Another order of the examples in every epoch, by ``train.seed``. Without it they are taken in
    the order of the sources, every epoch the same."""

    group_by_length: bool = False
    """Put examples of about the same length into the same step. Needs ``packing: false``."""

    longest_first: bool = False
    """Begin with the longest examples, so that a lack of memory shows in the first step."""

    chat_template: str | None = None
    """Chat template instead of the tokenizer's own: a file, the template itself, or ``chatml``."""

    cache_dir: str | None = None
    """Where prepared data and converted models are kept, on storage that every node sees.
    Default: ``.cache`` in ``checkpoint.dir``."""


class CheckpointConfig(Section):
    """Where the run folder is, and what is kept in it."""

    section: ClassVar[str] = "checkpoint"

    dir: str | None = None
    """Parent of the run folder, on storage that every node and the driver see
    (``/Volumes/catalog/schema/volume/runs``). Default ``./runs`` where driver and workers are one
    machine; on a cluster it has to be given."""

    every: PositiveInt | Literal["epoch", "never"] = "never"
    """Checkpoint every so many steps, or after each ``epoch``. One is always written at the end."""

    every_minutes: Positive | None = None
    """Also checkpoint when so many minutes have passed since the last one."""

    keep_last: PositiveInt | Literal["all"] = 2
    """Of the checkpoints of this run, how many of the newest stay."""

    keep_best: NonNegativeInt = 0
    """How many of the best by ``metric`` stay besides. An evaluation that makes the list writes a
    checkpoint."""

    metric: Annotated[str, Field(pattern=r"^[A-Za-z_][\w./-]*$")] = "eval_loss"
    """What makes a checkpoint a good one: a metric of the evaluation (``eval_loss``,
    ``eval_<name>_loss``, one of your own)."""

    metric_mode: Literal["auto", "min", "max"] = "auto"
    """Whether less or more is better. ``auto``: less for a loss or a perplexity, else more."""

    export: bool = True
    """Write the result as a Hugging Face folder at the end."""

    resume: str = "auto"
    """``auto``: from the newest complete checkpoint of the run folder, if any; ``never``; or the
    path of a checkpoint."""


class TrackingConfig(Section):
    """The MLflow run."""

    section: ClassVar[str] = "tracking"

    experiment: str | None = None
    """Experiment name. Default: the notebook's on Databricks, else ``dbx_llmtrain``."""

    run_name: str | None = None
    """Name of the MLflow run and of the run folder. Default: made of the date and time."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the MLflow run."""

    log_model: Literal["final", "best", "none"] | None = None
    """Which model becomes the MLflow run's: the ``final`` one or the ``best`` by
    ``checkpoint.metric``. Unset: ``final`` with ``register_as``, else ``none``."""

    register_as: str | None = None
    """Registered name of the model, with ``@alias`` if wanted: ``catalog.schema.model@champion`` in
    Unity Catalog, or a name in the tracking server's own registry."""

    log_checkpoints: bool = False
    """Also copy the last checkpoint's files to the MLflow run's artifacts."""

    tensorboard: bool = False
    """Also write TensorBoard event files, to ``tensorboard`` in the run folder."""

    system_metrics: bool = False
    """Also log CPU, memory, disk, network and GPU use of every node to the MLflow run, each under
    the node's name."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How staging, preparing and training are shown while they last. ``auto``: a ``bar`` in a
    notebook or terminal, else ``lines`` now and then."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on messages of this package are shown, of the driver and of the ranks."""


class ClusterConfig(Section):
    """Which machines are used, and how."""

    section: ClassVar[str] = "cluster"

    processes: PositiveInt | Literal["auto"] = "auto"
    """Ranks. ``auto``: one for every GPU; on CPU one for every executor (1 in local mode)."""

    use_gpu: bool | Literal["auto"] = "auto"
    """``auto``: where Spark's workers have GPUs."""

    local_mode: bool | Literal["auto"] = "auto"
    """Run the ranks on the driver's own machine. ``auto``: on a single node."""

    local_dir: str | None = None
    """Folder on every node's own disk. Default ``/local_disk0/dbx_llmtrain`` where a node can
    write it, else ``dbx_llmtrain`` in its temporary folder."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every rank. No secrets: those are taken from the driver's environment."""

    max_restarts: NonNegativeInt = 0
    """How often a run goes on by itself from its last checkpoint after a node, an executor or a
    connection was lost. The same fault at the same step is never tried again."""

    min_processes: PositiveInt | None = None
    """Restarted with fewer ranks where nodes are gone, down to so many; the global batch stays.
    Unset: only with as many ranks as before."""

    stall_timeout: Positive = 600.0
    """Seconds without any progress of any rank after which a run is ended, with the stacks of its
    ranks in the run folder."""

    debug: bool = False
    """Print the layout and the environment (without secrets) into every rank's log, and have NCCL
    and torch.distributed say what they do."""


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "train": OptimConfig,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
    "cluster": ClusterConfig,
}
