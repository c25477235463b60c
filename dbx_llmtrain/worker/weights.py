"""Gives a model without storage its weights, whatever a rank holds of it.

A rank that holds shards reads its own from the staged files. Where every rank holds everything, one
reads and hands out, so that a model is read once and not once per rank; the same where transformers
has to compute the tensors from what the files have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import initial, lora
from dbx_llmtrain.worker.growth import Grown, Source, chunks, mean_row
from dbx_llmtrain.worker.model import build, check_loading, load_model, load_tokenizer
from dbx_llmtrain.worker.parts import Part, part_of
from dbx_llmtrain.worker.weight_files import WeightFiles
from dbx_llmtrain.worker.weight_names import Conversion, match
from dbx_llmtrain.worker.world import World


class Fill:
    """Called with the Hugging Face model, adapters and all: every parameter and buffer of it gets
    its value in place, be it a plain tensor, a ``DTensor`` or a partition of ZeRO-3's.

    All ranks make one and call it. ``digests`` tell what the values come from from anything else
    (see ``model.check_same_weights``), ``notes`` say in words what is special about them.
    """

    def __init__(self, plan: RunPlan, folder: Path, world: World) -> None:
        """Read what the files have; nothing of their tensors yet. Raises ``CheckpointError`` for a
        tensor that is missing (it would be random) or has another shape, on every rank."""
        self._plan, self._world, self._folder = plan, world, folder
        self._built: Any = self.build()
        self._tied = _tied_names(self._built)
        self.notes: list[str] = []
        self._files: WeightFiles | None = None
        self._keys: dict[str, str] | None = None
        self._computed: dict[str, Conversion] = {}
        if plan.config.model.init == "random":
            self.digests = {"random weights": str(plan.config.train.seed)}
            return
        self._files = WeightFiles(folder)
        self.digests = {f"{key} in the files": it for key, it in self._files.digests().items()}
        found = match(self._built, self._files.keys())
        if found is not None:
            _check_tied(self._files, found.keys, self._tied)
            self._keys, self._computed = _first_names(found.keys, self._tied), found.computed
        self._rows, self._anew = self._growth(self._files)
        if self._keys is not None:
            self._check_shapes(self._files, self._keys)
        elif world.size > 1:
            self.notes.append(
                "this release of transformers has to load the weights itself: one rank does, all "
                "of them, and hands them out"
            )

    @property
    def requested(self) -> int:
        """Bytes of the weight files that this rank has asked for, by itself."""
        return self._files.requested if self._files else 0

    def __call__(self, model: nn.Module) -> None:
        """Fill ``model``; see the class."""
        seed = self._plan.config.train.seed
        with torch.no_grad():
            self._fill_buffers(model)
            self._tie(model)
            parts = self._parts(model)
            if self._files is None:
                for name, tensor in initial.tensors(self._built, seed):
                    for part in parts.get(name, ()):
                        part.put(0, tensor.reshape(part.shape))
                        part.finish()
            else:
                self._read(parts, self._source(self._files))
            lora.initialise(model, seed)

    def build(self) -> nn.Module:
        """The model to be filled; see ``model.build``."""
        return build(self._folder, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        config = self._plan.config
        return {
            "attention": self._plan.attention,
            "objective": config.data.objective,
            "trusted": config.model.trust_remote_code,
        }

    def _fill_buffers(self, model: nn.Module) -> None:
        """As a normal build has them, in their own types, on the rank's device."""
        values = dict(self._built.named_buffers(remove_duplicate=False))
        for prefix, part in model.named_modules():
            for name in part._buffers:
                original = lora.original_name(f"{prefix}.{name}" if prefix else name)
                if original in values:
                    part._buffers[name] = values[original].to(self._world.device, copy=True)

    def _tie(self, model: nn.Module) -> None:
        """Make tied weights one parameter again, where room was made for each of them."""
        first: dict[str, nn.Parameter] = {}
        for prefix, part in model.named_modules():
            for name, parameter in part._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                original = lora.original_name(full)
                if parameter is not None and original and "modules_to_save" not in full.split("."):
                    part._parameters[name] = first.setdefault(self._tied[original], parameter)

    def _parts(self, model: nn.Module) -> dict[str, list[Part]]:
        """What this rank holds, by the name of the tensor in the model without adapters (of tied
        ones the first): the same names in the same order on every rank."""
        found: dict[str, list[Part]] = {}
        for name, parameter in model.named_parameters():
            original = lora.original_name(name)
            if original is not None:
                found.setdefault(self._tied[original], []).append(part_of(parameter))
        stored = self._built.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            original = lora.original_name(name) or ""
            if original in stored and original in (self._keys or stored):
                found.setdefault(original, []).append(part_of(buffer))
        return found

    def _read(self, parts: Mapping[str, list[Part]], source: Source | None) -> None:
        """Every tensor, some rows at a time: those that this rank holds, or all of them where one
        rank reads for the others."""
        for name, held in parts.items():
            everywhere = any(part.everywhere for part in held)
            if self._world.size > 1 and (everywhere or name not in (self._keys or ())):
                self._hand_out(name, held, source)
            else:
                assert source is not None
                for part in held:
                    for start, stop in chunks(part.start, part.stop, part.shape):
                        part.put(start, source.rows(name, start, stop))
            for part in held:
                part.finish()

    def _hand_out(self, name: str, held: list[Part], source: Source | None) -> None:
        """Rank 0 reads; every rank takes what it holds."""
        shape, types = held[0].shape, {part.dtype for part in held}
        dtype = types.pop() if len(types) == 1 else torch.float32
        for start, stop in chunks(0, shape[0], shape):
            if self._world.rank == 0:
                assert source is not None
                rows = source.rows(name, start, stop).to(self._world.device, dtype).contiguous()
            else:
                rows = torch.empty(
                    (stop - start, *shape[1:]), dtype=dtype, device=self._world.device
                )
            dist.broadcast(rows, 0)
            for part in held:
                part.put(start, rows)

    def _source(self, files: WeightFiles) -> Source | None:
        """Where this rank's tensors come from; ``None`` where only rank 0 has them."""
        source: Source | None
        if self._keys is not None:
            source = _FromFiles(files, self._keys, self._computed, self._built)
        else:
            source = self._loaded()
        if self._rows is None:
            return source
        means = {}
        for name in self._vocabulary():
            shape = (self._rows, *self._built.get_parameter(name).shape[1:])
            means[name] = mean_row(source, name, shape, self._anew, self._world)
        return source and Grown(source, self._rows, self._anew, means)

    def _loaded(self) -> Source | None:
        """The whole model on rank 0, as transformers loads it. What fails there is raised on every
        rank."""
        problem, loaded = [""], None
        if self._world.rank == 0:
            try:
                loaded = _FromModel(load_model(self._folder, **self._arguments(), rows=self._rows))
            except CheckpointError as error:
                problem = [str(error)]
        if self._world.size > 1:
            dist.broadcast_object_list(problem, 0)
        if problem[0]:
            raise CheckpointError(problem[0])
        return loaded

    def _growth(self, files: WeightFiles) -> tuple[int | None, tuple[int, ...]]:
        """The rows of the vocabulary in the files, ``None`` where there is nothing new, and the ids
        of tokens that are."""
        model = self._plan.config.model
        if not model.new_tokens and model.tokenizer is None:
            return None, ()
        weight = self._built.get_input_embeddings().weight
        name = next(name for name, one in self._built.named_parameters() if one is weight)
        key = _key_of(name, files.keys(), self._keys)
        stored, rows = files.shape(key)[0] if key else weight.shape[0], weight.shape[0]
        anew: tuple[int, ...] = ()
        if model.new_tokens:
            words = load_tokenizer(self._folder, trusted=model.trust_remote_code)
            anew = tuple(sorted(words.convert_tokens_to_ids(model.new_tokens)))
        if not anew and rows <= stored:
            return None, ()
        added = len(set(anew) | set(range(stored, rows)))
        self.notes.append(
            f"{added} of the vocabulary's {rows} rows are new: they start as the mean of the others"
        )
        return min(stored, rows), anew

    def _vocabulary(self) -> list[str]:
        """Names of the parameters with a row for every token of the vocabulary."""
        ends = [self._built.get_input_embeddings(), self._built.get_output_embeddings()]
        wanted = {
            id(parameter)
            for end in ends
            if end is not None
            for parameter in end.parameters(recurse=False)
        }
        return [name for name, one in self._built.named_parameters() if id(one) in wanted]

    def _check_shapes(self, files: WeightFiles, keys: Mapping[str, str]) -> None:
        """Raise ``CheckpointError`` unless every tensor of the model is in the files."""
        grown = self._vocabulary() if self._rows is not None else []
        ignored = getattr(self._built, "_keys_to_ignore_on_load_missing", None) or ()
        report: dict[str, list[str]] = {"missing_keys": [], "mismatched_keys": []}
        for name, tensor in self._built.state_dict(keep_vars=True).items():
            name = self._tied.get(name, name)
            if name in self._computed:
                continue
            if name not in keys:
                if not any(re.search(pattern, name) for pattern in ignored):
                    report["missing_keys"].append(name)
                continue
            expected = tuple(tensor.shape)
            if name in grown:
                expected = (self._rows or 0, *expected[1:])
            if files.shape(keys[name]) != expected:
                report["mismatched_keys"].append(name)
        check_loading(
            self._folder, {kind: sorted(set(names)) for kind, names in report.items()}, strict=False
        )


