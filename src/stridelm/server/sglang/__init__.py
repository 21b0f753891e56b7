"""The API of SGLang's clients: /generate and the routes that go with it."""
