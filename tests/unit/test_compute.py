"""Gradient checkpointing and compilation: other memory and speed, the same gradients and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.worker import compute
from dbx_llmtrain.worker.loss import LossModule, inference
from dbx_llmtrain.worker.model import load_model
from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks
from dbx_llmtrain.worker.probe import probe
from tests import reference, sample, tiny
from tests.live_bytes import LiveBytes
from tests.unit.test_loss import _packed, _separate

pytestmark = [
    # Of torch's own tracing, which looks at every attribute.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def _drops_out(name: str) -> Any:
    """A model with a dropout of 0.1."""
    if name == "gpt2":
        return tiny.gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    if name == "mixtral":
        return tiny.mixtral(attention_dropout=0.1, output_router_logits=True)
    if name == "bert":
        return tiny.bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return tiny.llama(attention_dropout=0.1)


def _plan(gradient_checkpointing: int = 0, **changes: Any) -> Any:
    model = {"source": "/models/tiny", **changes}
    return sample.run_plan(
        config=sample.config(model=model), gradient_checkpointing=gradient_checkpointing
    )


def _gradients(module: LossModule, *batches: Any, seed: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    for batch in batches:
        (module(**batch.inputs()) / batch.trained).backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert"])
def test_c76_checkpointing_replays_dropout_and_changes_no_gradient(name: str, frozen: bool) -> None:
    """Also behind a frozen embedding, whose output needs no gradient. (Ranks: ``tests/dist``.)"""
    plain, recomputing = (
        LossModule(_drops_out(name), masked=name == "bert") for _ in ("off", "on")
    )
    for module in (plain, recomputing):
        module.padded = name in ("gpt2", "bert")
        module.model.get_input_embeddings().weight.requires_grad_(not frozen)
    names = [name for name, _ in recomputing.named_parameters()]
    assert compute.recompute_blocks(transformer_blocks(recomputing.model), 1) == 2
    assert [name for name, _ in recomputing.named_parameters()] == names
    batch = _separate(tiny.examples((9, 14, 6)))
    expected, found = _gradients(plain, batch), _gradients(recomputing, batch)
    assert len(found) == len(names) - frozen
    assert reference.difference(found, expected) < 1e-6
    other = _gradients(recomputing, batch, seed=8)
    assert reference.difference(other, expected) > 1e-4, "the model drops nothing out"


def test_c76_without_reentrance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = compute.checkpoint

    def watch(*args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        seen.append(use_reentrant)
        return original(*args, use_reentrant=use_reentrant, **kwargs)

    monkeypatch.setattr(compute, "checkpoint", watch)
    module = LossModule(tiny.llama())
    compute.prepare(module.model, _plan(1))
    _gradients(module, _packed(tiny.examples((5, 6))))
    assert seen == [False, False]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_c76_autocast_is_replayed(precision: torch.dtype) -> None:
    plain, recomputing = (LossModule(_drops_out("llama")) for _ in ("off", "on"))
    compute.recompute_blocks(transformer_blocks(recomputing.model), 1)
    plain.autocast = recomputing.autocast = precision
    batch = _packed(tiny.examples((9, 14, 6)))
    expected, found = _gradients(plain, batch), _gradients(recomputing, batch)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    assert reference.difference(found, expected) < 1e-6


def test_c76_adapters_over_frozen_weights() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    modules = []
    for every in (0, 1):
        torch.manual_seed(1)
        model = peft.get_peft_model(tiny.llama(), settings)
        compute.prepare(model, _plan(every))
        modules.append(LossModule(model))
    batch = _packed(tiny.examples((9, 14, 6)))
    expected, found = (_gradients(module, batch) for module in modules)
    assert len(found) == 2 * 2 * 7
    assert reference.difference(found, expected) < 1e-6


def test_c76_a_model_with_its_own_code(tmp_path: Path) -> None:
    """Its blocks are modules of any kind, with a state that is no keyword argument."""
    from dbx_llmtrain.custom_code import private_modules

    folder, found = tiny.custom_folder(tmp_path / "model"), []
    with private_modules(tmp_path, wanted=True):
        for every in (0, 1):
            model = load_model(folder, attention="auto", trusted=True)
            notes = compute.prepare(model, _plan(every))
            assert len(notes) == every
            module = LossModule(model)
            found.append(_gradients(module, _packed(tiny.examples((9, 14), vocab=300))))
    assert len(found[0]) == 6
    assert reference.difference(found[1], found[0]) < 1e-6


@pytest.mark.parametrize(("every", "chosen"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (9, [0])])
def test_every_nth_block_is_computed_again(every: int, chosen: list[int]) -> None:
    module = LossModule(tiny.llama(num_hidden_layers=5))
    blocks = transformer_blocks(module.model)
    runs = [0] * 5
    for number, block in enumerate(blocks):

        def count(*_: Any, place: int = number) -> None:
            runs[place] += 1

        block.mlp.register_forward_pre_hook(count)
    (note,) = compute.prepare(module.model, _plan(every))
    assert note.startswith(f"activations of {len(chosen)} of 5 blocks are computed again")
    _gradients(module, _packed(tiny.examples((5, 6))))
    assert [place for place, times in enumerate(runs) if times == 2] == chosen
    assert sum(runs) == 5 + len(chosen)


def test_checkpointing_keeps_less_alive() -> None:
    """Six blocks: one set of activations and the blocks' inputs, not six sets."""
    peaks = []
    batch = _packed(tiny.examples((100, 100), seed=3))
    for every in (0, 2, 1):
        module = LossModule(tiny.llama(num_hidden_layers=6, max_position_embeddings=256))
        compute.prepare(module.model, _plan(every))
        with LiveBytes() as live:
            module(**batch.inputs()).backward()
        peaks.append(live.peak)
    none, some, every_one = peaks
    assert every_one < some < none
    assert every_one < 0.5 * none


