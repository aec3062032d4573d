"""Options of drafting: what the command line makes of them, and how they are fitted to a checkpoint; no torch."""

from dataclasses import replace
from typing import Annotated

import pytest
import released
import typer
from typer.testing import CliRunner

from deepspan.cli.options import DraftOptions, takes_drafts
from deepspan.config.engine import MAX_DRAFTS, EngineConfig
from deepspan.config.model import parse_model_config
from deepspan.errors import ConfigError

MODEL = parse_model_config(released.flash_vision())


# --- options


def test_options_of_a_command_come_as_one_value():
    app, seen = typer.Typer(), []

    @app.command()
    @takes_drafts
    def act(name: str, count: Annotated[int, typer.Option()] = 3, *, drafts: DraftOptions) -> None:
        """Do it."""
        seen.append((name, count, drafts))

    assert CliRunner().invoke(app, ["a"]).exit_code == 0
    given = ["b", "--spec", "mtp", "--num-drafts", "2", "--draft-rule", "block", "--draft-sampling", "sampled"]
    assert CliRunner().invoke(app, [*given, "--count", "5"]).exit_code == 0
    wanted = DraftOptions(spec="mtp", num_drafts="2", draft_rule="block", draft_sampling="sampled")
    assert seen == [("a", 3, DraftOptions()), ("b", 5, wanted)]
    assert CliRunner().invoke(app, ["a", "--drafts", "x"]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"draft_method": "auto", "num_drafts": 0, "draft_depth": "auto"}),
        ({"spec": "dspark"}, {"draft_method": "dspark", "num_drafts": 0, "draft_depth": "auto"}),
        ({"num_drafts": "3"}, {"draft_method": "auto", "num_drafts": 3, "draft_depth": "fixed"}),
        ({"spec": "off"}, {"draft_method": "off", "num_drafts": 0}),
        ({"draft_rule": "block"}, {"draft_rule": "block"}),
        ({"draft_sampling": "sampled"}, {"draft_sampling": "sampled"}),
    ],
    ids=str,
)
def test_options_become_fields_of_the_engine(options, fields):
    found = EngineConfig(**DraftOptions(**options).engine_fields())
    assert replace(found, **fields) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "eagle"}, "--spec must be one of auto, off, dspark, mtp, found 'eagle'"),
        ({"num_drafts": "0"}, "--num-drafts must be auto or a number from 1 to 8, found '0'"),
        ({"num_drafts": "9"}, "--num-drafts must be auto or a number from 1 to 8, found '9'"),
        ({"num_drafts": "-1"}, "--num-drafts"),
        ({"num_drafts": "²"}, "--num-drafts"),
        ({"num_drafts": "many"}, "--num-drafts"),
        ({"spec": "off", "num_drafts": "2"}, "--num-drafts 2 and --spec off exclude each other"),
        ({"draft_rule": "fly"}, "--draft-rule must be one of standard, block, found 'fly'"),
        ({"draft_sampling": "hot"}, "--draft-sampling must be one of greedy, sampled, found 'hot'"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        DraftOptions(**options).engine_fields()


# --- fitted to a checkpoint


@pytest.mark.parametrize(
    ("fields", "stored", "method", "count"),
    [
        ({}, None, "off", 0),
        ({"draft_method": "auto"}, None, "off", 0),
        ({"draft_method": "auto"}, "dspark", "dspark", 5),
        ({"draft_method": "auto"}, "mtp", "mtp", 1),
        ({"draft_method": "auto", "num_drafts": 3}, "mtp", "mtp", 3),
        ({"draft_method": "dspark"}, "dspark", "dspark", 5),
        ({"draft_method": "dspark", "num_drafts": 7}, "dspark", "dspark", 7),
        ({"draft_method": "mtp"}, "mtp", "mtp", 1),
    ],
    ids=str,
)
def test_method_and_number_follow_from_what_is_stored(fields, stored, method, count):
    found = EngineConfig(**fields).with_drafts(MODEL, stored)
    assert (found.draft_method, found.num_drafts) == (method, count)


def test_number_without_stages_is_refused():
    with pytest.raises(ConfigError, match="num_drafts is 2, the checkpoint has no draft stages"):
        EngineConfig(draft_method="auto", num_drafts=2).with_drafts(MODEL, None)
    with pytest.raises(ConfigError, match="nothing would draft"):
        EngineConfig(num_drafts=2).with_drafts(MODEL, None)
    with pytest.raises(ConfigError, match=f"num_drafts may be {MAX_DRAFTS} at most, found {MAX_DRAFTS + 1}"):
        EngineConfig(draft_method="dspark", num_drafts=MAX_DRAFTS + 1)


def test_automatic_drafts_leave_room_for_the_largest_image_and_a_given_number_does_not():
    """387 of 600 tokens are an image's: 213 are left for 50 decodes, 4 each with 3 drafts."""
    tight = {"max_batched_tokens": 600, "max_num_seqs": 50}
    found = EngineConfig(draft_method="auto", **tight).with_drafts(MODEL, "dspark").checked(MODEL)
    assert found.num_drafts == 3
    with pytest.raises(ConfigError, match="with 5 drafts"):
        EngineConfig(draft_method="dspark", **tight).with_drafts(MODEL, "dspark").checked(MODEL)
