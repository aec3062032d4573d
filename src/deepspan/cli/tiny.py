"""`deepspan tiny`: write a tiny random checkpoint."""

from pathlib import Path
from tempfile import TemporaryDirectory

from deepspan.cli.progress import notes
from deepspan.errors import ConfigError
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.table import DraftKind
from deepspan.weights.tiny import write_tiny


def run(
    *,
    out: Path,
    layers: int,
    ratios: str,
    vision: bool,
    draft_stages: int,
    draft_kind: str,
    shards: int,
    seed: int,
    weights: str,
) -> None:
    """Raises ConfigError if the ratios cannot be read or served, if OUT holds something else or cannot be written."""
    if weights != "plain" and weights not in RECIPES:
        raise ConfigError(f"--weights must be one of plain, {', '.join(RECIPES)}, found {weights!r}")
    if draft_kind not in (kinds := [kind.value for kind in DraftKind]):
        raise ConfigError(f"--draft-kind must be one of {', '.join(kinds)}, found {draft_kind!r}")
    try:
        pattern = [int(part) for part in ratios.split(",")]
    except ValueError:
        raise ConfigError(f"--ratios must be integers separated by commas, found {ratios!r}") from None
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]) and not (out / "config.json").exists():
        raise ConfigError(f"{out} exists and is not a checkpoint folder; nothing was written")
    schedule = [pattern[layer % len(pattern)] for layer in range(layers)]
    try:
        with TemporaryDirectory() as scratch:
            plain = Path(scratch) / "plain" if weights in RECIPES else out
            write_tiny(
                plain,
                ratios=schedule,
                vision=vision,
                draft_stages=draft_stages,
                draft_kind=DraftKind(draft_kind),
                num_shards=shards,
                seed=seed,
            )
            if weights in RECIPES:
                write_quantised(plain, out, RECIPES[weights])
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    size = sum(file.stat().st_size for file in out.iterdir())
    notes.print(f"wrote {out}: ratios {schedule}, {size / 1e6:.1f} MB", markup=False)
