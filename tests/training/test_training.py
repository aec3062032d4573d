"""Training code: the same network as served, the right targets, an optimiser step, a checkpoint that loads."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepspan.config.model import load_model_config
from deepspan.ops.registry import reference_ops
from deepspan.runtime.batch_builder import SequenceInput, build_batch
from deepspan.skills.suite import SKILLS, TRAIN_SEED, sample
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.load import load_model
from training import recipe
from training.curriculum import CURRICULUM, Stage, chosen_stages, stage_at
from training.data import encode_example, examples
from training.exercises import EXERCISES
from training.export import export
from training.ops import Recorder, training_ops
from training.optim import orthogonalise
from training.ranks import Ranks, launch
from training.train import AVERAGE_EVERY, Schedule, Trainer, prepare, save_start

STAGES = (
    Stage(name="learn", steps=2, skills={"adding": 1.0}),
    Stage(name="choose", steps=2, skills={"adding": 1.0}, dense=False),
)
SMALL = {"head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 16, "index_topk": 4, "sliding_window": 16}


@pytest.fixture
def small_recipe(monkeypatch):
    """The recipe with small heads, so that a step takes a fraction of a second."""
    monkeypatch.setattr(recipe, "SIZES", recipe.SIZES | SMALL)


@pytest.fixture
def trainer(small_recipe, tmp_path):
    prepare(tmp_path)
    return Trainer(tmp_path, Schedule(bf16=False), compiled=False, stages=STAGES)


def _logits(network, config, token_ids):
    sequence = SequenceInput(
        token_ids=token_ids,
        kinds=np.full(len(token_ids), -1, dtype=np.int8),
        spans=(),
        features=None,
        wanted=range(len(token_ids)),
    )
    return network(build_batch([sequence, sequence], config, "cpu", query_block=len(token_ids))).logits


def test_training_ops_choosing_entries_equal_reference_ops(small_recipe):
    config = recipe.model_config(600)
    recorder = Recorder(dense=False)
    trained = recipe.new_network(config, training_ops(recorder, compiled=False), seed=3)
    served = recipe.new_network(config, reference_ops(), seed=3)
    token_ids = np.random.default_rng(0).integers(3, 600, 150)
    with torch.no_grad():
        assert torch.allclose(_logits(trained, config, token_ids), _logits(served, config, token_ids), atol=2e-5)
    assert len(recorder.index_losses) == 2 * sum(ratio == 4 for ratio in recipe.RATIOS)
    assert all(torch.isfinite(loss) for loss in recorder.index_losses)


def test_targets_of_conversation_spell_the_answers(trainer, tmp_path):
    config, tokenizer = load_model_config(tmp_path), Tokenizer(tmp_path, vision=True)
    item = sample(TRAIN_SEED, 3, "scene")
    example = encode_example(item, config, tokenizer)
    for turn, expected in enumerate(item.turns):
        answer = example.targets[example.turns == turn].tolist()
        assert answer[-1] == tokenizer.special.eos
        assert tokenizer.decode(answer) == expected.answer
    assert example.labels[0].shape == (9, len(example.images[0].block.encoder_rows))


def test_tokenizer_of_recipe_keeps_characters_apart(trainer, tmp_path):
    tokenizer = Tokenizer(tmp_path, vision=True)
    assert len(tokenizer.encode_raw("KY84")) == 4
    assert len(tokenizer.encode_raw("What colour is the star?")) < 12


def test_orthogonalise_of_any_shape_brings_singular_values_near_one():
    for shape in ((2, 8, 32), (2, 32, 8), (1, 16, 16)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalise(matrices))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_trainer_stopped_and_resumed_goes_on_as_if_never_stopped(trainer, tmp_path):
    batches = examples(tmp_path, 0, {"adding": 1.0}, 200)
    first, second = next(batches)[1], next(batches)[1]
    trainer.train_step(first)
    trainer.save()
    trainer.train_step(second)
    resumed = Trainer(tmp_path, trainer.schedule, compiled=False, stages=STAGES)
    resumed.resume()
    assert resumed.step == 1
    resumed.train_step(second)
    for (name, value), again in zip(trainer.network.named_parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(value, again), name


def test_export_of_a_run_is_a_checkpoint_that_loads(trainer, tmp_path):
    trainer.save()
    export(tmp_path, tmp_path / "out")
    loaded = load_model(tmp_path / "out", dtype=torch.float32)
    kept = dict(trainer.network.named_parameters())
    for name, value in loaded.network.named_parameters():
        assert torch.allclose(value, kept[name].detach(), rtol=1e-2, atol=1e-6), name


def _average_of_two(ranks: Ranks, folder):
    used, shared, unused = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    shared.grad = torch.full((2,), float(ranks.rank))
    if ranks.rank == 0:
        used.grad = torch.ones(2)
    ranks.average_gradients([used, shared, unused])
    loads = ranks.add_up([torch.tensor([ranks.rank + 1])])
    assert ranks.agree(ranks.rank == 0)
    torch.save((used.grad, shared.grad, unused.grad, loads), folder / f"{ranks.rank}.pt")


def test_ranks_average_gradients_and_leave_unused_parameters_alone(tmp_path):
    launch(2, _average_of_two, tmp_path)
    for rank in range(2):
        used, shared, unused, loads = torch.load(tmp_path / f"{rank}.pt")
        assert used.tolist() == [0.5, 0.5]
        assert shared.tolist() == [0.5, 0.5]
        assert unused is None
        assert loads[0].tolist() == [3]


def test_start_joined_from_two_runs_takes_each_side_from_its_run(trainer, tmp_path):
    seen, read = trainer.state(), Trainer(tmp_path, Schedule(seed=7), compiled=False).state()
    save_start({"vision": seen, "text": read}, tmp_path / "start.safetensors")
    begun = Trainer(tmp_path, Schedule(seed=9), compiled=False)
    begun.start_from(tmp_path / "start.safetensors")
    for name, value in begun.network.state_dict().items():
        source = seen if name.startswith(("vision.", "aligner.")) else read
        wanted = source["network"][name].float()
        if name.endswith("ffn.gate.weight"):  # routers start without what tells the two halves of the experts apart
            assert torch.allclose(value[recipe.TEXT_EXPERTS].mean(0), value[:4].mean(0), atol=1e-6), name
            mine, wanted = (half - half.mean(0) for half in (value[recipe.TEXT_EXPERTS], wanted[recipe.TEXT_EXPERTS]))
            assert torch.allclose(mine, wanted, atol=1e-2), name
        else:
            assert torch.allclose(value.float(), wanted, rtol=1e-2), name


def test_stages_are_passed_in_order_and_the_last_one_stays():
    names = [stage_at(STAGES, step).name for step in range(6)]
    assert names == ["learn"] * 2 + ["choose"] * 4


def test_stages_of_the_curriculum_draw_known_exercises_and_end_as_served():
    assert {name for stage in CURRICULUM for name in stage.skills} <= set(SKILLS) | set(EXERCISES)
    assert not CURRICULUM[-1].dense
    assert [stage.name for stage in CURRICULUM if not stage.network] == ["see"]


def test_chosen_stages_have_other_lengths_and_mixes():
    stages = chosen_stages("place=7,choose=3", {"adding": 1.0})
    assert [(stage.name, stage.steps, dict(stage.skills)) for stage in stages] == [
        ("place", 7, {"adding": 1.0}),
        ("choose", 3, {"adding": 1.0}),
    ]
    with pytest.raises(ValueError, match="no stage 'sea'"):
        chosen_stages("sea=1", None)


@pytest.mark.parametrize(("network", "tower"), [(False, True), (True, False), (True, True)])
def test_stage_moves_what_it_trains_and_nothing_else(small_recipe, tmp_path, network, tower):
    prepare(tmp_path)
    stage = Stage(name="x", steps=5, skills={"colour": 1.0}, network=network, tower=tower)
    trainer = Trainer(tmp_path, Schedule(bf16=False), compiled=False, stages=(stage,))
    before = {name: value.clone() for name, value in trainer.network.named_parameters()}
    trainer.train_step(next(examples(tmp_path, 0, dict(stage.skills), 300))[1])
    moved = {name for name, value in trainer.network.named_parameters() if not torch.equal(value, before[name])}
    assert any(name.startswith("vision.") for name in moved) is tower
    assert any(name.startswith("layers.") and "gate.bias" not in name for name in moved) is network


@pytest.mark.parametrize("name", EXERCISES)
def test_exercises_have_questions_with_answers(name):
    for seed in range(20):
        drawn = EXERCISES[name](np.random.default_rng(seed))
        assert all(turn.question and turn.answer for turn in drawn.turns)


def test_listing_names_each_shape_once_from_left_to_right():
    for seed in range(20):
        drawn = EXERCISES["listing"](np.random.default_rng(seed))
        shapes = sorted(drawn.images[0].shapes, key=lambda shape: shape.box[0] + shape.box[2])
        found = {turn.question: turn.answer for turn in drawn.turns}
        for question, words in (
            ("List the colours.", "{0.colour} {0.kind}"),
            ("List the shapes.", "{0.kind} {0.colour}"),
        ):
            if question in found:
                assert found[question] == ", ".join(words.format(shape) for shape in shapes)


def test_average_of_weights_follows_them_and_is_what_is_exported(trainer, tmp_path):
    batch = next(examples(tmp_path, 0, {"adding": 1.0}, 200))[1]
    trainer.train_step(batch)
    trainer._update_average()
    first = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    trainer.train_step(batch)
    trainer._update_average()
    name = "head.weight"
    share = AVERAGE_EVERY / trainer.schedule.average_steps
    wanted = first[name] + share * (trainer.network.state_dict()[name] - first[name])
    assert torch.allclose(trainer.average[name], wanted, atol=1e-7)
    trainer.save()
    export(tmp_path, tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(loaded[name].float(), wanted.to(loaded[name].dtype).float())


def test_rate_without_a_fall_stays_at_its_peak():
    assert [Schedule(decay_share=0).rate(step, 400) for step in (99, 399, 400)] == [1.0, 1.0, 1.0]
    assert [Schedule(decay_share=0.5).rate(step, 400) for step in (200, 300, 400)] == [1.0, 0.5, 0.0]
