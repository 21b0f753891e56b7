"""Options defined by drafters and acceptance rules: fields of a small dataclass, declared once.

Such a dataclass is registered together with the drafter or rule that reads it. The fields of all those registered
become the keyword arguments of Speculation, EngineConfig and `LLM`, the parameters of an HTTP request, and the options
of the command line, with their help and their checks. An option that is deleted or not registered ceases to exist.

This module does not know what is registered, and listing the options does not import torch unless the modules that
define them do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache, lru_cache, wraps
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from stridelm.registry import Registry
from stridelm.values import check_flag, number, shortened

RULES, DRAFTERS = "stridelm.verify:RULES", "stridelm.draft:DRAFTERS"
"""The registries, imported when an option is first looked for."""
Given = tuple[tuple[str, Any], ...]
"""Options as stored: (name, plain hashable value) pairs, sorted by name, without those left unset."""
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Base of all option dataclasses, and the one for entries without options.

    A field is `name: type = option(default, help)`, with its bounds if it is a number. Types are int, float, bool,
    str and Literal; for any other, `parse` turns the given value, possibly text, into a hashable one. An inherited
    field is still one option, and no two fields may have the same name.
    """

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(field.name for field in fields(cls))


OptionsT = TypeVar("OptionsT", bound=Options)


class OptionRegistry(Registry[T]):
    """A registry whose entries may have options."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._options: Registry[type[Options]] = Registry(kind)

    def add(self, name: str, target: str | T, options: str | type[Options] = Options) -> None:
        """options: the entry's option dataclass, or a lazy "package.module:attribute" in a module that imports no
        torch."""
        super().add(name, target)
        self._options.add(name, options)
        known.cache_clear()

    def remove(self, name: str) -> None:
        super().remove(name)
        self._options.remove(name)
        known.cache_clear()

    def options(self, name: str) -> type[Options]:
        """The option dataclass of the entry called `name`. Raises ValueError naming the known entries."""
        return self._options.get(name)


@dataclass(frozen=True)
class Setting:
    """A name that can be set, with what the command line needs to know about it."""

    name: str
    hint: Any
    default: Any
    help: str


@dataclass(frozen=True)
class Option:
    """One option that a drafter or rule registered."""

    field: Field[Any]
    hint: Any
    home: str
    """The registry that it comes from."""

    @property
    def setting(self) -> Setting:
        """The default is None, meaning that the drafter or rule applies its own; the help shows that one."""
        text, default = str(self.field.metadata["help"]), self.field.default
        shown = text if default is None else f"{text} ({default:g})" if _is_number(self.hint) else f"{text} ({default})"
        return Setting(self.field.name, str if self.field.metadata["parse"] else self.hint | None, None, shown)

    def plain(self, value: Any) -> Any:
        """The value, checked. Raises ValueError for an invalid one."""
        name, metadata = self.field.name, self.field.metadata
        if metadata["parse"]:
            return metadata["parse"](value)
        if _is_number(self.hint):
            return number(name, value, **metadata["limits"], whole=self.hint is int)
        if self.hint is bool:
            check_flag(name, value)
        elif self.hint is str and not isinstance(value, str):
            raise ValueError(f"{name} must be text; got {shortened(value)}")
        elif self.hint is not str and value not in get_args(self.hint):
            raise ValueError(f"{name} must be {' or '.join(get_args(self.hint))}; got {shortened(value)}")
        return value


def _is_number(hint: Any) -> bool:
    return hint in (int, float)


def _is_plain(hint: Any) -> bool:
    return hint in (int, float, bool, str) or get_origin(hint) is Literal


@cache
def known() -> Mapping[str, Option]:
    """Every option that a registered drafter or rule reads, by name."""
    found: dict[str, Option] = {}
    for home in (RULES, DRAFTERS):
        module, _, attribute = home.partition(":")
        registry: OptionRegistry[Any] = getattr(importlib.import_module(module), attribute)
        for name in sorted(registry, key=registry.place):
            for option in _options_of(registry.options(name), home):
                same = found.setdefault(option.field.name, option)
                assert same.field is option.field, f"two options are called {option.field.name}; rename one of them"
    return found


def _options_of(cls: type[Options], home: str) -> Iterable[Option]:
    for field in fields(cls):
        hint = get_type_hints(cls)[field.name]
        if type(None) in get_args(hint):
            members = [member for member in get_args(hint) if member is not type(None)]
            hint = members[0] if len(members) == 1 else hint
        assert "parse" in field.metadata, f"{cls.__name__}.{field.name}: declare it with option(...)"
        assert field.metadata["parse"] or _is_plain(hint), f"{cls.__name__}.{field.name}: give it a parse"
        yield Option(field, hint, home)


def is_of_rules(name: str) -> bool:
    """Whether the option belongs to an acceptance rule."""
    return name in known() and known()[name].home == RULES


@lru_cache(maxsize=1024)  # a request's options are read at every step
def read(cls: type[OptionsT], given: Given) -> OptionsT:
    """This dataclass, filled from the options in `given` that belong to it, the rest at their defaults."""
    names = cls.names()
    return cls(**{name: value for name, value in given if name in names})


def takes_options(cls: type[T]) -> type[T]:
    """Let a dataclass with a field `options: Given` take each option as a keyword argument and expose it as an
    attribute, None if it is unset."""
    make: Callable[..., None] = cls.__init__
    own = {field.name for field in fields(cls)}  # type: ignore[arg-type]

    @wraps(make)
    def init(self: T, *args: Any, options: Mapping[str, Any] | Given = (), **given: Any) -> None:
        chosen = {**dict(options), **{name: given.pop(name) for name in list(given) if name not in own}}
        unknown = sorted(chosen.keys() - known().keys())
        if unknown:
            raise TypeError(f"{cls.__name__} takes no {', '.join(unknown)}; known: {', '.join(sorted(settings(cls)))}")
        plain = ((name, known()[name].plain(value)) for name, value in chosen.items() if value is not None)
        make(self, *args, **given, options=tuple(sorted(plain)))

    def get(self: T, name: str) -> Any:
        if name.startswith("_") or name not in known():
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
        return dict(self.options).get(name)  # type: ignore[attr-defined]

    cls.__init__, cls.__getattr__ = init, get  # type: ignore[assignment, method-assign, attr-defined]
    return cls


def settings(cls: type) -> dict[str, Setting]:
    """The names that a dataclass accepts, in the order of its fields, with the single options in place of `options`."""
    found: dict[str, Setting] = {}
    hints = get_type_hints(cls)
    for field in fields(cls):
        if hints[field.name] == Given:
            clash = known().keys() & hints.keys()
            assert not clash, f"{', '.join(clash)}: {cls.__name__} has a field of that name; rename the option"
            found |= {name: option.setting for name, option in known().items()}
        elif field.init:
            default = None if field.default is MISSING else field.default
            found[field.name] = Setting(field.name, hints[field.name], default, str(field.metadata.get("help", "")))
    return found


def flat(owner: Any) -> dict[str, Any]:
    """The current value of every name that `settings` lists."""
    return {name: getattr(owner, name) for name in settings(type(owner))}
