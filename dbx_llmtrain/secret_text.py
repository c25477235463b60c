"""What looks like a secret: by the name of a variable, or by the text itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAME = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE
)
# "user:password@" of any URI, also with a "/" in the password that should have been quoted (but not
# "host:5000/a@b"), or a lone token of a web address. A container of "abfss://it@account" stays.
IN_URI = re.compile(
    r"""(?<=://)(?:[^\s/?#:@"'<>]*:(?:[^\s/?#"'<>]*|(?!\d+[/?#])[^\s"'<>]*)@"""
    r"""|(?<=http://)[^\s/?#"'<>]+@|(?<=https://)[^\s/?#"'<>]+@)"""
)
_KINDS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*-----|[\s\S]*)",
    "a token of the Hugging Face hub": r"\bhf_[A-Za-z0-9]{16,}",
    "a token of Databricks": r"\bdapi[0-9a-f]{32}(?:-\d+)?\b",
    "an API key": r"(?<![\w-])sk-(?=[\w-]*\d)[\w-]*[A-Za-z0-9_]{16,}[\w-]*",
    "a token of GitHub": r"\b(?:gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,})",
    "an access key of AWS": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a token of Slack": r"\bxox[a-z]-[A-Za-z0-9-]{8,}",
    "a JSON web token": r"\beyJ[\w-]{6,}\.eyJ[\w-]{6,}\.[\w-]*",
    "a key within an address": r"(?<=[?&])(?:sig|key|api_?key|(?:\w+_)?token|password)=[^\s&#]+",
}
_TEXT = re.compile("|".join(f"({pattern})" for pattern in _KINDS.values()))


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret by common usage."""
    return _NAME.search(name) is not None


def secret_kind(text: str) -> str | None:
    """What of a secret ``text`` has in it (``a token of Databricks``), ``None`` for nothing."""
    if IN_URI.search(text):
        return "a password within an address"
    found = _TEXT.search(text)
    return list(_KINDS)[(found.lastindex or 1) - 1] if found else None


def hide(text: str) -> str:
    """``text`` with ``***`` for everything in it that looks like a secret by itself."""
    return _TEXT.sub("***", IN_URI.sub("***@", text))


def secrets_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Dotted path and kind of every secret in nested values. A key that is one is told by the path
    of its mapping."""
    if isinstance(value, str):
        if kind := secret_kind(value):
            yield ".".join(path), kind
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if kind := secret_kind(str(key)):
                yield ".".join(path), kind
            yield from secrets_in(item, (*path, hide(str(key))))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from secrets_in(item, (*path, str(number)))


def hidden(value: Any) -> Any:
    """A copy of nested values without their secrets, so that no message can show one."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {hide(key) if isinstance(key, str) else key: hidden(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(item) for item in value]
    return value
