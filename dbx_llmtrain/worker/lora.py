"""Adapters over a frozen base (peft): their injection, names, first values and types.

peft replaces the layers in place and the model stays the Hugging Face model that it was, so that
everything that knows its parts (blocks, decoder, head) goes on working. Parameters that train are
fp32; the frozen base is kept in the type that the run computes in.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dbx_llmtrain import compat, lora_fields
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.model_sections import LoraConfig
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import four_bit
from dbx_llmtrain.worker.parts import part_of

ADAPTER = "default"
"""peft's name of the adapter that is trained; one model has one."""

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MATRICES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = "lora_magnitude_vector"
_PASSED_OVER = re.compile("not match|no modules were excluded|no (module|parameter) was matched")
_WRAPPERS = {"base_layer", "original_module", "modules_to_save"}


def adapt(model: nn.Module, plan: RunPlan) -> nn.Module:
    """The model with adapters where the plan wants them, else the model itself. The weights may not
    be loaded yet (a model without storage).

    Raises ``ConfigError`` where peft is not installed, or cannot do what ``model.lora`` asks for on
    this model.
    """
    lora = plan.config.model.lora
    if lora is None:
        return model
    config = _peft_config(model, lora, grown=bool(plan.config.model.new_tokens))
    patterns = {*config.rank_pattern, *config.alpha_pattern}
    tied = _tied_ends(model)
    warned = inject(model, config)
    _check_names(model, config)
    _check_warnings(warned, patterns)
    _check_layers(model, config, tied)
    keep_frozen(model, _COMPUTE[plan.precision])
    if plan.config.model.load_in_4bit:
        four_bit.choose(model, "cuda" if plan.use_gpu else "cpu")
    return model


def inject(model: nn.Module, config: Any) -> list[str]:
    """Put peft's layers into the model in place; what peft warns of. ``config`` is completed by it,
    and may be used again for another such model. Raises ``ConfigError`` for what peft refuses."""
    import peft

    for part in model.get_input_embeddings().modules():
        if isinstance(part, nn.Embedding):
            part.padding_idx = None  # as LossModule has it, also in the copy that is trained
    saved = copy.copy(config.modules_to_save)
    weight = next(model.parameters())
    try:
        # (The copy of tied weights is built anew: where the others are.)
        with _warnings() as warned, torch.device(weight.device):
            peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _refused(f"peft {compat.installed('peft')} refuses it: {error}") from error
    # What ties them takes names away, without which a reader of the file would not tie them.
    config.modules_to_save = saved
    return warned


def _check_names(model: nn.Module, config: Any) -> None:
    """Raise for names of layers that no layer has: peft passes over them."""
    layers = [str(original_name(name)) for name, _ in model.named_modules()]
    for field in ("target_modules", "modules_to_save"):
        names = getattr(config, field) or ()
        for name in () if isinstance(names, str) else sorted(names):
            if not any(layer.endswith(name) for layer in layers):
                raise _refused(f"no layer of the model has the name {name} of {field}")


def _check_warnings(warned: list[str], patterns: set[str]) -> None:
    """Raise for a warning that a field has no effect. ``patterns``: of the ranks and alphas that
    were given (peft adds some of its own, and warns of those as well)."""
    for text in warned:
        given = not text.startswith("The following") or any(repr(key) in text for key in patterns)
        if _PASSED_OVER.search(text) and given:
            raise _refused(f"peft {compat.installed('peft')}: {text}")


def _check_layers(model: nn.Module, config: Any, tied: list[str]) -> None:
    """Raise for what could not be initialised, or merged afterwards."""
    for name, layer in named_layers(model):
        if name in tied:
            raise _refused(
                f"{name} shares its weights with another layer, which an adapter would part: name "
                f"it in {lora_fields.PATH}.modules_to_save instead"
            )
        bias = getattr(layer.get_base_layer(), "bias", None)
        if getattr(config, "lora_bias", False) and bias is None:
            raise _refused(f"lora_bias: {name} has no bias that the adapter's could be merged into")
    if tied and not _tied_ends(model):
        raise _refused(f"peft cannot train {tied[0]} together with {tied[1]}: leave them out")
    strange = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ADAPTER in name.split(".") and not _is_known(name)
    ]
    if strange:
        names = ", ".join(strange[:4])
        raise _refused(f"it adds parameters that this version cannot initialise: {names}")