def test_evaluation_computes_nothing_twice() -> None:
    module = LossModule(tiny.llama())
    compute.prepare(module.model, _plan(1))
    runs: list[int] = []
    module.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    batch = _packed(tiny.examples((5, 6)))
    with inference(module):
        loss = module(**batch.inputs())
    assert len(runs) == 1
    assert torch.equal(loss, LossModule(tiny.llama())(**batch.inputs()).detach())


def test_c77_checkpointing_leaves_the_configuration_alone(tmp_path: Path) -> None:
    """The cache is off in training, whatever is computed again; the export has it on
    (``test_export``)."""
    model = load_model(tiny.model_folder(tmp_path), attention="sdpa")
    assert model.config.use_cache is False
    before = model.config.to_dict()
    compute.prepare(model, _plan(1))
    assert model.config.to_dict() == before
    seen: list[Any] = []
    decoder = LossModule(model).decoder
    decoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["use_cache"]), with_kwargs=True
    )
    _gradients(LossModule(model), _packed(tiny.examples((5, 6))))
    assert seen == [False]


def test_a_model_on_meta_is_prepared_before_it_has_weights() -> None:
    with torch.device("meta"):
        model = tiny.llama()
    names = [name for name, _ in model.named_parameters()]
    compute.prepare(model, _plan(1, compile=True))
    assert [name for name, _ in model.named_parameters()] == names
    assert not any("_orig_mod" in name or "_checkpoint" in name for name in model.state_dict())
    model.to_empty(device="cpu").load_state_dict(tiny.llama().state_dict())


@pytest.mark.parametrize(("field", "value"), [("gradient_checkpointing", 1), ("compile", True)])
def test_a_model_without_blocks_is_refused(field: str, value: Any) -> None:
    class Flat(torch.nn.Module):
        def get_input_embeddings(self) -> None:
            return None

        get_output_embeddings = get_input_embeddings

    plan = _plan(1) if field == "gradient_checkpointing" else _plan(compile=True)
    with pytest.raises(ConfigError, match=rf"model\.{field}: Flat has no list of repeated blocks"):
        compute.prepare(Flat(), plan)


def test_nothing_asked_for_changes_nothing() -> None:
    model = tiny.llama()
    assert compute.prepare(model, _plan()) == ()
    assert "forward" not in vars(model.model.layers[0])


class TestCompile:
    """With a backend that only counts, so that nothing is built."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> Any:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def _compiled(self, build: Any, backend: Any, every: int = 0) -> LossModule:
        module = LossModule(build())
        blocks = transformer_blocks(module.model)
        compute.compile_blocks(blocks, backend)
        if every:
            compute.recompute_blocks(blocks, every)
        return module

    @pytest.mark.parametrize("every", [0, 1])
    def test_c78_rows_of_any_length_are_compiled_once(self, every: int) -> None:
        """For both blocks together; names and gradients stay."""
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        module, plain = self._compiled(tiny.llama, counter, every), LossModule(tiny.llama())
        assert list(module.state_dict()) == list(plain.state_dict())
        for lengths in ((9, 5), (4, 8, 7), (30, 20), (17,)):
            batch = _packed(tiny.examples(lengths))
            difference = reference.difference(_gradients(module, batch), _gradients(plain, batch))
            assert difference < 1e-5
        assert counter.frame_count == 1

    def test_probe_and_evaluation_compile_nothing(self) -> None:
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        module = self._compiled(tiny.llama, counter)
        probe(module, module, device="cpu", max_length=64)
        assert counter.frame_count == 0

    def test_experts_and_their_router_loss(self) -> None:
        def build() -> Any:
            return tiny.mixtral(output_router_logits=True)

        module, plain = self._compiled(build, "eager", 1), LossModule(build())
        batch = _packed(tiny.examples((9, 5)))
        assert reference.difference(_gradients(module, batch), _gradients(plain, batch)) < 1e-5

    def test_a_machine_that_cannot_compile_says_so(self) -> None:
        def broken(*_: Any) -> Any:
            raise OSError("there is no compiler")

        module = self._compiled(tiny.llama, broken)
        with pytest.raises(ConfigError, match=r"model.compile: torch cannot compile .*no compiler"):
            module(**_packed(tiny.examples((5, 6))).inputs())

    @pytest.mark.slow
    def test_c78_compiled_blocks_give_the_same_gradient(self) -> None:
        """With the real compiler, as ``prepare`` does it."""
        model = tiny.llama(num_hidden_layers=1)
        names = [name for name, _ in model.named_parameters()]
        (note,) = compute.prepare(model, _plan(compile=True))
        assert note == "1 blocks are compiled at their first training step"
        module, plain = LossModule(model), LossModule(tiny.llama(num_hidden_layers=1))
        for lengths in ((9, 5), (4, 8, 7)):
            batch = _packed(tiny.examples(lengths))
            difference = reference.difference(_gradients(module, batch), _gradients(plain, batch))
            assert difference < 1e-5
        assert [name for name, _ in model.named_parameters()] == names


class TestLiger:
    """Whether it can be had at all; that it computes the same is tested where a GPU is."""

    def test_true_without_a_gpu_is_refused(self) -> None:
        plan = _plan(use_liger_kernel=True)
        with pytest.raises(ConfigError, match="use_liger_kernel: Liger's kernels run on GPUs only"):
            compute.prepare(tiny.llama(), plan)

    def test_true_without_the_package_is_refused(self) -> None:
        plan = _plan(use_liger_kernel=True).model_copy(update={"use_gpu": True})
        with pytest.raises(ConfigError, match="liger-kernel is not installed on this machine"):
            compute.prepare(tiny.llama(), plan)
