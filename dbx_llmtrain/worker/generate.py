"""Answers of a model that was trained, in one process.

A batch is padded on the left, with a mask from which transformers counts the positions, and what is
drawn for a prompt depends on the seed and that prompt alone: its text is the one that it would have
got by itself.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbx_llmtrain import custom_code
from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.outcomes import Sample
from dbx_llmtrain.text.prompts import Given, encode, from_chats
from dbx_llmtrain.worker import adapters
from dbx_llmtrain.worker.generation import GENERATION_FILE, as_list

_SHARE = 0.7
"""Of a GPU's free memory that weights may take in fp32; the rest is for the cache."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest one with ``temperature`` 0, else one drawn from the
    likeliest that make up ``top_p``. ``batch_size`` prompts at a time."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 8


@dataclass(frozen=True)
class Opened:
    """A model (in evaluation mode) and its tokenizer. ``chats``: a text is a message to it."""

    model: Any
    tokenizer: Any
    chats: bool


def open_model(
    source: str | Path,
    *,
    device: str | None = None,
    trusted: bool = False,
    data_format: str | None = None,
) -> Opened:
    """The model of a folder or hub id, ready to generate. An adapter's folder is opened on its
    base. ``device``: by default a GPU where there is one. ``trusted``: code that comes with it runs
    (inside ``custom_code.private_modules``). A text is a message where ``data_format`` (of the rows
    it was trained on; ``None``: not known) is one of chats and there is a chat template.

    Weights are fp32, in which rounding does not decide between two tokens, unless a GPU has no
    room for that: then they are as they are stored. Raises ``ConfigError`` for what cannot be
    opened or cannot generate.
    """
    from transformers import GenerationConfig

    place = _device(device)
    base, revision = source, None
    adapter = Path(source) if (Path(source) / adapters.CONFIG).is_file() else None
    if adapter is not None:
        content = json.loads((adapter / adapters.CONFIG).read_text(encoding="utf-8"))
        base, revision = content["base_model_name_or_path"], content.get("revision")
    try:
        model = _load(base, revision, fp32=place == "cpu", trusted=trusted)
    except ConfigError as error:
        if adapter is None:
            raise
        said = error.problems[0].message
        message = f"the base of the adapter {source}: {said}. Use the run's merged export instead"
        raise _refuse(message) from error
    tokenizer = _load_tokenizer(source, trusted=trusted)
    if adapter is not None:
        opened: Any = adapters.put_on(adapter, model, _rows(adapter, model))
        model = opened.base_model.model
        if (adapter / GENERATION_FILE).is_file():
            model.generation_config = GenerationConfig.from_pretrained(adapter)
    if place != "cpu":
        count = sum(parameter.numel() for parameter in model.parameters())
        free, _ = torch.cuda.mem_get_info(place)
        model = (model.float() if 4 * count < _SHARE * free else model).to(place)
    return Opened(model.eval(), tokenizer, from_chats(data_format or "messages", tokenizer))


def _device(given: str | None) -> str:
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    known = ["cpu", "cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if given not in (known if torch.cuda.is_available() else ["cpu"]):
        has = "" if torch.cuda.is_available() else " (this machine has no GPU)"
        raise ConfigError([Problem("device", f"expected cpu or cuda, found {given!r}{has}")])
    return given


def _load(source: str | Path, revision: str | None, *, fp32: bool, trusted: bool) -> Any:
    """A causal language model, as transformers opens it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments = _arguments(source, revision, trusted=trusted)
    try:
        config = AutoConfig.from_pretrained(**arguments)
        _check_kind(source, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a generation configuration that is not used
            return AutoModelForCausalLM.from_pretrained(
                **arguments, **dtype_argument(torch.float32 if fp32 else "auto")
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _cannot(f"{source} cannot be opened", error) from error


def _check_kind(source: str | Path, config: Any) -> None:
    """Raise for a model of another kind. (transformers would build a causal one around the weights
    of BERT, with a part of it at random.)"""
    named = tuple(getattr(config, "architectures", None) or ())
    if named and all(name.endswith("MaskedLM") for name in named):
        raise _refuse(
            f"{source} fills in masked tokens ({named[0]}) and cannot generate: use it with "
            'transformers.pipeline("fill-mask")'
        )
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(f"{source} is an encoder with a decoder, expected a causal language model")


def _arguments(source: str | Path, revision: str | None, *, trusted: bool) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a folder or a hub id."""
    if Path(source).is_dir():
        return {
            **custom_code.load_from(Path(source).absolute(), trusted=trusted),
            "local_files_only": True,
        }
    return {"pretrained_model_name_or_path": str(source), "revision": revision or "main"}


def _load_tokenizer(source: str | Path, *, trusted: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(**_arguments(source, None, trusted=trusted))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _cannot(f"{source} has no tokenizer that can be opened", error) from error


def _rows(adapter: Path, base: Any) -> int:
    """Rows of the vocabulary that an adapter was trained with: new ones are in its own file."""
    from safetensors import safe_open

    embedding = base.get_input_embeddings().weight
    name = next(name for name, one in base.named_parameters() if one is embedding)
    with safe_open(adapter / adapters.WEIGHTS, framework="pt") as file:
        key = f"{adapters.PREFIX}{name}"
        shape = file.get_slice(key).get_shape() if key in file.keys() else embedding.shape
    return int(shape[0])


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem("model", message)])


