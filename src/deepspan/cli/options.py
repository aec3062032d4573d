"""Options that several commands share, and what they mean to the engine.

Invariant: a group of options is written once, here; a command that takes the group gets it as one value. No torch.
Used by `cli.main`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from deepspan.config.engine import DRAFT_RULES, DRAFT_SAMPLINGS, MAX_DRAFTS
from deepspan.errors import ConfigError

AUTO = "auto"
SPECS = (AUTO, "off", "dspark", "mtp")
_PANEL = "Guessing ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How tokens are guessed ahead. The defaults never cost much: see docs/architecture.md."""

    spec: Annotated[
        str,
        typer.Option(
            help="Guess tokens ahead with the checkpoint's draft stages: auto (if it has any), off, dspark or mtp.",
            rich_help_panel=_PANEL,
        ),
    ] = AUTO
    num_drafts: Annotated[
        str,
        typer.Option(
            help=f"Tokens to guess at each step: 1 to {MAX_DRAFTS}, or auto: as many as pay, down to none.",
            rich_help_panel=_PANEL,
        ),
    ] = AUTO
    draft_rule: Annotated[
        str,
        typer.Option(
            help="How guesses of sampled answers are judged: standard, or block (takes more).", rich_help_panel=_PANEL
        ),
    ] = "standard"
    draft_sampling: Annotated[
        str,
        typer.Option(
            help="What sampled answers guess: greedy (the likeliest token), or sampled at their temperature.",
            rich_help_panel=_PANEL,
        ),
    ] = "greedy"

    def engine_fields(self) -> dict[str, Any]:
        """Fields of `EngineConfig`. Raises ConfigError naming the option; what the checkpoint has is asked later."""
        _check("--spec", self.spec, SPECS)
        _check("--draft-rule", self.draft_rule, DRAFT_RULES)
        _check("--draft-sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        count = 0 if self.num_drafts == AUTO else _count(self.num_drafts)
        if count and self.spec == "off":
            raise ConfigError(f"--num-drafts {count} and --spec off exclude each other: nothing would guess")
        return {
            "draft_method": self.spec,
            "num_drafts": count,
            "draft_rule": self.draft_rule,
            "draft_sampling": self.draft_sampling,
            "draft_depth": "fixed" if count else AUTO,
        }


def takes_drafts(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `DraftOptions` in the place of its parameter `drafts`."""
    hints = get_type_hints(DraftOptions, include_extras=True)
    names = [field.name for field in fields(DraftOptions)]
    own = [one for one in inspect.signature(command).parameters.values() if one.name != "drafts"]
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(DraftOptions)
    ]

    @wraps(command)
    def with_options(**given: Any) -> None:
        drafts = DraftOptions(**{name: given.pop(name) for name in names})
        command(**given, drafts=drafts)

    # What the option parser reads: it asks both.
    with_options.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in (*own, *shared)}
    return with_options


def _check(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} must be one of {', '.join(choices)}, found {value!r}")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MAX_DRAFTS:
        raise ConfigError(f"--num-drafts must be auto or a number from 1 to {MAX_DRAFTS}, found {text!r}")
    return int(text)
