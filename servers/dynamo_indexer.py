"""A real `python -m dynamo.indexer`, which reads KV events, for the duration of a test."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from servers import ServerProcess, free_port

WHY_NOT = (
    None
    if importlib.util.find_spec("dynamo")
    else "dynamo.indexer is not installed: pip install --no-deps ai-dynamo-runtime"
)


class DynamoIndexer(ServerProcess):
    """Knows where which blocks are. Workers have numbers."""

    def __init__(self, folder: Path, block_tokens: int, *options: str) -> None:
        """`options` name the model "my-model", as `register` does."""
        self.port = free_port()
        self._block_tokens = block_tokens
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port), *options]
        super().__init__(command, [self.port], folder / "log")
        self.start()

    def register(self, worker: int, endpoint: str, replay_endpoint: str | None = None) -> None:
        body = {
            "instance_id": worker,
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "model_name": "my-model",
            "block_size": self._block_tokens,
        }
        self._post("/register", body)

    def query(self, tokens: Sequence[int], cache_salt: str | None = None) -> Mapping[int, Any]:
        """By worker: how many tokens each tier holds, together with the faster tiers."""
        body = {"token_ids": list(tokens), "model_name": "my-model", "cache_salt": cache_salt}
        found = self._post("/query", body)["instances"]
        return {int(worker): tiers for worker, tiers in found.items()}

    def _post(self, path: str, body: Mapping[str, object]) -> Any:
        answer = httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, timeout=30)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()
