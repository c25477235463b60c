"""Texts to token ids, many at a time, and where a text spells control tokens.

A control token is one that stands for something a text cannot say: the beginning of a turn, its
end, the end of a document. The tokenizers library splits a text at them before all else, so that
what lies between two of them is tokenised by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Place = tuple[int, int]
"""Where in a text a control token begins and ends."""

# Names that stand for control tokens where the real ones are ordinary text: characters that
# Unicode keeps for a program's own use, so that no text has them.
RESERVED = re.compile("[\ufdd0-\ufdef]")
_NAME = "\ufde0{}\ufde1"
_LOOKS_LIKE_CONTROL = re.compile(r"<\|[^<>]*\|>")
_TAILS_KEPT = 10_000


class Lexer:
    """Token ids of texts, in which the names of ``control`` (name to id) are control tokens.

    ``unknown`` is the one of them that also stands for characters which the tokenizer does not
    know: where it is says nothing, and it is not looked for.
    """

    def __init__(
        self,
        tokenize: Callable[[list[str]], list[list[int]]],
        control: dict[str, int],
        unknown: str | None = None,
    ) -> None:
        self.ids = tokenize
        written = {name: id_ for name, id_ in control.items() if name != unknown}
        self.control = frozenset(written.values())
        self._pattern = _any_of(control)
        self._written = _any_of(written)
        self.tails: dict[str, list[int]] = {}

    def places(self, text: str) -> list[Place]:
        """Where a text has control tokens."""
        return [match.span() for match in self._written.finditer(text)]

    def spells(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return self._pattern.search(text) is not None

    def replace(self, text: str, change: Callable[[str], str]) -> str:
        """The text with every control token that it spells changed."""
        return self._pattern.sub(lambda match: change(match.group()), text)

    def positions(self, ids: Sequence[int]) -> list[int]:
        """Where among token ids the control tokens are."""
        return [at for at, id_ in enumerate(ids) if id_ in self.control]

    def keep_tail(self, text: str, ids: list[int]) -> None:
        """Remember the ids of a text that many rows share, such as the head of an answer."""
        if len(self.tails) >= _TAILS_KEPT:
            self.tails.clear()
        self.tails[text] = ids


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """The longest of the names that a text has at a place."""
    escaped = [re.escape(name) for name in sorted(names, key=len, reverse=True)]
    return re.compile("|".join(escaped) if escaped else r"(?!)")


def lexer_of(tokenizer: Any, control: dict[str, int]) -> Lexer:
    """The lexer of a tokenizer whose control tokens are ``control``."""
    return Lexer(tokenize(tokenizer), control, _unknown(tokenizer))


def _unknown(tokenizer: Any) -> str | None:
    """The token for characters that a tokenizer does not know (one of bytes knows them all)."""
    name = tokenizer.unk_token
    if name in (None, tokenizer.eos_token, tokenizer.bos_token):
        return None
    if tokenizer.is_fast:
        return str(getattr(tokenizer.backend_tokenizer.model, "unk_token", name) or "") or None
    return str(name)


def tokenize(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """What gives the ids of many texts, without tokens that the tokenizer adds by itself."""
    if not tokenizer.is_fast:
        return lambda texts: list(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return _batch(tokenizer.backend_tokenizer)


def _batch(inner: Any) -> Callable[[list[str]], list[list[int]]]:
    run = getattr(inner, "encode_batch_fast", inner.encode_batch)

    def ids(texts: list[str]) -> list[list[int]]:
        # Every call of the tokenizer by somebody else leaves its own settings there.
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = False
        return [coded.ids for coded in run(texts, add_special_tokens=False)]

    return ids


def control_tokens(tokenizer: Any, template: str | None) -> dict[str, int]:
    """Names and ids of the control tokens: the special ones, and added ones that look like
    ``<|this|>`` and that the chat template writes (some tokenizers do not call them special)."""
    named = {token.content: id_ for id_, token in _added(tokenizer) if token.special}
    for id_ in tokenizer.all_special_ids:
        named[tokenizer.convert_ids_to_tokens(id_)] = id_
    spelt = set(_LOOKS_LIKE_CONTROL.findall(template or ""))
    named |= {token.content: id_ for id_, token in _added(tokenizer) if token.content in spelt}
    return {name: id_ for name, id_ in named.items() if name}


def _added(tokenizer: Any) -> Iterable[tuple[int, Any]]:
    return tokenizer.added_tokens_decoder.items()  # type: ignore[no-any-return]


class OtherNames:
    """The same tokenizer with other names for some control tokens, made when first used.

    What spells the real names is ordinary text for it, tokenised as with ``split_special_tokens``.
    """

    def __init__(self, tokenizer: Any, control: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self.names = {name: _NAME.format(_letters(at)) for at, name in enumerate(control)}
        self._lexer: Lexer | None = None

    def lexer(self) -> Lexer:
        """Raises ``ValueError`` where the tokenizer cannot be changed in this way."""
        if self._lexer is None:
            self._lexer = self._made()
        return self._lexer

    def _made(self) -> Lexer:
        if not self._tokenizer.is_fast:
            raise ValueError("it needs a fast tokenizer (tokenizer.json)")
        run = _batch(_renamed(self._tokenizer.backend_tokenizer, self.names))
        control = {self.names[name]: id_ for name, id_ in self._control.items()}
        if run(list(control)) != [[id_] for id_ in control.values()]:
            raise ValueError("its control tokens cannot be told from text")
        return Lexer(run, control, self.names.get(_unknown(self._tokenizer) or ""))


def _letters(number: int) -> str:
    """A number in characters of the reserved range."""
    digits = ""
    while True:
        number, digit = divmod(number, 8)
        digits = chr(0xFDE2 + digit) + digits
        if not number:
            return digits


def _renamed(inner: Any, names: dict[str, str]) -> Any:
    """A copy of a tokenizer of the tokenizers library in which tokens have other names."""
    from tokenizers import Tokenizer

    state = json.loads(inner.to_str())
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    state |= {"post_processor": None, "padding": None, "truncation": None}
    try:
        return Tokenizer.from_str(json.dumps(state))
    except Exception as error:
        raise ValueError(f"its control tokens cannot be renamed ({error})") from error
