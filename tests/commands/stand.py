"""A plain HTTP server on loopback that says what a test puts into it, path by path."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = bytes | Callable[[], bytes] | int
"""A body, one made anew each time, or a status without one."""


class Stand:
    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, str | None]] = []  # paths, and the keys that came with them
        stand = self

        class Reply(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                stand.asked.append((path, self.headers.get("Authorization")))
                answer = stand.answers.get(path, 404)
                body = answer() if callable(answer) else answer
                self.send_response(body if isinstance(body, int) else 200)
                body = b"" if isinstance(body, int) else body
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Reply)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def tell(self, path: str, data: Any) -> None:
        self.answers[path] = json.dumps(data).encode()

    def close(self) -> None:
        """Gone, as if it had never listened. A second time nothing happens."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
