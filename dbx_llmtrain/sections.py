"""The sections of a configuration: their fields, types and defaults. The field docstrings are the
reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, docstrings are the field descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelConfig(Section):
    """Which model is trained."""

    source: str
    """Hugging Face hub id, folder (also ``/Volumes/...``, ``dbfs:/...``) or ``.gguf`` file."""

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
    """File or glob (``.jsonl``, ``.json``, ``.csv``, ``.parquet``), also under ``/Volumes``."""

    max_rows: PositiveInt | None = None
    """Use at most this many rows, in the order of the source."""


class DataConfig(Section):
    """What it is trained on, and which tokens count."""

    train: str | SourceConfig
    """The training rows."""

    eval: str | SourceConfig | Share | None = None
    """Held-out rows: a source, or the fraction of the training rows to hold out (chosen by the
    hash of a row's content, never by its position)."""

    format: Literal["auto", "messages", "prompt_completion", "instruction", "text"] = "auto"
    """Shape of a row. ``auto`` recognises it by its columns and refuses what is ambiguous."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns where they are not the usual ones: ``{our name: theirs}``."""

    objective: Literal["sft"] = "sft"
    """Supervised fine-tuning."""

    train_on: Literal["completion", "assistant", "last_assistant", "all"] | None = None
    """Which tokens are trained. Unset: ``assistant`` for chats, ``completion`` for prompts with an
    answer, ``all`` for plain text."""

    max_length: PositiveInt = 2048
    """Tokens of a row, and of a pack, at most."""

    overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What becomes of a longer row. A row whose every trained token is cut is dropped, counted."""

    packing: bool = True
    """Lay short rows end to end in one example; they never see each other."""

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

    epochs: Annotated[float, Field(gt=0)] | None = None
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

    learning_rate: Annotated[float, Field(gt=0, lt=10)] = 2e-5
    """The highest learning rate, reached after the warm-up."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up, down to ``min_learning_rate`` at the last step."""

    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Steps of linear warm-up (an integer), or their share of the run (below 1; rounded up)."""

    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of the last step. 0: of the step that would follow it, so that it learns."""

    optimizer: Literal["adamw"] = "adamw"
    """AdamW, fused where the device has it."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of matrices; norms, biases and other vectors never decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging constants."""

    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
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
