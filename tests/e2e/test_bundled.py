"""deepspan-tiny, the checkpoint that comes with the package: it sees, it is small, and the server answers with it."""

import json
from pathlib import Path

import anthropic
import openai
import pytest
from server_helpers import data_url, serving

from deepspan import LLM, SamplingParams
from deepspan.bundled import BUNDLED_MODEL, bundled_model
from deepspan.config.model import load_model_config
from deepspan.evaluate import evaluate
from deepspan.server.params import SamplingDefaults
from deepspan.skills.pictures import draw
from deepspan.skills.suite import EVAL_SEED, sample

# Right answers of 20 each that are asked for here: well below what the model card states, so that another build of a
# kernel may round a doubtful answer differently, and far above guessing.
LEAST = {"colour": 16, "shape": 16, "reading": 11, "position": 12, "lookup": 15, "adding": 14, "repeat": 15}
DEMO = Path(__file__).parents[2] / "docs" / "images" / "demo.png"


@pytest.fixture(scope="module")
def tiny():
    return LLM(bundled_model(), device="cpu")


def test_tiny_is_small_and_of_the_released_shape():
    assert sum(file.stat().st_size for file in BUNDLED_MODEL.iterdir()) <= 16 * 2**20
    config = load_model_config(BUNDLED_MODEL)
    heads = (config.head_dim, config.qk_rope_head_dim, config.index_head_dim)
    assert (heads, config.sliding_window) == ((512, 64, 128), 128)
    assert set(config.ratios_in_use()) == {4, 128}
    assert config.num_hash_layers > 0
    vision = config.vision
    assert (vision.patch_size, vision.downsample_ratio, vision.max_n_token, vision.min_pixels) == (14, 3, 384, 147456)
    assert SamplingDefaults.of_checkpoint(BUNDLED_MODEL).temperature == 0


def test_tiny_answers_held_out_questions(tiny):
    scores = evaluate(tiny, 20, skills=tuple(LEAST))
    found = {score.skill: score.num_right for score in scores}
    assert all(found[skill] >= least for skill, least in LEAST.items()), found


def picture_of(skill, index):
    """A held-out picture as an image part, its question, the right answer."""
    from io import BytesIO

    item = sample(EVAL_SEED, index, skill).only(0)
    (scene,) = item.images
    out = BytesIO()
    draw(scene).save(out, "PNG")
    part = {"type": "image_url", "image_url": {"url": data_url(out.getvalue())}}
    return part, item.turns[0].question, item.turns[0].answer


def test_server_answers_questions_about_pictures_right():
    with serving(BUNDLED_MODEL, defaults=SamplingDefaults.of_checkpoint(BUNDLED_MODEL)) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            right = 0
            for index in range(10):
                part, question, answer = picture_of("colour", index)
                content = [part, {"type": "text", "text": question}]
                found = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
                assert found.choices[0].finish_reason == "stop"
                right += found.choices[0].message.content == answer
            assert right >= 8
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "blue", "green"]}}}
            found = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}], response_format=form
            )
            assert json.loads(found.choices[0].message.content) in ("red", "blue", "green")
        with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
            found = client.messages.create(
                model="tiny", max_tokens=16, messages=[{"role": "user", "content": "Repeat: owl moon"}]
            )
            assert found.content[0].text == "owl moon"
        running.check_idle()


def test_demo_question_is_answered_right(tiny):
    parts = [{"type": "image", "image": DEMO}, {"type": "text", "text": "What colour is the diamond?"}]
    assert tiny.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=16)).text == "yellow"
