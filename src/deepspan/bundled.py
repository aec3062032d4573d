"""The checkpoint that comes with the package: deepspan-tiny, a trained DeepSeek-V4 Vision of a few megabytes.

Default of every command that takes a model.
"""

from pathlib import Path

from deepspan.errors import ConfigError

BUNDLED_MODEL = Path(__file__).parent / "assets" / "tiny"


def bundled_model() -> Path:
    """Folder of deepspan-tiny. Raises ConfigError if this installation lacks it."""
    if not (BUNDLED_MODEL / "config.json").is_file():
        raise ConfigError(f"deepspan-tiny is missing from this installation ({BUNDLED_MODEL}); give --model")
    return BUNDLED_MODEL
