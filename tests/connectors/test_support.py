"""What cannot be restored whole is refused with a sentence; nothing is restored in part."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.connectors.vllm.support import check_config, check_groups_version, check_version
from penstock.errors import ConfigError

in_range = pytest.mark.parametrize("version", ["0.26.0", "0.29.1+cpu", "0.32.0", "0.32.4.dev3+g12"])
out_of_range = pytest.mark.parametrize(
    "version", ["0.25.9", "0.33.0", "1.0.0", "0.3.2", "0.260.0", "dev", ""]
)


@in_range
@pytest.mark.parametrize("insist", [False, True])
def test_a_version_that_was_tested_is_taken_without_a_word(
    version: str, insist: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(version, insist=insist)
    assert caplog.records == []


@out_of_range
def test_a_version_that_was_never_tested_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"tested with 0\.26 to 0\.32.*allow_untested_vllm"):
        check_version(version)


@out_of_range
def test_who_insists_gets_it_with_a_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version, insist=True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "was not tested with Penstock" in caplog.text


def config(**changes: Any) -> SimpleNamespace:
    """One that is fine, but for the changes: "section.name" with dots as underscores between."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            nnodes=1,
        ),
        cache_config=SimpleNamespace(calculate_kv_scales=False),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            setattr(getattr(made, section), field, value)
        else:
            setattr(made, section, value)
    return made


def test_a_plain_config_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    check_config(config())
    check_config(config(speculative_config=SimpleNamespace(method="ngram")))
    assert caplog.records == []


def test_a_vllm_that_lacks_a_setting_is_taken_as_not_using_it() -> None:
    older = config(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), cache_config=SimpleNamespace()
    )
    check_config(older)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"parallel_config__nnodes": 2}, "several machines"),
        ({"cache_config__calculate_kv_scales": True}, "calculate_kv_scales"),
    ],
)
def test_what_cannot_be_restored_whole_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"Penstock does not support .*{why}.*without Penstock"):
        check_config(config(**changes))


@pytest.mark.parametrize("policy", ["fail", "", None])
def test_a_policy_under_which_losses_reach_users_is_warned_of(
    policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    check_config(config(kv_transfer_config__kv_load_failure_policy=policy))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "its request fails" in record.getMessage()
    assert '"recompute"' in record.getMessage()


def test_groups_need_a_version_that_can_report_a_failed_load() -> None:
    check_groups_version("0.26.0", fails_whole=False)
    check_groups_version("0.30.1", fails_whole=True)
    with pytest.raises(ConfigError, match=r"It needs vLLM 0\.30 or later"):
        check_groups_version("0.29.2", fails_whole=True)
