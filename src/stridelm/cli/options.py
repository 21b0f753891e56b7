"""Command-line options generated from the fields of a dataclass, so that no option is declared twice.

A field becomes `--kebab-case`, its help comes from `field(metadata={"help": ...})`, and an option that is not given
leaves the field at its default. By type:

    int, float, str         one value
    bool                    `--x` and `--no-x`
    Literal[...]            one of the values
    tuple[X, ...]           values separated by commas that are not inside [...]; an empty string is the empty tuple
    Sequence[int | float]   likewise
    Sequence[other]         the option repeated, so that a string may contain a comma
    Mapping[K, V]           the option repeated, each time KEY=VALUE
    X | None                as X; for numbers the word `none` means None
    int | Literal[...]      a number or one of the words
    X | Sequence[X]         as Sequence[X]
"""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

from stridelm.options import settings

T = TypeVar("T")
Parse = Callable[[str], Any]
COMMA = re.compile(r",(?![^\[]*\])")
"""A comma that is not inside [...]."""


def add_options(
    parser: argparse._ActionsContainer,
    cls: type,
    *,
    skip: Collection[str] = (),
    shown: Mapping[str, Any] | None = None,
) -> None:
    """Give `parser` an option for each field of the dataclass `cls`, except those named in `skip`.

    shown: the command's own defaults, to be shown in the help. The command applies them itself, since defaults from
    elsewhere may take precedence over them, though not over given options.
    """
    ours, known = shown or {}, settings(cls)
    unknown = {*skip, *ours} - known.keys()
    assert not unknown, f"{cls.__name__} has no field {', '.join(sorted(unknown))}"
    for name, setting in known.items():
        if name not in skip:
            # SUPPRESS: an option that was not given is absent, and the dataclass's own default applies.
            parser.add_argument(
                "--" + name.replace("_", "-"),
                dest=name,
                default=argparse.SUPPRESS,
                help=_help(setting.help, ours.get(name, setting.default)),
                **_settings(f"{cls.__name__}.{name}", setting.hint),
            )


def given_options(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that the command line set."""
    return {name: getattr(args, name) for name in settings(cls) if hasattr(args, name)}


def read_options(args: argparse.Namespace, cls: type[T], **extra: Any) -> T:
    """A `cls` made from the command line. `extra` fills fields without an option, and takes precedence."""
    return cls(**{**given_options(args, cls), **extra})


def _help(text: str, default: Any) -> str:
    """A setting's help and default, with `%` escaped because argparse formats the text."""
    if default not in (None, ()):
        text = f"{text} (default: {default})"
    return text.strip().replace("%", "%%")


def _settings(name: str, hint: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for an option with values of type `hint`."""
    hint, optional = _without_none(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Mapping:
        return {"action": _GatherPairs, "type": _pair(name, *inner), "metavar": "KEY=VALUE"}
    if origin is Sequence and not _is_number(inner[0]):
        return {"action": _Gather, "type": _parser(name, inner[0]), "metavar": _metavar(inner[0])}
    parse = _parser(name, hint)
    return {"type": _or_none(parse) if optional and _is_number(hint) else parse, "metavar": _metavar(hint)}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True), `X | Sequence[X]` as Sequence[X]."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    optional = len(members) < len(typing.get_args(hint))
    if len(members) > 1 and typing.get_origin(members[1]) is Literal:
        return typing.Union[tuple(members)], optional  # noqa: UP007
    if len(members) > 1:
        members = [m for m in members if typing.get_origin(m) is Sequence and typing.get_args(m)[0] in members]
    assert len(members) == 1, f"cannot make an option from {hint}"
    return members[0], optional


def _is_number(hint: Any) -> bool:
    return hint in (int, float)


def _parser(name: str, hint: Any) -> Parse:
    """A function from a command-line word to a value of type `hint`. argparse reports its ValueError."""
    if hint in (int, float, str):
        return typing.cast(Parse, hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _choice(inner)
    if origin is typing.Union:
        return _number_or(*(_parser(name, each) for each in inner))
    assert origin in (tuple, Sequence), f"{name}: cannot make an option from {hint}; skip it"
    assert origin is Sequence or inner[1:] == (...,), f"{name}: a tuple needs the form tuple[X, ...]"
    return _listed(_parser(name, inner[0]), _metavar(inner[0]))


def _choice(values: tuple[Any, ...]) -> Parse:
    by_word = {str(value): value for value in values}

    def parse(word: str) -> Any:
        if word not in by_word:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of: {', '.join(by_word)}")
        return by_word[word]

    return parse


def _number_or(number: Parse, word: Parse) -> Parse:
    def parse(text: str) -> Any:
        try:
            return number(text)
        except ValueError:
            return word(text)

    return parse


def _listed(parse_one: Parse, noun: str) -> Parse:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(parse_one(word.strip()) for word in COMMA.split(text)) if text else ()
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {noun} values separated by commas") from error

    return parse


def _pair(name: str, key_hint: Any, value_hint: Any) -> Parse:
    parse_key, parse_value = _parser(name, key_hint), _parser(name, value_hint)

    def parse(text: str) -> tuple[Any, Any]:
        key, equals, value = text.partition("=")
        try:
            if equals:
                return parse_key(key), parse_value(value)
        except ValueError:
            pass
        form = f"{_metavar(key_hint)}={_metavar(value_hint)}"
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form {form}")

    return parse


def _or_none(parse_one: Parse) -> Parse:
    def parse(word: str) -> Any:
        return None if word.lower() == "none" else parse_one(word)

    parse.__name__ = getattr(parse_one, "__name__", "value")
    return parse


def _metavar(hint: Any) -> str:
    """The name of a value of type `hint` in the help."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "{" + ",".join(str(value) for value in inner) + "}"
    if origin in (tuple, Sequence):
        return f"{_metavar(inner[0])},..."
    return {int: "INT", float: "FLOAT", str: "TEXT"}.get(hint, "VALUE")


class _Gather(argparse.Action):
    """A repeated option whose values become a tuple."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), values))


class _GatherPairs(argparse.Action):
    """A repeated option whose values, pairs, become a dict; a repeated key keeps its last value."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), values[0]: values[1]})