def _cannot(what: str, error: Exception) -> ConfigError:
    """The error for what transformers says, in one line. (It would tell to pass an argument that is
    none of ours.)"""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        said = (
            "it needs Python code that comes with it, which runs only for the export in the folder "
            "of a run with model.trust_remote_code"
        )
    return _refuse(f"{what}: {said[:500]}")


def answer(opened: Opened, prompts: Sequence[Given], sampling: Sampling) -> list[Sample]:
    """What the model writes after each prompt, in their order.

    Raises ``ConfigError`` for prompts that cannot be rendered or leave no room for an answer.
    """
    text = opened.model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    asked = encode(
        opened.tokenizer, prompts, chats=opened.chats, positions=positions, path="prompts"
    )
    config = _quiet(opened.model)
    coded = [prompt.ids for prompt in asked]
    longest = sampling.max_new_tokens
    rooms = [min(longest, positions - len(ids)) if positions else longest for ids in coded]
    seeds = _seeds(coded, sampling.seed)
    written: dict[int, list[int]] = {}
    for batch in _batches(coded, rooms, sampling):
        config.max_new_tokens = rooms[batch[0]]
        draws = [torch.Generator().manual_seed(seeds[at]) for at in batch]
        ids = _generate(opened.model, [coded[at] for at in batch], config, draws, sampling)
        written.update(zip(batch, ids, strict=True))
    ends = as_list(config.eos_token_id)
    return [
        _sample(opened.tokenizer, prompt.shown, written[number], ends)
        for number, prompt in enumerate(asked)
    ]


def _quiet(model: Any) -> Any:
    """Give a model a generation configuration with its token ids and nothing else: the sampling
    settings of its own would join ours."""
    from transformers import GenerationConfig

    own, config = model.generation_config, model.config
    ends = as_list(own.eos_token_id) or as_list(getattr(config, "eos_token_id", None))
    pad = own.pad_token_id if own.pad_token_id is not None else (ends or [0])[0]
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
        do_sample=False,
        use_cache=own.use_cache is not False,  # (code of a model's own may have none)
    )
    return model.generation_config


def _seeds(coded: Sequence[tuple[int, ...]], seed: int) -> list[int]:
    """A seed for each prompt; the same prompt a second time gets another one."""
    times: Counter[tuple[int, ...]] = Counter()
    seeds = []
    for ids in coded:
        digest = hashlib.sha256(f"{seed} {times[ids]} {ids}".encode()).digest()
        seeds.append(int.from_bytes(digest[:8], "big") >> 1)
        times[ids] += 1
    return seeds


def _batches(
    coded: Sequence[Sequence[int]], rooms: Sequence[int], sampling: Sampling
) -> list[list[int]]:
    """Indices of the prompts of each batch, of like lengths. One whose answer would run out of
    positions goes alone: others would have to end with it."""
    order = sorted(range(len(coded)), key=lambda at: len(coded[at]))
    whole = [at for at in order if rooms[at] == sampling.max_new_tokens]
    size = sampling.batch_size
    batches = [whole[start : start + size] for start in range(0, len(whole), size)]
    return batches + [[at] for at in order if rooms[at] < sampling.max_new_tokens]


def _generate(
    model: Any,
    rows: Sequence[Sequence[int]],
    config: Any,
    draws: Sequence[torch.Generator],
    sampling: Sampling,
) -> list[list[int]]:
    """The ids that the model writes after each row, ends and what follows them included."""
    from transformers import LogitsProcessorList

    width = max(map(len, rows))
    ids = torch.full((len(rows), width), config.pad_token_id)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, width - len(row) :] = torch.tensor(row)
        mask[at, width - len(row) :] = 1
    chosen = LogitsProcessorList([_Draw(draws, sampling)] if sampling.temperature else [])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            logits_processor=chosen,
        )
    found: list[list[int]] = out[:, width:].tolist()
    return found


class _Draw:
    """Makes the likeliest token one that is drawn (Gumbel's trick), from numbers of each row's own:
    what else is in the batch does not matter."""

    def __init__(self, draws: Sequence[torch.Generator], sampling: Sampling) -> None:
        from transformers import TopPLogitsWarper

        self._draws, self._temperature = draws, sampling.temperature
        self._top_p = TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1 else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.double() / self._temperature
        if self._top_p is not None:
            scores = self._top_p(input_ids, scores)
        size = scores.shape[-1]
        drawn = torch.stack(
            [torch.rand(size, generator=one, dtype=torch.float64) for one in self._draws]
        )
        return scores - torch.log(-torch.log(drawn.to(scores.device)))


def _sample(tokenizer: Any, prompt: str, ids: list[int], ends: Sequence[int]) -> Sample:
    """The answer up to the first end token, which counts but is not shown."""
    end = next((at for at, id_ in enumerate(ids) if id_ in ends), None)
    kept = ids if end is None else ids[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Sample(
        prompt=prompt, text=text, tokens=len(kept) + (end is not None), stopped=end is not None
    )
