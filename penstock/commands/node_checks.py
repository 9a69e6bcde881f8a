"""Checks that vLLM can use a node. They leave nothing behind."""

from __future__ import annotations

from penstock.commands.vllm_checks import Check, Status, check_locked_memory
from penstock.config import Config
from penstock.errors import PenstockError
from penstock.units import format_bytes

_ANSWER_SECONDS = 5.0


def check_node(config: Config) -> list[Check]:
    """Check that the node answers, and that its DRAM can be pinned here."""
    # Imported here because `penstock doctor` must work if its dependencies are missing.
    from penstock.node.connection import expect, find_node, socket_path, wait_for_frame
    from penstock.node.wire import VERSION

    assert config.node.url is not None
    path = socket_path(config.node.url)
    try:
        channel = find_node(path, 0.0)
        try:
            channel.send("describe", {"protocol": VERSION})
            frame = wait_for_frame(channel, _ANSWER_SECONDS)
            expect(frame, "description")
            dram_bytes = int(frame.fields["dram_bytes"])
            models = [str(model["model"]) for model in frame.fields["models"]]
        finally:
            channel.close()
    except (PenstockError, LookupError, TypeError, ValueError) as error:
        return [Check("node", Status.FAILED, str(error))]
    found = f"it has {format_bytes(dram_bytes)} of DRAM and KV of {', '.join(models) or 'no model'}"
    return [Check("node", Status.OK, found), check_locked_memory(dram_bytes)]
