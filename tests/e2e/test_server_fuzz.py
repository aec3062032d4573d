"""Requests made from the server's own description of itself, valid and not: never an answer of 5xx."""

from contextlib import suppress
from functools import partial

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from server_helpers import serving

LIMITS = {  # what bounds an answer, by path
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
QUICK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    database=None,
)


@pytest.fixture(scope="module")
def server(model_folder):
    with serving(model_folder) as running:
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def test_description_names_every_endpoint(operations):
    posts = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
    wanted = {f"POST /v1/{name}" for name in posts} | {
        "POST /tokenize",
        "POST /detokenize",
        "GET /v1/models",
        "GET /metrics",
    }
    assert wanted <= set(operations)


def _try(cases, check):
    @QUICK
    @given(cases)
    def run(case):
        check(case)

    with suppress(Unsatisfiable):  # where nothing can be wrong, nothing wrong can be made up
        run()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_any_request_gets_an_answer_that_is_no_server_error(operations, mode):
    answered = {label: set() for label in operations}

    def check(label, case):
        if isinstance(case.body, dict) and case.path in LIMITS:
            # A valid request may ask for all that the context holds; here it asks for little.
            limit = LIMITS[case.path]
            few = {name: 1 for name in ("n", limit) if isinstance(case.body.get(name), int | None)}
            case.body.update(few)
            if isinstance(case.body.get("min_tokens"), int):
                case.body["min_tokens"] = 1
        answer = case.call(timeout=60)
        assert answer.status_code < 500, answer.text
        answered[label].add(answer.status_code)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    for label, operation in operations.items():
        cases = operation.as_strategy(generation_mode=mode)
        _try(cases, partial(check, label))
    assert all(400 in answered[f"POST {path}"] for path in LIMITS)
