"""Tests that `make test` leaves to `make test-thorough` or `make test-soak`: they take long.

`make test` runs the whole of the pure core and one real pass through each real part. Here are the
other passes: more models, more ways to fail, longer soaks. Patterns are matched against a test's
name, by file below tests/; "*" is the whole file. A pattern that matches no test is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

THOROUGH: dict[str, tuple[str, ...]] = {
    # Demonstrations and documents, run from end to end.
    "test_demo.py": ("*",),
    "test_readme.py": ("*",),
    "test_docs_remote.py": ("*",),
    "test_docs_routing.py": ("*",),
    "test_docs.py": (
        "test_python_runs?anywhere.md-1-*",
        "test_python_runs?hints.md-0-*",
        "test_python_runs?server.md-[12]-*",
        "test_python_runs?README.md-6-*",
        "test_python_runs?quickstart.md-5-*",
    ),
    "deploy/test_rules.py": ("test_prometheus_accepts?test rules?",),
    # Soaks and crashes.
    "engine/test_needles.py": ("*",),
    "engine/test_soak.py": ("*",),
    "engine/test_audit_soak.py": ("*short*",),
    "engine/test_taken_apart.py": ("test_random_steps*mistral*", "test_random_steps*gpt_oss*"),
    "engine/test_announcer.py": ("*cold?", "*in turns?", "test_after_a_fault*"),
    "engine/test_audit.py": (
        "test_nothing_is_found*dtype1*",
        "test_nothing_is_found*batches[12]*",
        "test_kv_of_another_model*scaled*",
        "test_blocks_that_were_stored*[!d]",
        "test_blocks_that_are_not_restored*[!r]",
        "test_in_quarantine*",
        "test_a_failure_in_the_middle*",
        "test_aborts*",
    ),
    "test_crash.py": ("*roomy*",),
    "engine/test_node_processes.py": ("*",),
    "engine/test_node_kills.py": ("*short*",),
    "server/test_disaggregation.py": ("*redis*",),
    "node/test_hostile.py": ("*long*", "test_a_client_that_never_reads*"),
    # Every model architecture in Triton's interpreter; Llama is in `make test`.
    "engine/test_runner.py": (
        "test_logits_are_those_of_transformers?[!l]*-triton?",
        "test_steps_give_the_same_whatever_was_brought_ahead_of_them*",
        "test_cold_blocks_are_fetched_once_for_all_who_read_them?[12]*",
    ),
    "engine/test_ruled_models.py": (
        "test_logits_are_those_of_transformers?[!g]*-triton?",
        "test_logits_are_those_of_transformers?gemma*-triton?",
        "test_logits_are_those_of_transformers?[eocmpq]*",
        "test_answers*[!s]?",
    ),
    "engine/test_window_fetches.py": ("*-2?",),
    "engine/test_packed_rules.py": ("*triton-gemma2?",),
    "engine/test_rules.py": (
        "test_a_gpus_decode*[!l]?",
        "test_prompts_obey_them?[!a]*-triton?",
    ),
    "engine/test_fp8.py": (
        "test_logits_are_those_of_rounded*?gpt2-triton?",
        "test_cold_blocks_change_no_bit*",
    ),
    "engine/test_cold_attention.py": ("test_blocks_may_wander",),
    "engine/test_triton.py": ("test_it_is_attention?32-*", "test_it_is_attention?8-*"),
    # The engine: slow stores, many ways to fail or to be interrupted.
    "engine/test_models.py": (
        "test_embedded_model*",
        "test_truncated_gguf*",
        "test_fingerprint_is_the_same_in_another*",
    ),
    "engine/test_engine_folder.py": ("test_every_spelling_of_a_path*",),
    "engine/test_two_ended_loads.py": ("*",),
    "engine/test_faults.py": ("*",),
    "engine/test_ahead.py": (
        "test_a_step_that_fails*",
        *("*preempted?", "*cold?", "*in turns?"),
    ),
    "engine/test_cold.py": ("*",),
    "engine/test_shared.py": ("*",),
    "engine/test_rotation.py": ("*",),
    "engine/test_engine_hints.py": ("*",),
    "engine/test_interrupts.py": ("*",),
    "connectors/test_injected_errors.py": ("*overlap*", "test_an_error_in_what_copies*"),
    # Real servers, beyond one pass each.
    "server/test_record.py": ("test_real_requests*", "test_a_server_goes_on*", "*disk_is_full*"),
    "server/test_tracing.py": ("*",),
    "server/test_dashboard.py": ("*",),
    "server/test_hints.py": ("*",),
    "server/test_vllm_fields.py": ("*",),
    "server/test_vllm_router.py": (
        "test_ordinary_traffic?[cr]o*",
        "test_hints*",
        "test_prompts*",
        "test_a_client*",
        "test_the_name*",
        "test_a_server_that_dies*",
    ),
    "server/test_sharing.py": ("*",),
    "server/test_bodies.py": ("*",),
    "server/test_engine_faults.py": ("test_the_process_ends*",),
    "server/test_restart.py": ("*",),
    "server/test_kv_events.py": ("test_two_servers*",),
    "server/test_fuzz.py": ("*",),
    "server/test_tool_edges.py": (
        *("*?llama3_json?", "*?mistral?", "*?mistral_args?"),
        "test_values*",
    ),
    "server/test_process.py": ("test_an_upload_that_never_ends*",),
    "commands/test_top.py": ("test_a_real_server_at_work",),
    "commands/test_serve.py": ("test_asked_twice*",),
    "commands/test_dashboard_command.py": ("test_[b-z]*", "test_a_page*", "test_a_server_that_*"),
    "commands/test_doctor.py": ("*",),
    "commands/test_probe.py": ("*",),
    "commands/test_store_remote.py": ("*",),
    "browser/test_page.py": (
        "test_contrast*",
        "test_it_can_be_used_without*",
        "test_it_says_when_the_server_is_gone*",
        "*dark*",
        "test_on_a_phone*",
        "test_a_requests_story*",
        "test_a_chat_can_be_stopped*",
    ),
    "remote/test_sharing.py": ("*",),
    "remote/test_every_store.py": ("test_a_damaged_value*",),
    "remote/test_s3.py": ("*",),
    "remote/test_mooncake.py": ("*",),
    "remote/test_packs.py": ("*",),
}

# A hundred kills each, or thousands of requests, of which shorter variants are above or in
# `make test`; and several servers at once.
SOAKS: dict[str, tuple[str, ...]] = {
    "engine/test_audit_soak.py": ("*long*",),
    "server/test_router_agreement.py": ("*",),
    "engine/test_node_kills.py": ("*long*",),
    "node/test_deaths.py": ("*long*",),
}


def mark_long_tests(items: Sequence[pytest.Item]) -> None:
    """Mark these tests, so that `-m` can leave them out."""
    for mark, tests in ((pytest.mark.thorough, THOROUGH), (pytest.mark.soak, SOAKS)):
        unmatched = {(file, p) for file in _files(items) for p in tests.get(file, ())}
        for item in items:
            file = _file(item)
            for pattern in tests.get(file, ()):
                if fnmatchcase(item.name, pattern):
                    item.add_marker(mark)
                    unmatched.discard((file, pattern))
        if unmatched:
            raise pytest.UsageError(f"tests/thorough.py names no test: {sorted(unmatched)}")


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix()


def _files(items: Sequence[pytest.Item]) -> set[str]:
    """Files that were collected as a whole: a single test asked for by name matches little."""
    asked = {str(a) for item in items for a in item.config.args if "::" in str(a)}
    return {_file(item) for item in items} if not asked else set()
