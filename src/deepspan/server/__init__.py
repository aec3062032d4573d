"""The HTTP server: OpenAI- and Anthropic-compatible API over the engine."""
