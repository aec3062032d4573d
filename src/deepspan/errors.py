"""Errors that reach a user. Everything else that goes wrong is a bug and stays an assertion.

Invariant: the message names the thing at fault (a field, a tensor, an image) and what would have been right.
Raised everywhere; caught by `cli` (exit code 2) and, per request, by the engine.
"""


class DeepspanError(Exception):
    """Base of every error that a user can cause and can mend."""


class ConfigError(DeepspanError, ValueError):
    """A configuration file or option that cannot be served; the message names the field."""


class WeightsError(DeepspanError, ValueError):
    """A checkpoint whose tensors do not fit its configuration; the message names the tensors."""


class InputError(DeepspanError, ValueError):
    """A request that cannot be served right: it fails alone, other requests are not touched."""


class ImageError(InputError):
    """An image that cannot be decoded or is over a limit."""


class ContextError(InputError):
    """A prompt that leaves no room for an answer in the context."""


class OverloadedError(DeepspanError):
    """So many requests are waiting that another one would only wait too; try again later."""
