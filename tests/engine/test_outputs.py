from __future__ import annotations

from penstock.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_a_completion_is_finished_when_it_says_why() -> None:
    running = CompletionOutput(0, "a", [5], logprobs=[{5: Logprob(-0.5, 1, "a")}])
    assert not running.finished()
    assert CompletionOutput(0, "a", [5], finish_reason="length").finished()


def test_times_count_from_arrival() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.first_token_seconds is None
    assert metrics.total_seconds is None
    metrics.first_token_time, metrics.finished_time = 10.5, 12.0
    assert metrics.first_token_seconds == 0.5
    assert metrics.total_seconds == 2.0


def test_outputs_share_nothing() -> None:
    one, two = RequestOutput("a", None, [1]), RequestOutput("b", None, [1])
    one.outputs.append(CompletionOutput(0, "", []))
    assert two.outputs == []
