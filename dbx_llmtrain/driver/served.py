"""What answers for a registered model.

This file travels with the model and is imported where it is served, under a name of its own: it
needs torch, transformers and what MLflow brings with it, and nothing of this package. A chat is
written by the chat template and by nothing else (a BOS token that a template writes itself comes
once), a text begins as the tokenizer begins one, and answers are whole: MLflow's own reader of
transformers models does not promise that, nor does it take the chats of a Spark column.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

CHAT, FILL_MASK = "llm/v1/chat", "fill-mask"

# Of a chat request; an answer that ignores them would be another one than was asked for.
_REFUSED = ("frequency_penalty", "presence_penalty")


def _load_pyfunc(path: str, model_config: dict[str, Any]) -> Answers:
    """What MLflow calls. ``model_config``: ``task``, ``model`` and ``tokenizer`` (folders in
    ``path``), ``kind`` (the class that opens the model), ``load`` (its arguments), ``defaults`` of
    a request (``max_tokens``, ``temperature``), and ``name`` of the model."""
    return Answers(Path(path), model_config)


class Answers:
    """A model that is loaded when it is first asked."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any] | None = None

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> list[Any]:
        """One answer for each row.

        A row is a text, or of a chat model a request with ``messages`` (and ``max_tokens``,
        ``temperature``, ``top_p``, ``top_k``, ``stop``, ``tools``); ``params`` hold for every row.
        Of texts the answer is what follows; of a masked text the likeliest token for each mask.
        """
        task = self._settings["task"]
        if task == CHAT:
            return [self._chat({**(params or {}), **row}) for row in _requests(data)]
        texts = _texts(data)
        if task == FILL_MASK:
            return [self._fill(text) for text in texts]
        return [self._follow(text, params or {}) for text in texts]

    def _model(self) -> tuple[Any, Any]:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> tuple[Any, Any]:
        from importlib.util import find_spec

        import torch
        import transformers

        settings = self._settings
        trusted = settings["load"].get("trust_remote_code", False)
        places = {name: self._folder / settings[name] for name in ("tokenizer", "model")}
        if trusted:
            places = {name: _with_code(path) for name, path in places.items()}
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            places["tokenizer"], trust_remote_code=trusted
        )
        gpu = torch.cuda.is_available()
        # Over all GPUs of the machine where that can be done.
        placed = {"device_map": "auto"} if gpu and find_spec("accelerate") else {}
        model = getattr(transformers, settings["kind"]).from_pretrained(
            places["model"], **settings["load"], **placed
        )
        return (model if placed or not gpu else model.to("cuda")).eval(), tokenizer

    def _chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """An answer in the form of a chat completion."""
        refused = [name for name in _REFUSED if request.get(name)]
        refused += ["n"] if request.get("n") not in (None, 1) else []
        if refused:
            raise ValueError(f"{', '.join(refused)}: this model cannot do that: leave it out")
        _, tokenizer = self._model()
        prompt = tokenizer.apply_chat_template(
            request["messages"],
            add_generation_prompt=True,
            tokenize=False,
            **{name: request[name] for name in ("tools",) if request.get(name)},
        )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        text, count, reason = self._generate(ids, request)
        message = {"role": "assistant", "content": text}
        return {
            "id": str(uuid.uuid4()),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._settings["name"],
            "choices": [{"index": 0, "finish_reason": reason, "message": message}],
            "usage": {
                "prompt_tokens": len(ids),
                "completion_tokens": count,
                "total_tokens": len(ids) + count,
            },
        }

    def _follow(self, text: str, params: dict[str, Any]) -> str:
        """What follows a text: it begins as the tokenizer begins one, and does not end."""
        _, tokenizer = self._model()
        ids = list(tokenizer(text)["input_ids"])
        bare = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        while len(ids) > bare and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
        return self._generate(ids, params)[0]

    def _fill(self, text: str) -> str:
        """The likeliest token for each mask of a text, with spaces between them."""
        import torch

        model, tokenizer = self._model()
        ids = torch.tensor([tokenizer(text)["input_ids"]], device=model.device)
        masks = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0]
        if not len(masks):
            raise ValueError(f"expected a text with {tokenizer.mask_token} in it, found {text!r}")
        with torch.no_grad():
            best = model(input_ids=ids).logits[0, masks].argmax(-1)
        return " ".join(tokenizer.decode([token]).strip() for token in best.tolist())

    def _generate(self, ids: list[int], request: dict[str, Any]) -> tuple[str, int, str]:
        """The text that the model writes after ``ids``, its tokens, and why it ended."""
        import torch

        model, tokenizer = self._model()
        request = self._settings["defaults"] | request
        chosen = _choosing(request)
        longest = _room(model, ids, int(request["max_tokens"]))
        stop = request.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if stop:
            chosen |= {"stop_strings": stop, "tokenizer": tokenizer}
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
        prompt = torch.tensor([ids], device=model.device)
        with torch.no_grad():
            written = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=longest,
                pad_token_id=pad,
                **chosen,
            )[0, len(ids) :].tolist()
        text = tokenizer.decode(
            written, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        cuts = [at for word in stop if (at := text.find(word)) >= 0]
        ended = bool(cuts) or len(written) < longest or (bool(written) and written[-1] in ends)
        return text[: min(cuts, default=len(text))], len(written), "stop" if ended else "length"


def _with_code(folder: Path) -> Path:
    """The folder under a name of its code's content, and that code where transformers imports it
    from: it goes by the folder's name, and version 4.50 brings only a part of the files there."""
    from transformers.dynamic_module_utils import HF_MODULES_CACHE

    files = sorted(folder.rglob("*.py"))
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    name = f"model_{content[:16]}"
    view = Path(tempfile.mkdtemp(prefix="served-")) / name
    view.symlink_to(folder.absolute(), target_is_directory=True)
    for path in files:
        copy = Path(HF_MODULES_CACHE) / "transformers_modules" / name / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return view


def _room(model: Any, ids: list[int], wanted: int) -> int:
    """Tokens that an answer may have, at most ``wanted``."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return wanted
    if len(ids) >= positions:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the model {positions} positions for it and an "
            "answer: shorten it"
        )
    return min(wanted, int(positions) - len(ids))


def _choosing(request: dict[str, Any]) -> dict[str, Any]:
    """How tokens are chosen. A temperature of 0 is the likeliest token."""
    if request["temperature"] <= 0:
        return {"do_sample": False}
    chosen = {name: request[name] for name in ("top_p", "top_k") if request.get(name) is not None}
    return {"do_sample": True, "temperature": float(request["temperature"]), **chosen}


def _requests(data: Any) -> list[dict[str, Any]]:
    """Chat requests: the rows of a table, one as a mapping, or a list of those."""
    if hasattr(data, "to_dict"):
        data = data.to_dict(orient="records")
    return [_plain(row) for row in ([data] if isinstance(data, dict) else data)]


def _plain(value: Any) -> Any:
    """Python's own lists for arrays, which Spark makes of them, and no field without a value, for
    which a table has NaN."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if not _is_missing(one)}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _texts(data: Any) -> list[str]:
    """Texts: a table's first column, one text, or a list."""
    if hasattr(data, "to_dict"):
        return [str(next(iter(row.values()))) for row in data.to_dict(orient="records")]
    return [data] if isinstance(data, str) else [str(text) for text in data]
