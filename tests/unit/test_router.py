"""The load-balancing loss of mixture-of-experts models: the same weight however a step is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbx_llmtrain.compat import at_least
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.worker.data import collate, empty_batch
from dbx_llmtrain.worker.loss import LossModule, inference
from dbx_llmtrain.worker.probe import probe
from dbx_llmtrain.worker.router import router_loss
from tests import reference, tiny
from tests.unit.test_loss import _documents, _gradients, _packed, _separate, _wider

Gradients = dict[str, torch.Tensor]
COEFFICIENT = 0.5


def _family(name: str, **changes: Any) -> Any:
    """A two-layer model of a family, 4 experts, 2 for each token, that asks for its router loss."""
    import transformers

    if name == "Mixtral":
        asked = {"router_aux_loss_coef": COEFFICIENT, "output_router_logits": True}
        return tiny.mixtral(**(asked | changes))
    narrow = {"moe_intermediate_size": 32}
    special: dict[str, Any] = {
        "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, **narrow},
        "Qwen3Moe": {"num_experts": 4, "head_dim": 8, **narrow},
        "Olmoe": {"num_experts": 4},
        "GraniteMoe": {"num_local_experts": 4, "logits_scaling": 2.0},
    }[name]
    settings: dict[str, Any] = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "router_aux_loss_coef": COEFFICIENT,
        "output_router_logits": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(settings | special | changes))
    return getattr(transformers, f"{name}ForCausalLM")(config).float()


FAMILIES = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe"]
if not at_least("transformers", "4.51"):
    FAMILIES.remove("Qwen3Moe")


def _part(build: Any, *batches: Any) -> Gradients:
    """What the router loss adds to the gradient of the mean loss of the batches."""
    found = []
    for asked in (True, False):
        module = LossModule(build(output_router_logits=asked))
        probed = probe(module, module, device="cpu", max_length=64)
        assert not probed.padded
        found.append(_gradients(module, *batches)[1])
    return {name: gradient - found[1][name] for name, gradient in found[0].items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_c38_it_is_the_loss_that_transformers_adds(name: str) -> None:
    """One row without padding: the model's own loss has the same meaning. One family scales its
    logits, so that they are taken whole."""
    model = _family(name)
    module = LossModule(model)
    probed = probe(module, module, device="cpu", max_length=64)
    assert probed.own_logits == (name == "GraniteMoe")
    row = Example(tiny.examples((12,))[0].input_ids, [True] * 12)
    ids = torch.tensor([row.input_ids])
    model.zero_grad(set_to_none=True)
    own = model(input_ids=ids, labels=ids, output_router_logits=True)
    own.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss, found = _gradients(module, _separate([row]))
    assert reference.difference(found, expected) < 1e-6
    # The reported loss is that of the tokens.
    token_loss = float((own.loss - COEFFICIENT * own.aux_loss).detach())
    assert abs(loss - token_loss) < 2e-6
    assert float(own.aux_loss.detach()) > 1


def test_c38_identical_micro_batches_give_the_same_router_gradient() -> None:
    """8 copies at once, one after the other, and two by two: the same to 1e-6."""

    def build(**changes: Any) -> Any:
        return _family("Mixtral", **changes)

    row = tiny.examples((12,))
    whole = _part(build, _separate(row * 8))
    assert reference.norm(whole) > 1e-2
    for cut in ([_separate(row)] * 8, [_separate(row * 2)] * 4):
        assert reference.difference(_part(build, *cut), whole) < 1e-6


def test_c38_different_micro_batches_weigh_by_their_trained_tokens() -> None:
    """The sum of n_m / N * A_m, by hand, from the model's own function."""

    def build(**changes: Any) -> Any:
        return _family("Mixtral", **changes)

    rows = tiny.examples((9, 14, 6))
    batches = [_separate([row]) for row in rows]
    count = sum(batch.trained for batch in batches)
    assert len({batch.trained for batch in batches}) == 3
    model = build()
    for row, batch in zip(rows, batches, strict=True):
        own = model(input_ids=torch.tensor([row.input_ids]), output_router_logits=True)
        (COEFFICIENT * own.aux_loss * (batch.trained / count)).backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    assert reference.difference(_part(build, *batches), expected) < 1e-6


def test_c38_padding_does_not_count() -> None:
    module = LossModule(_family("Mixtral"))
    batch = _separate(tiny.examples((9, 14, 6)))
    _, narrow = _gradients(module, batch)
    _, wide = _gradients(module, _wider(batch, 40))
    assert reference.difference(wide, narrow) < 1e-6
    packed = collate([_documents(tiny.examples((9, 14, 6)))], 0)
    _, together = _gradients(module, packed)
    assert reference.difference(together, narrow) < 1e-6


def test_c38_a_micro_batch_without_trained_tokens_weighs_nothing() -> None:
    module = LossModule(_family("Mixtral"))
    silent = _separate([Example([5, 6, 7], [False] * 3)])
    for batch in (silent, empty_batch(0)):
        loss = module(**batch.inputs())
        loss.backward()
        assert float(loss.detach()) == 0
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().max()) == 0, name
        module.zero_grad(set_to_none=True)


def test_evaluation_is_the_token_loss_alone() -> None:
    module, silent = (
        LossModule(_family("Mixtral", output_router_logits=asked)) for asked in (True, False)
    )
    batch = _packed(tiny.examples((9, 14)))
    with inference(module):
        loss = module(**batch.inputs())
    assert torch.equal(loss, module(**batch.inputs()).detach())
    assert torch.equal(loss, silent(**batch.inputs()).detach())


def test_a_coefficient_alone_is_not_asking() -> None:
    """As in transformers: the loss is added where router logits are returned."""
    assert router_loss(_family("Mixtral", output_router_logits=False)) is None
    assert router_loss(tiny.llama()) is None


def test_adapters_do_not_hide_it() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    found = router_loss(peft.get_peft_model(_family("Mixtral"), settings))
    assert found is not None
    assert (found.experts, found.per_token, found.coefficient) == (4, 2, COEFFICIENT)


def test_router_logits_are_balanced_in_fp32() -> None:
    """A softmax in bf16 has three digits."""
    found = router_loss(_family("Mixtral"))
    assert found is not None
    torch.manual_seed(0)
    gates = tuple(torch.randn(40, 4) for _ in range(2))
    rounded = tuple(gate.bfloat16() for gate in gates)
    exact = found(tuple(gate.float() for gate in rounded), None)
    assert torch.equal(found(rounded, None), exact)
    assert exact.dtype == torch.float32


def test_a_model_whose_router_loss_is_not_known_is_refused() -> None:
    model = tiny.llama()
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no load_balancing_loss_func"):
        LossModule(model)
    lacking = _family("Mixtral")
    lacking.num_experts_per_tok = None
    with pytest.raises(ConfigError, match="MixtralForCausalLM has no num_experts_per_tok, so its"):
        LossModule(lacking)
