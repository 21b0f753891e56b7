"""The API that SGLang's clients speak: /generate, and what goes with it."""
