"""What ranks do with evaluations that are more than a loss: answers, a user's own metrics."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dbx_llmtrain.text.prompts import encode
from dbx_llmtrain.worker import lending, own_metrics, samples
from dbx_llmtrain.worker.evaluate import evaluate
from dbx_llmtrain.worker.tools import Tools
from tests import tiny
from tests.dist.runs import Context, Run

PROMPTS = ("what is the", "the fox", "what is two and")
END = 4
NEW = 12
DROPOUT = {"attention_dropout": 0.1}


def words() -> Any:
    return tiny.tokenizer()


def tiny_model(**changes: Any) -> Any:
    """A Llama that fits the tiny tokenizer, whose answers end by themselves now and then."""
    return tiny.llama(vocab_size=320, **changes)


def asked(
    tokenizer: Any, prompts: tuple[str, ...] = PROMPTS, ends: tuple[int, ...] = (2, END)
) -> samples.Asked:
    found = encode(tokenizer, prompts, chats=True, positions=128)
    generation = {"eos_token_id": list(ends), "pad_token_id": 0}
    return samples.Asked(found, tokenizer, generation, 128, NEW)


def metrics_function(model: Any, tokenizer: Any) -> dict[str, float]:
    """Uses everything that may be used: forward passes, sampled answers, every random state."""
    ids = torch.tensor([tokenizer("the fox")["input_ids"]])
    logits = model(input_ids=ids).logits
    answer = model.generate(ids, do_sample=True, max_new_tokens=random.randint(2, 6))
    np.random.rand()
    model.train()  # (as a user's code may)
    return {
        "mean_logit": float(logits.float().mean()),
        "answer_tokens": answer.shape[1] - ids.shape[1],
        "grad": torch.is_grad_enabled(),
    }


def greedy(model: Any, ids: tuple[int, ...], ends: tuple[int, ...]) -> list[int]:
    """What transformers alone writes after a prompt."""
    inputs = torch.tensor([ids])
    whole = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=list(ends),
        pad_token_id=0,
    )
    found: list[int] = whole[0, len(ids) :].tolist()
    return found


def answers(context: Context) -> dict[str, Any]:
    """Answers under this strategy, and those of transformers alone with the same weights; then with
    an end token that one of them has early, so that the ranks do not end together."""
    tokenizer = words()
    run = Run(context, tiny.examples(vocab=320), model=tiny_model(), steps=1)
    list(run.steps())
    plain = tiny_model()
    plain.load_state_dict(run.state(), strict=False)
    plain.eval()
    found = {}
    early = greedy(plain, asked(tokenizer).prompts[0].ids, (2,))[3]
    for name, prompts, ends in (
        ("free", PROMPTS, (2, END)),
        ("early", PROMPTS, (early,)),
        ("one", PROMPTS[:1], (2, END)),
    ):
        wanted = asked(tokenizer, prompts, ends)
        given = samples.answer(run.root, run.model, context.world, wanted)
        expected = [greedy(plain, prompt.ids, ends) for prompt in wanted.prompts]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
        found[name] = {
            "texts": [sample.text for sample in given] == texts,
            "prompts": [sample.prompt for sample in given] == list(prompts),
            "tokens": [sample.tokens for sample in given],
            "expected": [len(ids) for ids in expected],
            "stopped": [sample.stopped for sample in given],
            "ended": [ids[-1] in ends for ids in expected],
            "ranks": len(set(context.gather(str(given)))),
        }
    return found


def unnoticed(context: Context) -> dict[str, Any]:
    """Training with answers, own metrics and the held-out loss around every step, and without."""
    tokenizer = words()
    states, draws, given = [], [], []
    for evaluated in (False, True):
        model = tiny_model(**DROPOUT)
        run = Run(context, tiny.examples(vocab=320), model=model, global_batch=4, steps=3)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7 + context.world.rank)
        modes = [part.training for part in run.root.modules()]
        for _ in run.steps():
            if evaluated:
                before = run.model.generation_config
                given.append(_everything(context, run, tokenizer))
                assert run.model.generation_config is before
                assert "generate" not in vars(run.model)
                assert [part.training for part in run.root.modules()] == modes
                assert run.model.config.use_cache is False
        states.append(run.state())
        draws.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
    return {
        "bitwise": all(torch.equal(states[0][n], value) for n, value in states[1].items()),
        "draws": context.gather(draws[0] == draws[1]),
        "equal_on_ranks": len(set(context.gather(str(given)))),
        "grad": {each["grad"] for each in given} == {0.0},
        "changed": given[0]["mean_logit"] != given[-1]["mean_logit"],
    }


def _everything(context: Context, run: Run, tokenizer: Any) -> dict[str, float]:
    run.model.config.use_cache = False
    generation = {"eos_token_id": [2, END], "pad_token_id": 0}
    tools = Tools(tokenizer, generation, metrics_function)
    evaluate(run.root, run.split, context.world, micro_batch=2)
    samples.answer(run.root, run.model, context.world, asked(tokenizer))
    return own_metrics.measure(run.root, run.model, context.world, tools, taken=["eval_loss"])


def lent(context: Context) -> dict[str, Any]:
    """The model that is lent: logits of the whole model on every rank, in evaluation mode."""
    found = {}
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = tiny_model(**DROPOUT).eval()
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
    for precision in ("fp32", "bf16"):
        model = tiny_model(**DROPOUT)
        run = Run(context, tiny.examples(vocab=320), model=model, precision=precision, steps=1)
        seen: list[Any] = []

        def use(model: Any, seen: list[Any] = seen) -> None:
            answer = model.generate(ids, max_new_tokens=3, do_sample=False)
            seen.append((model(input_ids=ids).logits, model.training, answer.shape[1] - 4))

        lending.lend(run.root, run.model, context.world, use, {"pad_token_id": 0})
        logits, training, tokens = seen[0]
        found[precision] = {
            "difference": max(context.gather(float((logits.float() - expected).abs().max()))),
            "training": training,
            "back": run.model.training,
            "tokens": tokens,
        }
    return found


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    case.__name__: case for case in (answers, unnoticed, lent)
}
