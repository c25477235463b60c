"""The sections ``model``, ``parallel`` and ``train`` of a configuration. The field docstrings are
the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dbx_llmtrain import option_values
from dbx_llmtrain.section_types import (
    NOT_BOOL,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Share,
)


def _check_keys(value: Any, known: Iterable[str]) -> Any:
    """A mapping itself, where it has no unknown keys: else all that is said of it is about those,
    whatever a field takes beside the mapping."""
    told = option_values.unknown_keys(value, known) if isinstance(value, Mapping) else ""
    if told:
        raise PydanticCustomError("unknown_key", "{told}", {"told": told})
    return value


class TokenizerConfig(Section):
    """A tokenizer of its own."""

    source: str | None = None
    """Hub id or folder, as ``model.source``. Default: the model's own tokenizer."""

    revision: str | None = None
    """Branch, tag or commit of a hub tokenizer; resolved to a commit."""

    pad_vocab_to_multiple_of: PositiveInt | None = None
    """Round the rows of the embedding up to a multiple of this (64 suits tensor cores)."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        return _check_keys(value, cls.model_fields)


class LoraConfig(Section):
    """Adapters over a frozen base. Any other field of peft's ``LoraConfig`` may be given too."""

    model_config = ConfigDict(extra="allow")

    r: PositiveInt = 16
    """Rank of the adapters."""

    alpha: Annotated[float, Field(gt=0), NOT_BOOL] = 32
    """Adapters are scaled by ``alpha / r``."""

    dropout: Annotated[float, Field(ge=0, lt=1), NOT_BOOL] = 0.0
    """Dropout of what goes into the adapters."""

    target_modules: str | list[str] = "all-linear"
    """Names of the layers with adapters. ``all-linear``: every linear layer but the head."""


class ModelConfig(Section):
    """Which model is trained, and what is done to it."""

    section: ClassVar[str] = "model"

    source: str = ""
    """Hugging Face hub id, folder (also ``/Volumes/...``, ``dbfs:/...``), ``.gguf`` file,
    ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` in MLflow's registry (Unity Catalog:
    ``models:/catalog.schema.name@alias``), or ``package:NAME/FILE``: a file or folder of an
    installed Python package. May be left out where ``config`` defines the model (with ``init:
    random`` and a ``tokenizer``)."""

    revision: str | None = None
    """Branch, tag or commit of a hub model; resolved to a commit that the plan records."""

    init: Literal["pretrained", "random"] = "pretrained"
    """``random``: weights from the architecture's own initialiser and ``train.seed``, the same on
    every rank and for every strategy; no weight file is read."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of the Hugging Face configuration by their own names: changes of the model's
    (``attention_dropout``, ``rope_parameters``; another shape needs ``init: random``), or without
    ``source`` the whole model (``model_type``, ``hidden_size``, ``num_hidden_layers``, ...)."""

    tokenizer: str | TokenizerConfig | None = None
    """A tokenizer of its own: a hub id or folder, or a mapping with ``source``, ``revision`` and
    ``pad_vocab_to_multiple_of``."""

    new_tokens: list[str] = Field(default_factory=list)
    """Tokens to add to the tokenizer. Their rows start as the mean of the others."""

    trust_remote_code: bool = False
    """Run the Python code that comes with the model, for an architecture that transformers does not
    have. The code is staged and fingerprinted with the model."""

    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; ``auto`` is ``sdpa`` where the model has it, else ``eager``."""

    gradient_checkpointing: Literal["auto", "none", "full"] | PositiveInt = "auto"
    """Compute activations again in the backward pass instead of keeping them: ``full`` in every
    block, or in every n-th one. ``auto``: only where the run would not fit otherwise."""

    compile: bool = False
    """Compile every block with ``torch.compile``. Costs minutes at the start."""

    use_liger_kernel: bool | Literal["auto"] = "auto"
    """Liger's fused kernels. ``auto``: on GPUs where ``liger-kernel`` is installed and the first
    batch gives the same loss with them."""

    lora: LoraConfig | None = None
    """Train adapters instead of the weights: ``r``, ``alpha``, ``dropout``, ``target_modules``, or
    any other field of peft's ``LoraConfig``. ``{}`` takes the defaults."""

    load_in_4bit: bool = False
    """Keep the frozen base of ``lora`` in 4 bits (bitsandbytes; GPUs only)."""