def is_adapted(model: nn.Module) -> bool:
    """Whether adapters were injected into the model."""
    return bool(getattr(model, "peft_config", None))


def keep_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Give what is frozen the type ``dtype``, and what is trained fp32."""
    for parameter in model.parameters():
        wanted = torch.float32 if parameter.requires_grad else dtype
        if parameter.is_floating_point() and parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)


def original_name(name: str) -> str | None:
    """The name that a parameter or buffer has in the model without adapters and so in its weight
    files; ``None`` for what belongs to an adapter, which no weight file has."""
    parts = name.removeprefix("base_model.model.").split(".")
    if {*_MATRICES, _MAGNITUDE}.intersection(parts):
        return None
    kept = []
    for place, part in enumerate(parts):
        saved = part == ADAPTER and place > 0 and parts[place - 1] == "modules_to_save"
        if part not in _WRAPPERS and not saved:
            kept.append(part)
    return ".".join(kept)


def initialise(model: nn.Module, seed: int) -> None:
    """Give the adapters their first values, when the base has its own, and turn into 4 bits what
    is to be kept so; every rank calls it.

    They depend on the seed and their names only: they are the same on every rank and for every
    strategy. Their distributions are peft's (``LoraLayer.reset_lora_parameters``): A is uniform
    (Kaiming, a = sqrt(5)) or normal with standard deviation 1/r (``gaussian``) and B is 0; for an
    embedding A is 0 and B standard normal; DoRA's magnitudes are the norms of the base's rows.
    """
    if not is_adapted(model):
        return
    start = model.peft_config[ADAPTER].init_lora_weights
    for name, parameter in model.named_parameters():
        if name.split(".")[-1] != "weight" or _MAGNITUDE not in name:
            value = _first_value(name, _shape(parameter), start, seed)
            if value is not None:
                _put(parameter, value)
    for layer in _lora_layers(model):
        if ADAPTER in getattr(layer, _MAGNITUDE, {}):
            _put(_magnitude(layer), _norms(layer))
    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    four_bit.quantise(model, trained.device)


def notes(model: nn.Module) -> list[str]:
    """What is trained, for the report of the start."""
    if not is_adapted(model):
        return []
    counts = [(_shape(p).numel(), p.requires_grad) for p in model.parameters()]
    trained = sum(count for count, wanted in counts if wanted)
    names = sorted({name.rpartition(".")[2] for name, _ in named_layers(model)})
    saved = sorted(
        name
        for name, module in model.named_modules()
        if hasattr(module, "modules_to_save") and isinstance(module.modules_to_save, nn.ModuleDict)
    )
    told = [f"adapters on {', '.join(names)}: {trained:,} parameters are trained"]
    if layers := four_bit.count(model):
        told.append(f"{layers} layers of the frozen base are kept in 4 bits (NF4)")
    if saved:
        told.append(f"trained as a whole and saved with the adapter: {', '.join(saved)}")
    return told


def _peft_config(model: Any, lora: LoraConfig, *, grown: bool) -> Any:
    """peft's configuration. Where the vocabulary has ``grown``, embeddings and head are trained."""
    try:
        import peft
    except ImportError as error:
        message = f"peft cannot be imported on this node ({error}): pip install peft on every node"
        raise _refused(message) from error
    values = lora_fields.arguments(lora)
    by_layer = values.get("layers_to_transform") is not None or values.get("layers_pattern")
    if by_layer and values["target_modules"] == lora_fields.ALL_LINEAR:
        # peft takes layers together with names only.
        values["target_modules"] = _linear_names(model)
    if grown:
        values["modules_to_save"] = _with_ends(model, values.get("modules_to_save") or [])
    ends = _tied_ends(model)
    if ends and _names_an_end(values.get("modules_to_save") or [], ends):
        _check_tying(model, peft.LoraConfig)
        # (peft ties them where it knows the name of one, such as lm_head.)
        values["modules_to_save"] = _with_ends(model, values["modules_to_save"])
        values["ensure_weight_tying"] = True
    try:
        with _warnings():
            return peft.LoraConfig(task_type=_task(model), **values)
    except (TypeError, ValueError, ImportError) as error:
        raise _refused(f"peft {compat.installed('peft')} refuses it: {error}") from error


