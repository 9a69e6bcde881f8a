"""A collector on loopback that takes OTLP over HTTP, and can be as odd as real ones are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    resource: dict[str, Any]


class Collecting:
    """A real port. `mode` is ok, hang, nonsense, or the status that it answers with."""

    def __init__(self, mode: str = "ok") -> None:
        self.mode = mode
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self._may_go = threading.Event()
        outer = self

        class Asked(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.paths.append(self.path)
                outer.headers.append({k.lower(): v for k, v in self.headers.items()})
                body = self.rfile.read(int(self.headers["content-length"]))
                if outer.mode == "hang":
                    outer._may_go.wait()
                    return
                if outer.mode == "nonsense":
                    self.wfile.write(b"\x00\xff this is no HTTP\r\n\r\n")
                    return
                if outer.mode == "ok":
                    outer.bodies.append(body)
                self.send_response(200 if outer.mode == "ok" else int(outer.mode))
                self.send_header("content-type", "application/x-protobuf")
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._may_go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> list[Sent]:
        return [span for body in list(self.bodies) for span in _read(body)]

    def requests(self, request_id: str) -> list[Sent]:
        """The requests that a client named so."""
        return [s for s in self.spans() if s.attributes.get("penstock.request_id") == request_id]

    def below(self, parent: Sent) -> list[Sent]:
        """Its children, by their start."""
        children = [span for span in self.spans() if span.parent_id == parent.span_id]
        return sorted(children, key=lambda span: (span.start_ns, span.end_ns))


def _read(body: bytes) -> Iterator[Sent]:
    for part in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in part.scope_spans:
            for span in scope.spans:
                yield Sent(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _plain(span.attributes),
                    [event.name for event in span.events],
                    _plain(part.resource.attributes),
                )


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