class ParallelConfig(Section):
    """How ranks share the work."""

    section: ClassVar[str] = "parallel"

    kind: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = "auto"
    """``auto``: ``single`` for one rank, else the one with the least communication that fits."""

    shard: Literal["full", "grad_op", "hybrid"] = "full"
    """FSDP: ``full`` shards parameters, gradients and optimizer state over all ranks; ``grad_op``
    keeps the gathered parameters until the backward pass is over; ``hybrid`` shards within a host
    and replicates over hosts."""

    cpu_offload: bool = False
    """FSDP: keep parameters, gradients and optimizer state in host memory."""

    stage: Literal[1, 2, 3] | None = None
    """DeepSpeed: ZeRO stage. Default 2, and 3 where parameters are offloaded."""

    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """DeepSpeed: where the optimizer state lies."""

    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """DeepSpeed, stage 3: where the parameters lie."""

    nvme_dir: str | None = None
    """DeepSpeed: folder for ``nvme``, within ``cluster.local_dir``. Default: ``nvme`` in it."""

    config: dict[str, Any] | str | None = None
    """DeepSpeed: a configuration of its own (a mapping or a JSON file) that is merged with ours."""


Beta = Annotated[float, Field(ge=0, lt=1), NOT_BOOL]
OptimizerName = Literal["adamw", "adamw_8bit", "sgd", "adafactor"]


class OptimizerConfig(Section):
    """An optimizer with its options."""

    model_config = ConfigDict(extra="allow")

    name: OptimizerName = "adamw"
    """Which optimizer."""


class EarlyStopping(Section):
    """When more training is given up."""

    section: ClassVar[str] = "train.early_stopping"

    patience: PositiveInt
    """Evaluations in a row that may pass without a better ``checkpoint.metric``."""

    min_delta: NonNegative = 0.0
    """By how much it has to be better to count."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        return _check_keys(value, cls.model_fields)


SamplePrompt = Annotated[str, Field(min_length=1)] | tuple[dict[str, str], ...]


class OptimConfig(Section):
    """Fields of ``train``: batch, length and optimizer of the run."""

    section: ClassVar[str] = "train"

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

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up, down to ``min_learning_rate`` at the last step. ``wsd``
    (warm-up, stable, decay): constant, then down within the last ``decay_steps``."""

    warmup: NonNegative = 0.03
    """Steps of linear warm-up (an integer), or their share of the run (below 1; rounded up)."""

    decay_steps: PositiveInt | Share | None = None
    """Steps after the warm-up (or their share of the run) in which the rate falls to
    ``min_learning_rate``, where it stays. Default: all of them; with ``wsd`` the last tenth."""

    min_learning_rate: NonNegative = 0.0
    """Learning rate of the last step. 0: of the step that would follow it, so that it learns."""

    optimizer: OptimizerName | OptimizerConfig = "adamw"
    """``adamw`` (fused), ``adamw_8bit`` (bitsandbytes; GPUs only), ``sgd`` or ``adafactor``
    (``single`` and ``ddp``), or a mapping of ``name`` and its options (``{name: sgd, momentum:
    0.9}``)."""

    weight_decay: NonNegative = 0.0
    """Decoupled decay of matrices; norms, biases and other vectors never decay."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's averaging constants."""

    max_grad_norm: NonNegative = 1.0
    """Clip the gradient's global norm to this, once per step. 0: never."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute type; trained weights and optimizer state are fp32 in any case. ``auto``: ``bf16`` on
    a GPU that computes in it, else ``fp32``. ``fp16`` scales the loss, for GPUs without bf16."""

    seed: NonNegativeInt = 0
    """Seed of the order of rows and of dropout."""

    max_time: Annotated[str, Field(pattern=r"^\d+:[0-2]\d:[0-5]\d:[0-5]\d$")] | None = None
    """Wall time of the whole call, ``DD:HH:MM:SS``: steps end early enough for the last checkpoint,
    evaluation and export to be done by then."""

    eval_every: PositiveInt | Literal["epoch"] | None = None
    """Evaluate every so many steps, or after each ``epoch``. It is always done before the first
    step and after the last."""

    eval_max_rows: PositiveInt | None = None
    """Examples of each evaluation set that are used between the steps, the same each time. The
    whole set is used after the last step."""

    eval_micro_batch_size: PositiveInt | None = None
    """Examples a rank evaluates at once. Default: the micro-batch. Never changes the numbers."""

    early_stopping: PositiveInt | EarlyStopping | None = None
    """End after so many evaluations in a row without a better ``checkpoint.metric``, or a mapping
    of ``patience`` and ``min_delta``."""

    sample_prompts: tuple[SamplePrompt, ...] = ()
    """Prompts that the model answers at each evaluation, kept as a table: texts, or lists of
    messages."""

    log_every: PositiveInt = 1
    """Report the loss every so many steps."""
