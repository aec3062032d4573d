"""The Python API on a tiny checkpoint: one answer whatever the batch, sampling by seed, ends, streams, refusals."""

import re
import shutil
from io import BytesIO
from itertools import combinations

import numpy as np
import pytest
import torch
from network_helpers import PADDED_VOCAB
from PIL import Image

import deepspan
from deepspan import LLM, ChatOptions, EngineConfig, SamplingParams
from deepspan.errors import ConfigError, ImageError, InputError, WeightsError
from deepspan.image.decode import ImageLimits
from deepspan.text import special
from deepspan.weights.tiny import write_tiny

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=11)


def _picture(seed, width=24, height=18):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _ask(*parts):
    content = [part if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    return [{"role": "user", "content": content}]


@pytest.fixture
def script(llm, monkeypatch):
    """Make the model say given ids: one list per request, told apart by the last token of its prompt."""

    def install(**lines):
        def forward(inputs, _failed):
            found = []
            for chunk, _ in inputs:
                row = llm._runner._rows[chunk.row]
                line = lines[chr(llm.tokenizer.bytes_of(int(row.request.token_ids[-1]))[0])]
                logits = torch.zeros(1, llm.config.vocab_size)
                logits[0, line[len(row.generated)]] = 9.0
                found.append((chunk, logits))
            return found

        monkeypatch.setattr(llm._runner, "_forward", forward)

    return install


CONVERSATIONS = [
    _ask("hello"),
    _ask(_picture(1), "what is this?"),
    _ask("A", _picture(2, 40, 12), "B", _picture(3), "which one?"),
    _ask(_picture(4, 30, 30), _picture(5), "both"),
    [{"role": "system", "content": "Be brief."}, *_ask("x" * 150)],
]


# --- one answer


@pytest.fixture(scope="module")
def solo(llm):
    return [llm.chat(conversation, SHORT) for conversation in CONVERSATIONS]


def test_batch_of_conversations_equals_each_alone(llm, solo):
    assert llm.chat_many(CONVERSATIONS, SHORT) == solo
    assert len({output.token_ids for output in solo}) > 1


def test_batch_in_another_order_equals_each_alone(llm, solo):
    order = [3, 0, 4]
    assert llm.chat_many([CONVERSATIONS[i] for i in order], SHORT) == [solo[i] for i in order]


def test_batch_of_prompts_equals_each_alone(llm):
    prompts = ["hello", "a longer prompt, of more than one group of compressed tokens", [5, 6, 7]]
    assert llm.generate(prompts, SHORT) == [llm.generate(prompt, SHORT)[0] for prompt in prompts]


def test_batch_of_nothing_is_nothing(llm):
    assert llm.generate([]) == llm.chat_many([]) == []


def test_chat_with_an_open_turn_equals_generate_on_its_text(llm):
    text = special.BOS + special.USER + "hi" + special.ASSISTANT + special.THINK_CLOSE
    assert llm.chat(_ask("hi"), SHORT) == llm.generate(text, SHORT)[0]


def test_output_counts_the_tokens_of_prompt_and_images(llm, solo):
    assert [output.num_image_tokens > 0 for output in solo] == [False, True, True, True, False]
    prompt = special.BOS + special.USER + "hello" + special.ASSISTANT + special.THINK_CLOSE
    assert solo[0].num_prompt_tokens == len(llm.tokenizer.encode_raw(prompt))


# --- sampling


def test_sampled_text_of_a_seed_is_the_same_alone_and_in_any_batch(llm):
    alone = llm.chat(CONVERSATIONS[1], SAMPLED)
    assert alone == llm.chat(CONVERSATIONS[1], SAMPLED)
    assert alone == llm.chat_many([CONVERSATIONS[0], CONVERSATIONS[1]], SAMPLED)[1]
    assert alone == llm.chat_many([CONVERSATIONS[1], CONVERSATIONS[2]], SAMPLED)[0]


def test_sampled_text_of_another_seed_differs(llm):
    params = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=5.0, seed=seed) for seed in range(4)]
    assert len({llm.generate("hi", one)[0].token_ids for one in params}) == 4


def test_sampled_text_without_a_seed_differs_between_runs(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=5.0)
    assert llm.generate("hi", params) != llm.generate("hi", params)


# --- ends


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_output_ends_after_max_tokens(llm, max_tokens):
    output = llm.generate("hello", SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]
    assert len(output.token_ids) == max_tokens
    assert output.finish_reason == "length"


def test_outputs_that_end_at_different_times_are_each_complete(llm, script):
    ids, eos = llm.tokenizer.encode_raw, llm.tokenizer.special.eos
    script(a=[*ids("one"), eos], b=[eos], c=ids("three more"))
    outputs = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=7))
    assert [output.text for output in outputs] == ["one", "", "three m"]
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "length"]
    assert [len(output.token_ids) for output in outputs] == [4, 1, 7]