class _FromFiles:
    """Tensors that lie in the files as the model has them, and those computed from others there, of
    which the last ones are kept."""

    def __init__(
        self,
        files: WeightFiles,
        keys: Mapping[str, str],
        computed: Mapping[str, Conversion],
        model: nn.Module,
    ) -> None:
        self._files, self._keys, self._computed = files, keys, computed
        self._model = model
        self._last: dict[str, Tensor] = {}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._keys:
            return self._files.rows(self._keys[name], start, stop)
        if name not in self._last:
            self._last.clear()
            self._last = self._computed[name].tensors(self._files, self._model)
        return self._last[name][start:stop]


class _FromModel:
    """Tensors of a model that is loaded whole."""

    def __init__(self, model: nn.Module) -> None:
        self._state = model.state_dict()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        found: Tensor = self._state[name]
        return found[start:stop] if found.ndim else found.reshape(1)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Every parameter's name to that of the first one that is the same tensor."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in everything}


def _first_names(keys: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, str]:
    """The files' names by the first name of each tensor; its own comes before those tied to it."""
    own = {name: key for name, key in keys.items() if tied.get(name, name) == name}
    return {tied.get(name, name): key for name, key in keys.items()} | own


def _check_tied(files: WeightFiles, keys: Mapping[str, str], tied: Mapping[str, str]) -> None:
    """Raise ``CheckpointError`` for files with two tensors where the model has one."""
    for name, key in keys.items():
        first = tied.get(name, name)
        if first != name and first in keys and not files.same(keys[first], key):
            raise CheckpointError(
                f"{keys[first]} and {key} differ in the weight files, but by config.json they are "
                "one tensor: set tie_word_embeddings to false there"
            )


def _key_of(name: str, stored: Iterable[str], keys: Mapping[str, str] | None) -> str | None:
    """The files' name of a parameter; where the model's tensors have to be computed, the one that
    ends alike."""
    if keys is not None:
        return keys.get(name)
    ending = ".".join(name.split(".")[-2:])
    return next((key for key in stored if f".{key}".endswith(f".{ending}")), None)
