"""Rates of drafting, from counters of an engine and from what a server tells; no torch."""

import re
from dataclasses import replace

import httpx
import pytest

from deepspan.cli import draft_report
from deepspan.cli.draft_report import DraftCounts, one_line, read_counts
from deepspan.engine.core import EngineStats

TEXT = """# HELP vllm:spec_decode_num_drafts_total x
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 8.0
vllm:spec_decode_num_drafts_total{engine="1"} 2.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 25.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 2.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 3.0
"""
STATS = EngineStats(
    num_steps=1, num_prompt_tokens=1, num_cached_tokens=0, num_generated_tokens=1, num_preemptions=0, num_running=0,
    num_waiting=0, cache_usage=0.0, num_drafts=10, num_draft_tokens=25, num_accepted_tokens=15,
    accepted_per_position=(9, 4, 2),
)  # fmt: skip


def test_counters_of_a_server_and_of_an_engine_give_the_same_rates():
    found = DraftCounts.of_metrics(TEXT)
    assert found == DraftCounts.of_stats(STATS)
    rates = found.rates()
    assert rates["mean_acceptance_length"] == 2.5  # 15 in 10 steps, and one more of every step
    assert rates["acceptance_rate"] == 0.6
    assert rates["rate_per_position"] == [0.9, 0.4, 0.2]
    assert one_line(rates) == "2.50 tokens a step, 60.0% of 25 guesses taken, by position 0.90 0.40 0.20"


def test_rates_are_of_what_came_since_and_of_nothing_there_are_none():
    all_of_it = DraftCounts.of_stats(STATS)
    later = replace(STATS, num_drafts=14, num_draft_tokens=35, num_accepted_tokens=21, accepted_per_position=(12, 6, 3))
    rates = DraftCounts.of_stats(later).since(all_of_it).rates()
    assert (rates["steps"], rates["acceptance_rate"], rates["rate_per_position"]) == (4, 0.6, [0.75, 0.5, 0.25])
    assert all_of_it.since(all_of_it).rates() is None


def test_server_that_does_not_tell_of_drafts_has_none():
    assert DraftCounts.of_metrics("") is None
    assert DraftCounts.of_metrics(re.sub(r"(?m)^vllm:spec.*\n", "", TEXT)) is None


@pytest.mark.parametrize("url", ["http://host:1/v1", "http://host:1/v1/", "http://host:1"])
def test_metrics_are_asked_for_beside_the_api(monkeypatch, url):
    asked = []

    def get(address, headers, timeout):
        asked.append((address, headers))
        return httpx.Response(200, text=TEXT)

    monkeypatch.setattr(draft_report.httpx, "get", get)
    assert read_counts(url, "k").num_drafts == 10
    assert asked == [("http://host:1/metrics", {"Authorization": "Bearer k"})]


@pytest.mark.parametrize("answer", [httpx.Response(404, text=TEXT), httpx.Response(200, text="<html>no</html>")])
def test_server_without_metrics_is_no_error(monkeypatch, answer):
    monkeypatch.setattr(draft_report.httpx, "get", lambda *_, **__: answer)
    assert read_counts("http://host:1/v1", None) is None


def test_server_that_is_not_there_is_no_error():
    assert read_counts("http://127.0.0.1:9/v1", None) is None