def test_output_with_reasoning_is_split(llm, script):
    thinking = llm.tokenizer.special
    line = [*llm.tokenizer.encode_raw("hm"), thinking.think_close, *llm.tokenizer.encode_raw("yes"), thinking.eos]
    script(**{"<": line})
    output = llm.chat(_ask("why?"), SamplingParams(max_tokens=20), ChatOptions(effort="high"))
    assert (output.reasoning, output.text, output.finish_reason) == ("hm", "yes", "stop")


def test_output_never_holds_image_tokens_or_ids_without_a_token(llm, monkeypatch):
    special_ids = llm.tokenizer.special
    forbidden = [special_ids.image, *range(special_ids.sentinel_base, special_ids.sentinel_base + 5), PADDED_VOCAB - 1]

    def forward(inputs, _failed):
        logits = torch.zeros(1, llm.config.vocab_size)
        logits[:, forbidden] = 50.0
        logits[:, 65] = 1.0
        return [(chunk, logits) for chunk, _ in inputs]

    monkeypatch.setattr(llm._runner, "_forward", forward)
    assert llm.generate("x", SHORT)[0].token_ids == (65,) * 6
    drawn = llm.generate(["x"] * 8, SamplingParams(max_tokens=30, temperature=1e6, ignore_eos=True))
    assert not {token for output in drawn for token in output.token_ids} & set(forbidden)


# --- streams


def test_stream_adds_up_to_the_answer(llm, solo):
    events = list(llm.stream_chat(CONVERSATIONS[1], SHORT))
    assert [event.token_id for event in events] == list(solo[1].token_ids)
    assert "".join(event.text for event in events) == solo[1].text
    assert [event.finish_reason for event in events] == [None] * 5 + ["length"]


def test_stream_gives_each_token_before_the_next_is_computed(llm, script):
    script(**{"<": llm.tokenizer.encode_raw("ab")})  # a third step would fail
    stream = llm.stream_chat(_ask("hi"), SHORT)
    assert [next(stream).text, next(stream).text] == ["a", "b"]


def test_stream_of_a_bad_request_is_refused_at_once(llm):
    with pytest.raises(InputError, match=r"messages\[0\]"):
        llm.stream_chat(_ask(b"not a picture"))


# --- images


def _first_logits(folder, conversation, dtype="float32"):
    """Logits after the prompt."""
    llm = LLM(folder, dtype=dtype)
    forward, seen = llm._runner._forward, []

    def spy(inputs, failed):
        found = forward(inputs, failed)
        seen.extend(logits[-1].clone() for _, logits in found)
        return found

    llm._runner._forward = spy
    llm.chat(conversation, SamplingParams(max_tokens=1))
    assert len(seen) == 1
    return seen[0]


def test_logits_depend_on_the_picture_and_on_which_stands_where(model_folder):
    first, second = _picture(1), _picture(2)
    texts = [_ask("A", *pair, "?") for pair in ((first, second), (second, first), (first, first))]
    logits = [_first_logits(model_folder, conversation) for conversation in texts]
    assert torch.equal(logits[0], _first_logits(model_folder, _ask("A", _picture(1), _picture(2), "?")))
    for a, b in combinations(logits, 2):
        assert (a - b).abs().max() > 1e-3


def test_picture_is_the_same_by_path_bytes_and_object(llm, tmp_path):
    stream = BytesIO()
    _picture(6).save(stream, "PNG")
    (tmp_path / "x.png").write_bytes(stream.getvalue())
    sources = (tmp_path / "x.png", stream.getvalue(), _picture(6))
    assert len({llm.chat(_ask(source, "?"), SHORT) for source in sources}) == 1


def test_image_mode_says_what_transparency_means(llm, model_folder):
    clear, white, black = (Image.new("RGBA", (18, 12), color) for color in ((0, 0, 0, 0), "white", "black"))
    reference = LLM(model_folder, image_mode="reference")
    assert llm.chat(_ask(clear, "?"), SHORT) == llm.chat(_ask(white, "?"), SHORT)
    assert reference.chat(_ask(clear, "?"), SHORT) == reference.chat(_ask(black, "?"), SHORT)


def test_image_limits_are_those_of_the_model(model_folder):
    limited = LLM(model_folder, image_limits=ImageLimits(max_side=16))
    with pytest.raises(ImageError, match=r"content\[0\].*longest side served is 16"):
        limited.chat(_ask(_picture(1)), SHORT)


def test_text_model_answers_text_and_refuses_images(text_folder):
    text_only = LLM(text_folder)
    assert len(text_only.chat(_ask("hi"), SHORT).token_ids) == 6
    with pytest.raises(InputError, match="no vision"):
        text_only.chat(_ask(_picture(1), "hi"), SHORT)


# --- refusals


