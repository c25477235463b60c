"""The loss of a batch against the textbook; packing, padding, masks and the start-up probe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.worker.data import IGNORED, Batch, collate, empty_batch
from dbx_llmtrain.worker.loss import (
    LossModule,
    chunked_cross_entropy,
    inference,
    positions_at_once,
)
from dbx_llmtrain.worker.masks import Window, attention_window, block_mask
from dbx_llmtrain.worker.probe import probe
from tests import reference, tiny
from tests.live_bytes import LiveBytes

NAMES = {"llama": tiny.llama, "tied": lambda: tiny.llama(tied=True), "gpt2": tiny.gpt2}
HAS_LAYER_TYPES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 53)


def _module(model: Any, **arguments: Any) -> LossModule:
    return LossModule(model, **arguments)


def _documents(rows: list[Example]) -> list[Any]:
    return [(np.array(row.input_ids, np.int32), np.array(row.trained)) for row in rows]


def _separate(rows: list[Example], pad_id: int = 0) -> Batch:
    return collate([[document] for document in _documents(rows)], pad_id)


def _packed(rows: list[Example]) -> Batch:
    return collate([_documents(rows)], 0)


def _gradients(module: LossModule, *batches: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss of the batches and its gradient, accumulated one batch at a time."""
    count = sum(batch.trained for batch in batches)
    total = 0.0
    for batch in batches:
        loss = module(**batch.inputs())
        (loss / count).backward()
        total += float(loss.detach()) / count
    found = {name: p.grad.clone() for name, p in module.model.named_parameters()}
    module.zero_grad(set_to_none=True)
    return total, found


def _wider(batch: Batch, pads: int, pad_id: int = 0) -> Batch:
    """The batch with more padding at the end of every row."""
    values = {"input_ids": pad_id, "labels": IGNORED, "position_ids": 0, "segment_ids": 0}
    wide = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, pads), value=value)
        for name, value in values.items()
    }
    rows, places = (wide["labels"][:, 1:] != IGNORED).nonzero(as_tuple=True)
    positions = rows * wide["labels"].shape[1] + places
    return Batch(**wide, positions=positions, rows=batch.rows, tokens=0, trained=batch.trained)


