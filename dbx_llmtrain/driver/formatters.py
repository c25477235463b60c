"""The user's own function over rows: found, named by its content, pickled by value.

The name is made of everything that the function does: its code, defaults, closure, and the globals
it uses, functions of the user's own modules included. What cannot be named is refused: a random
name would prepare the data again in every run, and a name that misses something would take rows
that the function no longer gives.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

from dbx_llmtrain.errors import ConfigError, Problem

Formatter = Callable[[dict[str, Any]], Any]

_PATH = "data.formatter"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.ClassMethodDescriptorType,
)
_TOLD = (PurePath, range, re.Pattern, logging.Logger, type(...))
_TOLD_BY_REPR = ("datetime", "decimal", "fractions", "dataclasses")


def choose(name: str | None, given: Formatter | None) -> Formatter | None:
    """The function that was passed, else the one that the configuration names, if any."""
    if given is not None:
        return check(given)
    return load(name) if name else None


def load(name: str) -> Formatter:
    """The function ``module:function``. Raises ``ConfigError`` where there is none."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise _refuse(
            f"{name} cannot be imported on the driver ({type(error).__name__}: {error}): expected "
            "module:function of a module that is on sys.path"
        ) from error
    return check(found)


def check(function: Any) -> Formatter:
    """``function`` itself. Raises ``ConfigError`` for what cannot be called with a row."""
    if not callable(function):
        raise _refuse(f"expected a function of one row, found {type(function).__name__}")
    try:
        inspect.signature(function).bind({})
    except TypeError as error:
        raise _refuse(f"expected a function of one argument, a row as a dict: {error}") from error
    except ValueError:
        pass  # a builtin without a signature
    return function  # type: ignore[no-any-return]


def pickled(function: Formatter) -> bytes:
    """The function as bytes that a worker can load, whose modules of the user it does not have."""
    from pyspark import cloudpickle

    with ExitStack() as stack:
        for module in _own_modules(function):
            stack.enter_context(_by_value(cloudpickle, module))
        try:
            return bytes(cloudpickle.dumps(function))
        except Exception as error:
            # Whatever an object's own __reduce__ raises.
            raise _refuse(
                f"{_name(function)} cannot be sent to the workers ({type(error).__name__}: "
                f"{error}): let it use plain values only"
            ) from error


@contextmanager
def _by_value(cloudpickle: Any, module: types.ModuleType) -> Iterator[None]:
    known = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if not known:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not known:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules(function: Formatter) -> list[types.ModuleType]:
    """The user's modules that hold code which the function uses."""
    key = _Key()
    key.add(function)
    names = {name for name in key.modules if name != "__main__" and name in sys.modules}
    return [sys.modules[name] for name in sorted(names)]


def key(function: Formatter) -> str:
    """Name of what the function does: SHA-256 over its code and every value it uses.

    Raises ``ConfigError`` for a value that cannot be named, with the place of it.
    """
    found = _Key()
    found.add(function)
    return found.digest.hexdigest()


