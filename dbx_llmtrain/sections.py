"""The sections of a configuration: their fields, types and defaults. The field docstrings are the
reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dbx_llmtrain import option_names
from dbx_llmtrain.errors import ConfigError, Problem


def _no_truth(value: Any) -> Any:
    """Python takes ``true`` for 1; in a configuration it is a slip."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


NOT_BOOL = BeforeValidator(_no_truth)
PositiveInt = Annotated[int, Field(gt=0), NOT_BOOL]
NonNegativeInt = Annotated[int, Field(ge=0), NOT_BOOL]
Positive = Annotated[float, Field(gt=0), NOT_BOOL]
NonNegative = Annotated[float, Field(ge=0), NOT_BOOL]
Number = Annotated[float, NOT_BOOL]
Share = Annotated[float, Field(gt=0, lt=1), NOT_BOOL]
EVAL_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
EvalName = Annotated[str, Field(pattern=EVAL_NAME)]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, docstrings are the field descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refused by a ``ConfigError`` that says how a setting is changed."""
        section = next((key for key, cls in SECTIONS.items() if type(self) is cls), "")
        path = f"{section}.{name}" if section else name
        raise ConfigError(
            [Problem(path, f"a configuration is frozen: use cfg = cfg.override({f'{path}=...'!r})")]
        )


class ModelConfig(Section):
    """Which model is trained."""

    source: str
    """Hugging Face hub id, folder (also ``/Volumes/...``, ``dbfs:/...``), ``.gguf`` file, or
    ``package:NAME/FILE``: a file or folder of an installed Python package."""

    revision: str | None = None
    """Branch, tag or commit of a hub model; resolved to a commit that the plan records."""

    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; ``auto`` is ``sdpa`` where the model has it, else ``eager``."""

    trust_remote_code: bool = False
    """Run the Python code that comes with the model, for an architecture that transformers does not
    have. The code is staged and fingerprinted with the model."""


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


class ParallelConfig(Section):
    """How ranks share the work."""

    kind: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """``auto``: ``single`` for one rank, ``fsdp`` for more."""

    shard: Literal["full"] = "full"
    """FSDP: parameters, gradients and optimizer state are all sharded."""


class OptimConfig(Section):
    """Fields of ``train``: batch, length and optimizer of the run."""

    epochs: Positive | None = None
    """Passes over the data. Default 1 when ``max_steps`` is not given."""

    max_steps: PositiveInt | None = None
    """Optimizer steps; ends the run wherever in an epoch that is."""

    global_batch_size: PositiveInt | None = None
    """Examples of one optimizer step over all ranks. With packing an example is a pack of up to
    ``data.max_length`` tokens. Default 32, or what ``gradient_accumulation_steps`` gives."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches of a rank in a step, instead of ``global_batch_size``."""

    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Examples a rank runs at once. Never changes the numbers, only speed and memory."""

    learning_rate: Annotated[float, Field(gt=0, lt=10), NOT_BOOL] = 2e-5
    """The highest learning rate, reached after the warm-up."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up, down to ``min_learning_rate`` at the last step."""

    warmup: NonNegative = 0.03
    """Steps of linear warm-up (an integer), or their share of the run (below 1; rounded up)."""

    min_learning_rate: NonNegative = 0.0
    """Learning rate of the last step. 0: of the step that would follow it, so that it learns."""

    optimizer: Literal["adamw"] = "adamw"
    """AdamW, fused where the device has it."""

    weight_decay: NonNegative = 0.0
    """Decoupled decay of matrices; norms, biases and other vectors never decay."""

    betas: tuple[Number, Number] = (0.9, 0.999)
    """AdamW's averaging constants."""

    max_grad_norm: NonNegative = 1.0
    """Clip the gradient's global norm to this, once per step. 0: never."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type; weights and optimizer state are fp32 in any case. ``auto``: ``bf16`` on a GPU
    that computes in it, else ``fp32``."""

    seed: NonNegativeInt = 0
    """Seed of the order of rows and of dropout."""

    eval_every: PositiveInt | None = None
    """Evaluate every so many steps. It is always done before the first and after the last."""

    log_every: PositiveInt = 1
    """Report the loss every so many steps."""


class CheckpointConfig(Section):
    """Where the run folder is, and what is kept in it."""

    dir: str | None = None
    """Parent of the run folder, on storage that every node and the driver see
    (``/Volumes/catalog/schema/volume/runs``). Default ``./runs`` where driver and workers are one
    machine; on a cluster it has to be given."""

    every: PositiveInt | Literal["never"] = "never"
    """Checkpoint every so many steps. One is always written at the end."""

    export: bool = True
    """Write the result as a Hugging Face folder at the end."""

    resume: str = "auto"
    """``auto``: from the newest complete checkpoint of the run folder, if any; ``never``; or the
    path of a checkpoint."""


class TrackingConfig(Section):
    """The MLflow run."""

    experiment: str | None = None
    """Experiment name. Default: the notebook's on Databricks, else ``dbx_llmtrain``."""

    run_name: str | None = None
    """Name of the MLflow run and of the run folder. Default: made of the date and time."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the MLflow run."""

    log_checkpoints: bool = False
    """Also copy the last checkpoint's files to the MLflow run's artifacts."""

    tensorboard: bool = False
    """Also write TensorBoard event files, to ``tensorboard`` in the run folder."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How staging, preparing and training are shown while they last. ``auto``: a ``bar`` in a
    notebook or terminal, else ``lines`` now and then."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on messages of this package are shown, of the driver and of the ranks."""


class ClusterConfig(Section):
    """Which machines are used, and how."""

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


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "train": OptimConfig,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
    "cluster": ClusterConfig,
}