def _check_tying(model: Any, config: Any) -> None:
    """Raise where peft cannot train embeddings that the head shares."""
    what = "training the embeddings, whose weights the head shares,"
    if "ensure_weight_tying" not in {field.name for field in dataclasses.fields(config)}:
        found = compat.installed("peft")
        raise _refused(f"{what} needs a newer peft than {found}: install 0.18 or newer")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise _refused(f"{what} would lose the head's bias (peft): leave them out")


def _task(model: Any) -> str | None:
    """peft's name for what the model is for; masked models have none."""
    architecture = type(model).__name__
    return None if "MaskedLM" in architecture else "CAUSAL_LM"


def _linear_names(model: Any) -> list[str]:
    """Last parts of the names of all linear layers but the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }
    )


def _ends(model: Any) -> list[str]:
    """Names of the input embeddings and, where there is one, of the head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [
        next(name for name, module in model.named_modules() if module is end)
        for end in ends
        if end is not None
    ]


def _tied_ends(model: Any) -> list[str]:
    """The same where they share their weights, else nothing."""
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    return _ends(model) if tied else []


def _names_an_end(names: list[str], ends: list[str]) -> bool:
    """Whether peft would take one of the ends for one of the names."""
    return any(end.endswith(name) for end in ends for name in names)


def _with_ends(model: Any, names: list[str]) -> list[str]:
    """The names and those of the embeddings and the head, where they are not among them."""
    missing = [end for end in _ends(model) if not any(end.endswith(name) for name in names)]
    return [*names, *missing]


def _is_known(name: str) -> bool:
    parts = name.split(".")
    return bool({*_MATRICES, _MAGNITUDE, "modules_to_save"}.intersection(parts))


def named_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _lora_layers(model: nn.Module) -> list[Any]:
    return [module for _, module in named_layers(model)]


def _first_value(name: str, shape: torch.Size, start: bool | str, seed: int) -> Tensor | None:
    """The value of an adapter's matrix or bias on the CPU, ``None`` for any other parameter."""
    parts = name.split(".")
    kind = next((part for part in parts if part in _MATRICES), None)
    if kind is None:
        return None
    value = torch.zeros(shape)
    drawn = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(drawn[:8], "big") >> 1)
    if kind == "lora_embedding_B" or (kind == "lora_embedding_A" and start is False):
        return nn.init.normal_(value, generator=generator)
    zero = kind == "lora_embedding_A" or (kind == "lora_B" and start is not False)
    if zero or parts[-1] == "bias":
        return value
    if start == "gaussian":
        return nn.init.normal_(value, std=1 / shape[0], generator=generator)
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)


def _magnitude(layer: Any) -> nn.Parameter:
    held = getattr(layer, _MAGNITUDE)[ADAPTER]
    weight: nn.Parameter = held.weight if isinstance(held, nn.Module) else held
    return weight


def _norms(layer: Any) -> Tensor:
    """DoRA's magnitudes (shaped like the parameter) while the adapter adds nothing: the norm of
    each row of the base's weight, and of each column of an embedding's."""
    weight = _whole(layer.get_base_layer().weight).float()
    embedding = isinstance(layer.get_base_layer(), nn.Embedding)
    columns = embedding or getattr(layer, "fan_in_fan_out", False)
    norms = torch.linalg.vector_norm(weight.T if columns else weight, dim=1)
    return norms.reshape(_shape(_magnitude(layer)))


def _shape(parameter: Any) -> torch.Size:
    """The shape of the whole parameter, also where DeepSpeed holds a part of it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _whole(parameter: Any) -> Tensor:
    """A copy of the whole tensor; every rank calls it."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    whole = parameter.detach()
    return whole.full_tensor() if hasattr(whole, "full_tensor") else whole


def _put(parameter: Any, value: Tensor) -> None:
    """Set what this rank holds of a parameter to a value that is the same on every rank."""
    part_of(parameter).put(0, value if value.ndim else value.reshape(1))


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects what peft warns of: it is set right here (``fan_in_fan_out``, tied weights), or
    raised."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(warning.message) for warning in caught]


def _refused(message: str) -> ConfigError:
    return ConfigError([Problem(lora_fields.PATH, message)])