@torch.no_grad()
def test_c13_one_shift_and_no_more() -> None:
    model = tiny.llama()
    rows = [Example([5, 6, 7, 8], [False, True, False, True])]
    logits = model(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    by_hand = -(logits[0, 6] + logits[2, 8])
    loss = _module(model)(**_separate(rows).inputs())
    assert abs(float((loss - by_hand).detach())) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_the_textbooks(name: str) -> None:
    rows = tiny.examples()
    model = NAMES[name]()
    expected_loss, expected = reference.gradients(model, rows)
    module = _module(model, chunk_tokens=7)
    module.padded = bool(probe(module, module, device="cpu", max_length=64).padded)
    loss, found = _gradients(module, _separate(rows))
    assert abs(loss - expected_loss) < 1e-6
    assert reference.difference(found, expected) < 1e-6


def test_c14_the_mean_is_over_labels_after_the_shift() -> None:
    rows = [Example(list(range(5, 12)), [True] * 7) for i in range(3)]
    batch = _separate(rows)
    assert batch.trained == 3 * (7 - 1) == int((batch.labels[:, 1:] != IGNORED).sum())


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("copies", [1, 2])
def test_c22_packed_logits_are_the_separate_ones(attention: str, copies: int) -> None:
    model = tiny.llama(attn_implementation=attention)
    module = LossModule(model)
    rows = tiny.examples((7, 5, 9))
    batch = _wider(collate([_documents(rows)] * copies, 0), 3)
    packed = module(**batch.inputs(), logits=True)
    start = 0
    for row in rows:
        alone = model(torch.tensor([row.input_ids])).logits[0]
        for copy in packed:
            assert float((copy[start : start + len(alone)] - alone).abs().max()) < 1e-5
        start += len(alone)


@torch.no_grad()
def test_c24_eager_and_sdpa_take_the_mask_alike() -> None:
    """Both add it: a mask of truth values would be added as 0 and 1 by eager."""
    inputs = _wider(collate([_documents(tiny.examples((7, 5, 9)))] * 2, 0), 3).inputs()
    eager, sdpa = (
        LossModule(tiny.llama(attn_implementation=name))(**inputs, logits=True)
        for name in ("eager", "sdpa")
    )
    assert float((eager - sdpa)[:, :21].abs().max()) < 1e-5


def test_c23_no_cache_no_2d_mask_and_restarting_positions() -> None:
    seen: dict[str, Any] = {}
    module = _module(tiny.llama())
    module.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    batch = _packed(tiny.examples((3, 4)))
    module(**batch.inputs())
    assert seen["use_cache"] is False
    assert seen["attention_mask"].shape == (1, 1, 7, 7)
    assert seen["attention_mask"].dtype == torch.float32
    assert seen["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_c26_packed_gradients_are_the_separate_ones(name: str) -> None:
    rows = tiny.examples()
    module = _module(NAMES[name]())
    loss, found = _gradients(module, _separate(rows))
    packed_loss, packed = _gradients(module, _packed(rows[:3]), _packed(rows[3:]))
    assert abs(packed_loss - loss) < 1e-6
    assert reference.difference(packed, found) < 1e-6


@pytest.mark.parametrize("pads", [1, 7, 64])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_c20_padding_changes_nothing(name: str, pads: int) -> None:
    module = _module(NAMES[name]())
    probe(module, module, device="cpu", max_length=64)
    batch = _separate(tiny.examples())
    loss, found = _gradients(module, batch)
    wide_loss, wide = _gradients(module, _wider(batch, pads))
    assert abs(wide_loss - loss) < 1e-6
    assert reference.difference(wide, found) < 1e-6


@pytest.mark.parametrize("multiple", [8, 64])
def test_c21_width_in_multiples_changes_nothing(multiple: int) -> None:
    """Batches are trimmed to their longest row; wider ones, as others make them, are the same."""
    module = _module(tiny.llama())
    batch = _separate(tiny.examples((7, 5, 9)), pad_id=2)
    assert batch.input_ids.shape[1] == 9
    wide = _wider(batch, -9 % multiple, pad_id=2)
    assert wide.input_ids.shape[1] % multiple == 0
    padding = wide.segment_ids == 0
    assert set(wide.input_ids[padding].tolist()) == {2}
    assert set(wide.labels[padding].tolist()) == {IGNORED}
    (loss, found), (wide_loss, other) = (_gradients(module, each) for each in (batch, wide))
    assert abs(wide_loss - loss) < 1e-6
    assert reference.difference(other, found) < 1e-6


def test_c2_the_pad_id_changes_nothing_bitwise() -> None:
    losses, grads = [], []
    for pad_id in (0, 2, 50):
        model = tiny.llama(pad_token_id=pad_id)
        loss, found = _gradients(_module(model), _separate(tiny.examples(), pad_id))
        assert model.get_input_embeddings().weight.shape[0] == tiny.VOCAB
        losses.append(loss)
        grads.append(found)
    assert len(set(losses)) == 1
    for other in grads[1:]:
        assert all(torch.equal(other[name], grads[0][name]) for name in other)


def test_c1_c2_an_end_token_that_is_also_the_pad_token_is_trained() -> None:
    rows = [Example([5, 2, 6, 2], [False, True, True, True])]
    plain = tiny.llama()
    expected_loss, expected = reference.gradients(plain, rows)
    model = tiny.llama(pad_token_id=2)
    model.load_state_dict(plain.state_dict())
    loss, found = _gradients(_module(model), _separate(rows, 2))
    assert abs(loss - expected_loss) < 1e-6
    assert reference.difference(found, expected) < 1e-6


@pytest.mark.parametrize("own_logits", [False, True])
def test_c17_nothing_to_train_on_is_a_loss_of_zero_with_gradients(own_logits: bool) -> None:
    module = _module(tiny.llama())
    module.own_logits = own_logits
    silent = _separate([Example([5, 6, 7], [False] * 3)])
    for batch in (silent, empty_batch(0)):
        loss = module(**batch.inputs())
        loss.backward()
        assert float(loss.detach()) == 0.0
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().max()) == 0.0
        module.zero_grad(set_to_none=True)


def test_labels_alone_are_enough() -> None:
    module = _module(tiny.llama())
    inputs = _separate(tiny.examples()).inputs()
    expected = module(**inputs)
    del inputs["positions"]
    assert torch.equal(module(**inputs), expected)
    del inputs["labels"]
    with pytest.raises(ValueError, match="labels are needed"):
        module(**inputs)


class TestChunks:
    """The chunked cross-entropy by itself."""

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("chunk", [1, 4, 1000, None])
    def test_equals_the_whole(self, bias: bool, chunk: int | None) -> None:
        torch.manual_seed(0)
        head = torch.nn.Linear(8, 97, bias=bias)
        hidden = torch.randn(11, 8, requires_grad=True)
        targets = torch.randint(0, 97, (11,))
        whole = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum")
        inputs = (hidden, *head.parameters())
        expected = torch.autograd.grad(whole * 0.3, inputs)
        ours = chunked_cross_entropy(hidden, head, targets, chunk=chunk)
        found = torch.autograd.grad(ours * 0.3, inputs)
        assert abs(float((ours - whole).detach())) < 1e-5
        for one, other in zip(found, expected, strict=True):
            assert float((one - other).abs().max()) < 1e-6

    def test_a_frozen_head_gets_no_gradient(self) -> None:
        head = torch.nn.Linear(8, 97).requires_grad_(False)
        hidden = torch.randn(3, 8, requires_grad=True)
        chunked_cross_entropy(hidden, head, torch.tensor([1, 2, 3])).backward()
        assert head.weight.grad is None
        assert hidden.grad is not None

    def test_large_logits_do_not_overflow(self) -> None:
        head = torch.nn.Linear(1, 3, bias=False)
        head.weight.data = torch.tensor([[1e4], [0.0], [-1e4]])
        loss = chunked_cross_entropy(torch.ones(2, 1), head, torch.tensor([0, 1]))
        assert float(loss.detach()) == 1e4

    def test_c55_bf16_logits_are_summed_in_fp32(self) -> None:
        torch.manual_seed(0)
        head = torch.nn.Linear(32, 8000, bias=False).bfloat16()
        hidden = torch.randn(256, 32).bfloat16() * 8
        targets = torch.randint(0, 8000, (256,))
        exact = torch.nn.functional.cross_entropy(hidden.float() @ head.weight.float().T, targets)
        loss = chunked_cross_entropy(hidden, head, targets)
        assert loss.dtype == torch.float32
        assert abs(float((loss / 256 - exact).detach())) < 1e-3

    def test_c54_under_autocast_gradients_stay_fp32(self) -> None:
        head = torch.nn.Linear(8, 97)
        hidden = torch.randn(5, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = chunked_cross_entropy(hidden, head, torch.arange(5))
        loss.backward()
        assert {hidden.grad.dtype, head.weight.grad.dtype, loss.dtype} == {torch.float32}

    @pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("mean", [0.0, 3000.0])
    def test_low_precision_is_right_whatever_the_size(
        self, precision: torch.dtype, mean: float
    ) -> None:
        """2,000 times the same target: the sum of its hidden states overflows fp16 by far, and no
        loss scale could help, because it comes later."""
        torch.manual_seed(0)
        head = torch.nn.Linear(16, 300, bias=False)
        head.weight.data *= 0.01
        hidden = (mean + 50 * torch.randn(2000, 16)).requires_grad_()
        targets = torch.zeros(2000, dtype=torch.int64)
        found = []
        for enabled in (False, True):
            with torch.autocast("cpu", dtype=precision, enabled=enabled):
                loss = chunked_cross_entropy(hidden, head, targets)
            found.append((loss.detach(), *torch.autograd.grad(loss, (hidden, head.weight))))
        tolerance = 0.005 if precision == torch.float16 else 0.05
        for exact, rounded in zip(*found, strict=True):
            assert float((rounded - exact).norm() / exact.norm()) < tolerance

    def test_c54_the_gradient_of_an_fp32_head_is_not_rounded(self) -> None:
        head = torch.nn.Linear(8, 97, bias=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = chunked_cross_entropy(torch.randn(64, 8), head, torch.arange(64), chunk=1)
        (found,) = torch.autograd.grad(loss / 64, head.weight)
        assert not torch.equal(found, found.bfloat16().float())


class TestMemory:
    """Live bytes of the loss's forward and backward pass."""

    WIDTH = 16
    CHUNK = 2**18
    """Logits held at once; at ``_CHUNK_LOGITS`` the models would be too large for a test."""

    def _peak(self, vocabulary: int, length: int, *, own: bool) -> int:
        """Of a model that is little more than its head. ``own``: the loss of its own logits."""
        model = tiny.llama(
            vocab_size=vocabulary,
            hidden_size=self.WIDTH,
            intermediate_size=self.WIDTH,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=length,
        )
        module = LossModule(model, chunk_tokens=self.CHUNK // vocabulary)
        module.own_logits, module.padded = own, True
        ids = torch.randint(0, vocabulary, (1, length))
        with LiveBytes() as live:
            module(ids, labels=ids).backward()
        return live.peak

    def _other_terms(self, vocabulary: int, length: int) -> int:
        """What grows with one of the two: gradients of head and embedding (and one that is being
        made), and 12 states of each position in the block and around it, attention left out."""
        return 4 * self.WIDTH * (3 * vocabulary + 40 * length)

    def test_the_peak_does_not_depend_on_vocabulary_times_length(self) -> None:
        """A few chunks beside what grows with one of the two. The model's own loss holds the
        logits three times over."""
        sizes = ((2048, 512), (4096, 1024))
        ours, own = ([self._peak(*size, own=own) for size in sizes] for own in (False, True))
        terms = [self._other_terms(*size) for size in sizes]
        logits = [4 * vocabulary * length for vocabulary, length in sizes]
        assert ours[1] - ours[0] <= terms[1] - terms[0] < 0.2 * (logits[1] - logits[0])
        assert all(peak < 0.5 * whole for peak, whole in zip(ours[1:], logits[1:], strict=True))
        assert own[1] - own[0] > 2.5 * (logits[1] - logits[0])

    def test_a_chunk_is_of_one_size_whatever_the_vocabulary(self) -> None:
        """50 million logits, or 128 positions where that is more."""
        assert [positions_at_once(size) for size in (49152, 200_000, 1_000_000)] == [1024, 251, 128]


def test_the_head_is_called_so_that_hooks_gather_its_weight() -> None:
    """As DeepSpeed's hooks do: outside of a call the weight is in pieces."""
    module, whole = LossModule(tiny.llama()), LossModule(tiny.llama())
    head = module.model.get_output_embeddings()
    full, batch = head.weight.data, _packed(tiny.examples((7, 5)))
    head.weight.data = torch.empty(0)

    def gather(*_: Any) -> None:
        head.weight.data = full

    def free(*_: Any) -> None:
        head.weight.data = torch.empty(0)

    head.register_forward_pre_hook(gather)
    head.register_forward_hook(free)
    head.register_full_backward_pre_hook(gather)
    assert _gradients(module, batch)[0] == _gradients(whole, batch)[0]
    assert "forward" not in vars(head)
    assert module(**batch.inputs(), logits=True).shape == (1, 12, tiny.VOCAB)


def test_a_head_with_adapters_is_more_than_its_matrix() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.llama(), settings)
    rows = tiny.examples((7, 5))
    expected = float(reference.mean_loss(model, rows).detach())
    module = LossModule(model)
    batch = _separate(rows)
    loss = module(**batch.inputs())
    loss.backward()
    assert abs(float(loss.detach()) / batch.trained - expected) < 1e-6
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 2
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


class TestMasks:
    """Who sees whom."""

    def test_documents_and_padding_are_apart(self) -> None:
        mask = block_mask(torch.tensor([[1, 1, 2, 0]]), torch.float32)
        assert (mask == 0)[0, 0].tolist() == [
            [True, False, False, False],
            [True, True, False, False],
            [False, False, True, False],
            [False, False, False, True],
        ]
        assert float(mask.min()) == torch.finfo(torch.float32).min

    def test_a_window_ends_the_view_back(self) -> None:
        mask = block_mask(torch.ones(1, 4, dtype=torch.int64), torch.bfloat16, window=2)
        assert (mask == 0)[0, 0].sum(dim=1).tolist() == [1, 2, 2, 2]
        assert mask.dtype == torch.bfloat16

    @torch.no_grad()
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
    def test_a_mask_is_finite_in_the_compute_type(
        self, attention: str, precision: torch.dtype
    ) -> None:
        """And keeps documents apart to the bit: fp32's lowest number would be infinite in fp16."""
        module = _module(tiny.llama(attn_implementation=attention))
        module.autocast = precision
        seen: list[torch.Tensor] = []
        module.decoder.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        rows = tiny.examples((7, 5, 9))
        other = [tiny.examples((7,), seed=5)[0], *rows[1:]]
        packed, changed = (
            module(**_packed(each).inputs(), logits=True)[0] for each in (rows, other)
        )
        assert seen[0].dtype == precision
        assert torch.isfinite(seen[0]).all()
        assert torch.isfinite(packed).all()
        assert torch.equal(packed[7:], changed[7:])
        assert not torch.equal(packed[:7], changed[:7])

    @torch.no_grad()
    def test_a_model_whose_every_layer_has_a_window(self) -> None:
        model = tiny.mistral(sliding_window=8)
        module = _module(model)
        rows = tiny.examples((20, 30))
        packed = module(**_packed(rows).inputs(), logits=True)[0]
        alone = [model(torch.tensor([row.input_ids])).logits[0] for row in rows]
        assert float((packed - torch.cat(alone)).abs().max()) < 1e-5
        without = tiny.mistral(sliding_window=None)
        far = without(torch.tensor([rows[0].input_ids])).logits[0]
        assert float((far - alone[0]).abs().max()) > 1e-3

    @torch.no_grad()
    def test_a_model_that_mixes_windows_and_full_layers(self) -> None:
        model = _gemma2()
        module = _module(model)
        rows = tiny.examples((20, 30))
        if not HAS_LAYER_TYPES:
            assert probe(module, module, device="cpu", max_length=50).padded
            return
        assert attention_window(model.config) == Window(8, "mixed")
        packed = module(**_packed(rows).inputs(), logits=True)[0]
        alone = [model(torch.tensor([row.input_ids])).logits[0] for row in rows]
        assert float((packed - torch.cat(alone)).abs().max()) < 1e-5

    def test_windows_that_no_mask_can_express_get_padded_rows(self) -> None:
        model = tiny.mistral(sliding_window=30)
        model.config.layer_types = ["sliding_attention", "linear_attention"]
        module = _module(model)
        assert not probe(module, module, device="cpu", max_length=30).padded
        with pytest.raises(ValueError, match="a row of 45 tokens is longer than the attention"):
            module(**_packed(tiny.examples((20, 25))).inputs())
        result = probe(module, module, device="cpu", max_length=31)
        assert result.padded
        assert "no mask can express" in result.reasons[0]

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, None),
            ({"sliding_window": None}, None),
            ({"sliding_window": 8, "use_sliding_window": False}, None),
            ({"sliding_window": 8}, Window(8, "all")),
            ({"sliding_window": 8, "sliding_window_pattern": 6}, Window(8, "unknown")),
            ({"sliding_window": 8, "max_window_layers": 1}, Window(8, "unknown")),
            ({"sliding_window": 8, "layer_types": ["full_attention"]}, None),
            ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, Window(8, "all")),
            (
                {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
                Window(8, "mixed"),
            ),
            (
                {"attention_chunk_size": 8, "layer_types": ["chunked_attention"]},
                Window(8, "unknown"),
            ),
        ],
    )
    def test_what_a_configuration_asks_for(
        self, settings: dict[str, Any], expected: Window | None
    ) -> None:
        from types import SimpleNamespace

        assert attention_window(SimpleNamespace(model_type="x", **settings)) == expected


