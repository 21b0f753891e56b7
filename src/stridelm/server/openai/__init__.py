"""OpenAI's HTTP API, with vLLM's extra parameters: https://platform.openai.com/docs/api-reference."""
