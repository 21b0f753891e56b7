"""For the API reference: reads docstrings where this project writes them (an extension of griffe, see mkdocs.yml).

A field of a config is `name: type = option(default, "help")`, with bounds behind them for some: its default is the
first argument and its documentation the second, as on the command line. A class may document fields in lines of its
docstring, "name: text", with further lines indented: these become a list.
"""

from __future__ import annotations

import ast
import re
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
        # Literals that stand side by side are one string, in brackets or not.
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
        if first and not listed[:first].endswith("\n\n"):  # a list begins after an empty line
            listed = f"{listed[:first]}\n{listed[first:]}"
        cls.docstring.value = listed
