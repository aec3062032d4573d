"""deepspan: an inference engine for DeepSeek-V4 Vision.

    from deepspan import LLM, SamplingParams

The public names are loaded on first use: importing the package does not import torch.
"""

from importlib import import_module
from typing import Any

from deepspan.version import __version__

_PUBLIC = {
    "LLM": "deepspan.llm",
    "AsyncLLM": "deepspan.async_llm",
    "EngineConfig": "deepspan.config.engine",
    "SamplingParams": "deepspan.core.sampling",
    "RequestOutput": "deepspan.core.output",
    "TokenEvent": "deepspan.core.output",
    "Grammar": "deepspan.core.grammar",
    "ToolCall": "deepspan.core.calls",
    "ChatOptions": "deepspan.text.switches",
    "Tool": "deepspan.text.tools",
    "ToolChoice": "deepspan.text.tools",
    "DeepspanError": "deepspan.errors",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatOptions",
    "DeepspanError",
    "EngineConfig",
    "Grammar",
    "RequestOutput",
    "SamplingParams",
    "TokenEvent",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'deepspan' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
