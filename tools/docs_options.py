"""For the API reference: makes griffe find this project's field documentation (an extension, see mkdocs.yml).

A field of a config is `name: type = option(default, "help")`, for some followed by bounds: its default is the first
argument and its documentation the second, as on the command line. A class may document fields in lines of its
docstring, "name: text", with continuation lines indented: these become a list.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any

from griffe import Attribute, Class, Docstring, ExprCall, Extension

FIELDS = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


class Options(Extension):
    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        value = attr.value
        if not isinstance(value, ExprCall) or str(value.function) != "option":
            return
        default, text, *_ = value.arguments
        attr.value = default
        with suppress(ValueError):  # a text made of others, which no field in the reference has
            # Adjacent string literals are one string, with or without brackets.
            attr.docstring = Docstring(ast.literal_eval(f"({text})"), parent=attr)

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        if cls.docstring is None:
            return
        members = cls.members

        def item(found: re.Match[str]) -> str:
            names = found[1].split(", ")
            if not all(name in members for name in names):
                return found[0]
            return f"- {', '.join(f'`{name}`' for name in names)}: "

        text = cls.docstring.value
        listed = FIELDS.sub(item, text)
        if listed == text:
            return
        first = listed.index("- `")
        if first and not listed[:first].endswith("\n\n"):  # a list needs an empty line before it
            listed = f"{listed[:first]}\n{listed[first:]}"
        cls.docstring.value = listed
