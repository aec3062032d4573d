"""A fault in one request's image, forward pass or sampling: that request alone ends with an error."""

import numpy as np
import pytest
import torch
from engine_helpers import Service, greedy, request_of
from network_helpers import make_prompt

from deepspan.runtime.choosing import RunningRow

PARTS = [[20, (9, 9), 20], [33], [3, (6, 12), 30]]


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 16, 4))


@pytest.fixture(scope="module")
def prompts(model):
    return [make_prompt(parts, model.config.vocab_size, seed) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return [tuple(greedy(model, prompt)[0]) for prompt in prompts]


def run(service, prompts):
    ids = [i for n, prompt in enumerate(prompts) for i in service.core.add(request_of(prompt, f"p{n} "))]
    return service.finish(ids)


def check(outputs, expected, broken, message):
    for index, output in enumerate(outputs):
        if index in broken:
            assert output.finish_reason == "error"
            assert message in output.error
        else:
            assert output.token_ids == expected[index]


@pytest.mark.parametrize("broken", [0, 2])
def test_image_that_cannot_be_encoded_fails_its_request(model, prompts, expected, monkeypatch, broken):
    service = Service(model)
    encode, patches = service.runner._network.encode_images, prompts[broken].images[0][0]

    def fails(given, grids):
        if any(torch.equal(given[i : i + 1], torch.from_numpy(patches[:1])) for i in range(len(given))):
            raise RuntimeError("bad picture")
        return encode(given, grids)

    monkeypatch.setattr(service.runner._network, "encode_images", fails)
    check(run(service, prompts), expected, {broken}, "bad picture")
    monkeypatch.undo()
    # The image was not kept as if it had been encoded.
    check(run(service, prompts), expected, (), "")


@pytest.mark.parametrize("step", [0, 2])
def test_forward_pass_that_fails_with_one_request_runs_without_it(model, prompts, expected, monkeypatch, step):
    service = Service(model)
    build, calls = service.runner._builder.build, []

    def fails(chunks):
        calls.append(len(chunks))
        victim = service.scheduler._sequences.get(1)
        if victim is not None and len(calls) > step and victim.row in [chunk.row for chunk in chunks]:
            raise RuntimeError("out of memory")
        return build(chunks)

    monkeypatch.setattr(service.runner._builder, "build", fails)
    check(run(service, prompts), expected, {1}, "out of memory")


def test_sampling_that_fails_ends_one_request(model, prompts, expected, monkeypatch):
    service = Service(model)
    choose = RunningRow.choose

    def fails(row, *arguments, **options):
        if np.array_equal(row.request.token_ids, prompts[2].ids):
            raise ZeroDivisionError("no such law")
        return choose(row, *arguments, **options)

    monkeypatch.setattr(RunningRow, "choose", fails)
    check(run(service, prompts), expected, {2}, "no such law")


def test_chunk_that_cuts_an_image_fails_its_request(model, prompts, expected, monkeypatch):
    """What a wrong scheduler or a bad prefix hit would do is caught before anything is computed."""
    service = Service(model)
    plan = service.scheduler.plan

    def cuts(wanted_drafts):
        made = plan(wanted_drafts)
        if made is not None and made.chunks[0].begins is not None:
            from dataclasses import replace

            first = replace(made.chunks[0], end=25, token_ids=made.chunks[0].token_ids[:25], samples=False)
            return replace(made, chunks=(first, *made.chunks[1:]))
        return made

    monkeypatch.setattr(service.scheduler, "plan", cuts)
    check(run(service, prompts), expected, {0}, "must lie in a single prefill chunk")


def test_building_a_step_asks_the_device_nothing(model, prompts, expected, monkeypatch):
    """No value of a tensor is read on the host, for prompts with images and for decodes."""
    service = Service(model)
    build = service.runner._builder.build

    def guarded(chunks):
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "numpy"):
                patch.setattr(torch.Tensor, name, forbidden)
            return build(chunks)

    def forbidden(*_):
        raise AssertionError("a tensor was read on the host")

    monkeypatch.setattr(service.runner._builder, "build", guarded)
    check(run(service, prompts), expected, (), "")


def test_decode_steps_allocate_no_tensor_while_building(model, prompts, monkeypatch):
    service = Service(model)
    build = service.runner._builder.build
    made = []

    def counted(chunks):
        if any(chunk.end - chunk.start > 1 for chunk in chunks):
            return build(chunks)
        with monkeypatch.context() as patch:
            for name in ("empty", "zeros", "tensor", "from_numpy", "cat", "arange", "stack", "full"):
                patch.setattr(torch, name, lambda *_args, name=name, **_options: made.append(name))
            return build(chunks)

    monkeypatch.setattr(service.runner._builder, "build", counted)
    run(service, prompts)
    assert made == []
