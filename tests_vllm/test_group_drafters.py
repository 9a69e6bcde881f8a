"""Drafters: their KV is restored too, or fewer of their tokens would be accepted."""

from __future__ import annotations

import pytest
from group_checks import Case, Checks, draw


@pytest.fixture(scope="module", params=["own_drafter", "eagle", "glm4mtp"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestDrafters(Checks):
    def test_as_much_is_accepted_after_a_hit(self, case: Case) -> None:
        """Long answers, and as many accepted tokens as after vLLM's own hit."""
        case.restart()
        prompt = draw(300, 40)
        cold, local = case.ask(prompt, 96), case.ask(prompt, 96)
        case.vllm.forget()
        hit = case.ask(prompt, 96)
        assert hit.num_cached == local.num_cached > 0
        assert hit.num_accepted == local.num_accepted == cold.num_accepted > 5