class _Key:
    """Walks a function and what it uses, feeding a hash. ``where`` says in what it is."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
        self.modules: set[str] = set()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is only unique while its object lives

    def add(self, value: Any, where: str = "the function") -> None:
        if isinstance(value, _PLAIN):
            self._feed(type(value).__name__, repr(value))
        elif isinstance(value, tuple | set | frozenset | types.CodeType):
            # Python may or may not keep equal constants as one object: they are told by value.
            self._add_object(value, where)
        elif id(value) in self._seen:
            self._feed("seen", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._add_object(value, where)

    def _feed(self, *parts: str) -> None:
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            self.digest.update(f"{len(data)}:".encode() + data)

    def _add_object(self, value: Any, where: str) -> None:
        if isinstance(value, list | tuple | set | frozenset | dict):
            self._container(value, where)
        elif isinstance(value, types.CodeType):
            self._code(value, where)
        elif isinstance(value, types.ModuleType):
            self._module(value, where)
        elif isinstance(value, partial):
            self._feed("partial")
            self.add((value.func, value.args, value.keywords), where)
        elif isinstance(value, types.MethodType):
            self._feed("method")
            self.add((value.__func__, value.__self__), where)
        elif isinstance(value, types.FunctionType | type):
            self._definition(value, where)
        elif isinstance(value, staticmethod | classmethod | property):
            self._feed(type(value).__name__)
            inner = value.fget if isinstance(value, property) else value.__func__
            self.add(inner, where)
        elif isinstance(value, _BUILTIN):
            self._feed("builtin", value.__qualname__)
        elif hasattr(value, "__wrapped__"):
            self._feed(type(value).__name__)
            self.add(value.__wrapped__, where)
        else:
            self._instance(value, where)

    def _container(self, value: Any, where: str) -> None:
        self._feed(type(value).__name__, str(len(value)))
        if isinstance(value, dict):
            for name, item in value.items():
                self.add(name, where)
                self.add(item, f"{where}[{name!r}]")
            return
        ordered = isinstance(value, list | tuple)
        for item in value if ordered else sorted(value, key=repr):
            self.add(item, where)

    def _module(self, module: types.ModuleType, where: str) -> None:
        """A module: by version where it was installed, else by its file and those it imports."""
        self._feed("module", module.__name__)
        if _is_installed(module.__name__):
            self._feed(_version(module.__name__))
            return
        try:
            source = inspect.getsource(module)
        except (OSError, TypeError) as error:
            raise self._unknown(module, f"{where} (module {module.__name__})") from error
        self.modules.add(module.__name__)
        self._feed(source)
        for name, value in sorted(vars(module).items()):
            other = value.__name__ if isinstance(value, types.ModuleType) else None
            if isinstance(value, types.FunctionType | type):
                other = str(value.__module__)
            if other and other != module.__name__ and not _is_installed(other):
                self.add(value, f"{where}, {module.__name__}.{name}")

    def _definition(self, value: Any, where: str) -> None:
        """A function or a class: by name and version where it was installed, else by content."""
        module = str(value.__module__)
        self._feed(type(value).__name__, value.__qualname__)
        if _is_installed(module):
            self._feed(module, _version(module))
            return
        self.modules.add(module)
        if isinstance(value, type):
            for base in value.__bases__:
                self.add(base, where)
            for name, item in sorted(vars(value).items()):
                if callable(item) or not name.startswith("__"):
                    self._feed(name)
                    self.add(item, f"{where}, {value.__qualname__}.{name}")
            return
        self._code(value.__code__, where)
        self.add((value.__defaults__, value.__kwdefaults__), f"{where}, a default")
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, cell in cells:
            self._feed(name)
            if not _is_empty(cell):
                self.add(cell.cell_contents, f"{where}, variable {name!r} of its closure")
        for name in sorted(_names(value.__code__)):
            if name in value.__globals__:
                self._feed(name)
                self.add(value.__globals__[name], f"{where}, global {name!r}")

    def _code(self, code: types.CodeType, where: str) -> None:
        self._feed("code", code.co_code.hex(), str(code.co_argcount), str(code.co_flags))
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._feed(*names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, where)
            else:
                self.add(constant, where)

    def _instance(self, value: Any, where: str) -> None:
        """An object with a state that can be read: its class and its attributes."""
        cls = type(value)
        if cls.__module__ in _TOLD_BY_REPR or isinstance(value, _TOLD):
            self._feed(cls.__qualname__, repr(value))
        elif _is_installed(cls.__module__):
            raise self._unknown(value, where)
        else:
            self.add(cls, where)
            self.add(getattr(value, "__dict__", {}), where)
            for name in getattr(cls, "__slots__", ()):
                self.add(getattr(value, name, None), f"{where}, {name}")

    def _unknown(self, value: Any, where: str) -> ConfigError:
        return _refuse(
            f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, by which the "
            "prepared data cannot be named (so that a change of it would not be noticed): use "
            "plain values, such as text, numbers, lists and dicts, and make objects inside the "
            "function"
        )


def _is_empty(cell: types.CellType) -> bool:
    """Whether a variable of a closure has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes that code uses, that of inner functions included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_installed(module: str) -> bool:
    """Whether a module is of Python itself or of an installed package, not the user's own."""
    if module == "__main__":
        return False
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        return False
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return any(Path(file).is_relative_to(place) for place in places if place)


def _version(module: str) -> str:
    """Version of the package that a module is of; of Python for its own modules."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return sys.version.split()[0]
    for package in metadata.packages_distributions().get(top, ()):
        return metadata.version(package)
    return str(getattr(sys.modules.get(top), "__version__", ""))


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem(_PATH, message)])