def test_batch_with_one_bad_request_is_refused_before_anything_runs(llm, monkeypatch):
    monkeypatch.setattr(llm._runner, "_forward", None)
    with pytest.raises(InputError, match="the prompt is empty"):
        llm.generate(["a", ""], SHORT)
    with pytest.raises(ImageError, match=r"messages\[0\]\.content\[0\]"):
        llm.chat_many([_ask("a"), _ask(b"broken")], SHORT)


@pytest.mark.parametrize("prompts", [5, None, b"abc", [b"abc"], ["a", 5], [[5, 10**6]], {"a": 1}])
def test_prompts_of_wrong_type_are_refused(llm, prompts):
    with pytest.raises(InputError, match=r"prompt|token id"):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize("device", ["tpu9000", "cuda:99", "meta", "hpu", ""])
def test_device_that_cannot_be_used_is_refused_by_name(model_folder, device):
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used"):
        LLM(model_folder, device=device)


@pytest.mark.parametrize("dtype", ["float16", "int8", "bf16", ""])
def test_dtype_that_is_not_served_is_refused_by_name(model_folder, dtype):
    with pytest.raises(ConfigError, match=f"dtype must be auto, float32 or bfloat16, found '{dtype}'"):
        LLM(model_folder, dtype=dtype)


def test_image_mode_that_does_not_exist_is_refused_by_name(model_folder):
    with pytest.raises(ConfigError, match="image_mode must be one of serving, reference, found 'fancy'"):
        LLM(model_folder, image_mode="fancy")


def test_model_folder_that_does_not_exist_is_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match=f"no config.json at {re.escape(str(tmp_path / 'nowhere'))}"):
        LLM(tmp_path / "nowhere")


def test_model_folder_without_weights_is_refused(model_folder, tmp_path):
    shutil.copy(model_folder / "config.json", tmp_path)
    with pytest.raises(WeightsError, match="no safetensors files"):
        LLM(tmp_path)


def test_model_folder_without_tokenizer_is_refused(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        LLM(tmp_path)


def test_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    folder = write_tiny(tmp_path, ratios=(0,), vision=False, overrides={"vocab_size": 270})
    with pytest.raises(ConfigError, match="the tokenizer has ids up to 279, vocab_size is 270"):
        LLM(folder)


# --- dtypes, progress, package


def test_bfloat16_run_answers_and_stays_near_float32(model_folder):
    conversation = CONVERSATIONS[2]
    output = LLM(model_folder, dtype="bfloat16").chat(conversation, SHORT)
    assert len(output.token_ids) == 6
    exact, rough = (_first_logits(model_folder, conversation, dtype) for dtype in ("float32", "bfloat16"))
    assert rough.dtype == torch.float32
    assert torch.cosine_similarity(exact, rough, dim=0) > 0.99


def test_loading_reports_progress(model_folder):
    seen = []
    LLM(model_folder, progress=lambda done, total: seen.append(done / total))
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_package_gives_its_public_names_and_no_others():
    assert all(getattr(deepspan, name) is not None for name in deepspan.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = deepspan.Nothing


# --- the engine behind it


def test_stream_that_is_let_go_of_leaves_nothing_running(llm):
    stream = llm.stream_chat(_ask("hi"), SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    assert llm.stats.num_running == 1
    del stream
    assert llm.stats.num_running == 0
    unused = llm.stream_chat(_ask("hi"), SHORT)
    assert llm.stats.num_waiting == 1
    unused.close()
    assert llm.stats.num_waiting == 0
    assert list(unused) == []


def test_stream_goes_on_while_others_are_answered(llm, solo):
    stream = llm.stream_chat(CONVERSATIONS[1], SHORT)
    first = next(stream)
    assert llm.chat(CONVERSATIONS[0], SHORT) == solo[0]
    assert (first.token_id, *(event.token_id for event in stream)) == solo[1].token_ids


def test_step_that_breaks_ends_requests_with_the_error(llm, solo, monkeypatch):
    def breaks(_plan):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "run", breaks)
        output = llm.chat(_ask("hi"), SHORT)
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: device lost")
    assert llm.chat(CONVERSATIONS[1], SHORT) == solo[1]


def test_interrupted_step_is_passed_on_and_leaves_nothing(llm, solo, monkeypatch):
    def interrupted(_plan):
        raise KeyboardInterrupt

    stream = llm.stream_chat(_ask("hi"), SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.chat(_ask("ho"), SHORT)
    assert [event.finish_reason for event in stream] == ["error"]
    assert llm.stats.num_running == llm.stats.num_waiting == 0
    assert llm.chat(CONVERSATIONS[1], SHORT) == solo[1]


def test_engine_limits_are_those_given(model_folder):
    small = LLM(model_folder, engine=EngineConfig(max_model_len=64, max_num_seqs=2, max_batched_tokens=80))
    assert len(small.generate(["a", "b", "c"], SHORT)) == 3
    with pytest.raises(InputError, match="max_model_len 64"):
        small.generate("a" * 80, SHORT)
    with pytest.raises(ConfigError, match="the cache needs"):
        LLM(model_folder, cache_bytes=1000)
