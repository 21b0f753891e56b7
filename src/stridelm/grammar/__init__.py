"""Grammars: which tokens may follow the tokens before them, by a schema, a regex, choices, EBNF or a structural tag."""