def _gemma2() -> Any:
    """Soft-capped logits, and a window in every other layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        sliding_window=8,
        pad_token_id=None,
    )
    return Gemma2ForCausalLM(config).float()


class TestProbe:
    """What is proven before the first step, and what is fallen back to."""

    @pytest.mark.parametrize("name", ["llama", "tied"])
    def test_a_plain_model_passes(self, name: str) -> None:
        module = _module(NAMES[name]())
        result = probe(module, module, device="cpu", max_length=64)
        assert (result.own_logits, result.padded, result.reasons) == (False, False, ())
        assert result.loss_difference < 1e-6
        assert result.packing_difference < 1e-6

    def test_a_head_with_a_soft_cap_is_not_trusted(self) -> None:
        model = _gemma2()
        module = _module(model)
        result = probe(module, module, device="cpu", max_length=8)
        assert result.own_logits
        assert "the model scales or caps what its head gives" in result.reasons[-1]
        assert result.padded != HAS_LAYER_TYPES
        rows = tiny.examples((3, 7, 5))
        expected_loss, expected = reference.gradients(model, rows)
        loss, found = _gradients(module, _separate(rows[:1]), _separate(rows[1:]))
        assert abs(loss - expected_loss) < 1e-6
        assert reference.difference(found, expected) < 1e-6

    def test_a_model_whose_decoder_cannot_be_told_apart_computes_its_own_logits(self) -> None:
        model = tiny.llama()
        type(model).base_model_prefix, prefix = "nothing", type(model).base_model_prefix
        model.get_decoder = lambda: model
        try:
            result = probe(module := _module(model), module, device="cpu", max_length=64)
        finally:
            type(model).base_model_prefix = prefix
        assert result.own_logits

    def test_c25_a_family_that_mixes_packed_documents_gets_padded_rows(self) -> None:
        from transformers import MambaConfig, MambaForCausalLM

        config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
        torch.manual_seed(0)
        module = _module(MambaForCausalLM(config).float())
        result = probe(module, module, device="cpu", max_length=64)
        assert result.padded
        assert "the model takes no position ids" in result.reasons[0]
        rows = tiny.examples((3, 7, 5))
        expected_loss, _ = reference.gradients(module.model, rows)
        assert abs(_gradients(module, _separate(rows))[0] - expected_loss) < 1e-6

    @pytest.mark.skipif(
        not hasattr(transformers, "GptOssConfig"), reason="transformers has no gpt_oss before 4.55"
    )
    @pytest.mark.filterwarnings("ignore")
    def test_c25_a_family_that_ignores_positions_is_packed_by_our_mask(self) -> None:
        """gpt_oss mixes documents where positions alone are to keep them apart."""
        config = transformers.GptOssConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            max_position_embeddings=128,
            pad_token_id=None,
            bos_token_id=1,
            eos_token_id=2,
        )
        torch.manual_seed(0)
        module = _module(transformers.GptOssForCausalLM(config).float())
        result = probe(module, module, device="cpu", max_length=64)
        assert not result.padded
        assert result.packing_difference < 1e-5
        rows = tiny.examples((7, 20, 9))
        loss, found = _gradients(module, _separate(rows))
        packed_loss, packed = _gradients(module, _packed(rows))
        assert abs(packed_loss - loss) < 1e-5
        assert reference.difference(packed, found) < 1e-5

    def test_a_mask_without_effect_is_noticed(self) -> None:
        module = _module(tiny.llama())
        module.decoder.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
        )
        if HAS_LAYER_TYPES:  # Since 4.53 restarting positions alone keep documents apart.
            module.decoder.register_forward_pre_hook(
                lambda _, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True
            )
        result = probe(module, module, device="cpu", max_length=64)
        assert result.padded
        assert "packed documents differ from separate ones" in result.reasons[0]

    def test_a_refused_mask_is_not_the_end(self) -> None:
        def refuse(_: Any, args: Any, kwargs: Any) -> None:
            if kwargs.get("attention_mask") is not None:
                raise ValueError("no such mask")

        module = _module(tiny.llama())
        module.decoder.register_forward_pre_hook(refuse, with_kwargs=True)
        result = probe(module, module, device="cpu", max_length=64)
        assert result.padded
        assert "refuses a block mask (ValueError: no such mask)" in result.reasons[0]

    def test_trouble_of_the_machine_is_raised(self) -> None:
        def fail(_: Any, args: Any, kwargs: Any) -> None:
            if kwargs.get("attention_mask") is not None:
                raise torch.OutOfMemoryError("full")

        module = _module(tiny.llama())
        module.decoder.register_forward_pre_hook(fail, with_kwargs=True)
        with pytest.raises(torch.OutOfMemoryError):
            probe(module, module, device="cpu", max_length=64)

    def test_a_broken_model_is_not_trained(self) -> None:
        model = tiny.llama()
        model.lm_head.weight.data[3, 3] = float("nan")
        module = _module(model)
        with pytest.raises(RuntimeError, match="logits are not finite before the first step"):
            probe(module, module, device="cpu", max_length=64)

    def test_bf16_has_its_own_tolerance(self) -> None:
        module = _module(tiny.llama())
        module.autocast = torch.bfloat16
        result = probe(module, module, device="cpu", max_length=64)
        assert (result.own_logits, result.padded) == (False, False)
        assert 1e-5 < result.packing_difference < 0.1
        assert result.loss_difference < 2e-2

    def test_training_does_not_notice(self) -> None:
        model = tiny.gpt2(resid_pdrop=0.5)
        module = _module(model).train()
        state = torch.get_rng_state()
        probe(module, module, device="cpu", max_length=64)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(part.training for part in module.modules())
        assert all(parameter.grad is None for parameter in module.parameters())


def test_inference_restores_the_mode_of_every_module() -> None:
    module = _module(tiny.llama()).train()
    module.model.lm_head.eval()
    state = torch.get_rng_state()
    with inference(module):
        assert not any(part.training for part in module.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
    assert not module.model.lm_head.training
    assert module.model.model.training
    assert torch.equal(torch.get_rng_state(), state)
