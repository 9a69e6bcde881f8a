"""`penstock serve --otlp-traces-endpoint`: an observer that sends requests' spans to a collector.

The engine only queues its events. A thread makes spans of them, and OpenTelemetry sends them in
batches; what either cannot keep up with is left out and counted. A collector that is down, slow or
broken is logged once and does not affect requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Full, Queue

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from penstock.errors import ConfigError
from penstock.events import Event, RequestStory
from penstock.install import VERSION
from penstock.server.spans import emit

log = logging.getLogger("penstock.server")

CLOSE_SECONDS = 3.0  # to send what is still queued at the end
_MAX_QUEUED = 4096
_QUIET_SECONDS = 60.0  # between two log lines about an unreliable collector
_MAX_REASON_CHARS = 400


class Tracer:
    """An observer. Created before the model loads, so that bad settings are reported at once."""

    def __init__(
        self,
        url: str,
        exporter: SpanExporter | None = None,
        *,
        max_queued: int = _MAX_QUEUED,
    ) -> None:
        """Raises ConfigError if OpenTelemetry rejects its settings."""
        self._url = url
        self._exporter_log = _ExporterLog(url)
        self._exporter_log.listen()
        try:
            self._exporter = _CountingExporter(
                exporter or OTLPSpanExporter(url), self._exporter_log
            )
            # The sampler is set by the environment; the default follows the caller, else takes all.
            self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except (ValueError, RuntimeError, OSError) as error:
            self._exporter_log.leave()
            raise ConfigError(
                f"spans cannot be sent ({error}): OpenTelemetry rejects its settings; check the "
                "environment variables that begin with OTEL_."
            ) from None
        self._tracer = self._provider.get_tracer("penstock", VERSION)
        self._model = ""
        self._queue: Queue[RequestStory | None] = Queue(max_queued)
        self._num_left_out = 0  # requests, counted by the engine's thread
        self._num_spoilt = 0  # requests, counted by our thread
        self._num_made = 0  # spans
        self._thread = threading.Thread(target=self._run, name="penstock-trace", daemon=True)

    def begin(self, model: str) -> None:
        """Start, once the engine is open."""
        self._model = model
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestStory):
            return
        try:
            self._queue.put_nowait(event)
        except Full:
            self._num_left_out += 1
            if self._num_left_out == 1:
                log.warning("requests end faster than their spans can be made: some are left out")

    def close(self) -> None:
        """Send what is left, as far as the collector accepts it within a few seconds."""
        end = time.monotonic() + CLOSE_SECONDS
        if self._thread.is_alive():
            with suppress(Full):
                self._queue.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(max(0.0, end - time.monotonic()))
        num_lost = self._num_made - self._exporter.num_taken
        num_left_out = self._num_left_out + self._num_spoilt
        if num_left_out or num_lost:
            log.warning(
                "requests left out of tracing: %d; spans that did not reach %s: %d",
                num_left_out,
                self._url,
                num_lost,
            )
        if not self._thread.is_alive():  # else it still tries, until the process ends
            self._exporter_log.leave()

    def _run(self) -> None:
        while (told := self._queue.get()) is not None:
            # Computed each time, because the wall clock may be adjusted.
            offset_ns = time.time_ns() - time.monotonic_ns()
            try:
                self._num_made += emit(self._tracer, told, model=self._model, offset_ns=offset_ns)
            except Exception:
                self._num_spoilt += 1
                log.debug("a request's spans could not be made", exc_info=True)
        self._provider.shutdown()  # may take long: `close` does not wait for all of it


class _CountingExporter(SpanExporter):
    """Forwards batches, and counts the spans that the collector accepts."""

    def __init__(self, exporter: SpanExporter, exporter_log: _ExporterLog) -> None:
        self._exporter = exporter
        self._exporter_log = exporter_log
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_taken += len(spans)
            self._exporter_log.works_again()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _ExporterLog(logging.Handler):
    """Logs the first of OpenTelemetry's warnings, which repeat every few seconds."""

    _LOGGER = logging.getLogger("opentelemetry")

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self._url = url
        self._is_told = False
        self._quiet_until = 0.0

    def listen(self) -> None:
        self._LOGGER.addHandler(self)
        self._LOGGER.propagate = False

    def leave(self) -> None:
        self._LOGGER.removeHandler(self)
        self._LOGGER.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        # It would log headers that it cannot parse in full, and they contain credentials.
        is_header = record.name == "opentelemetry.util.re"
        said = str(record.msg) if is_header else record.getMessage()
        reason = "".join(c if c.isprintable() else " " for c in said[:_MAX_REASON_CHARS])
        now = time.monotonic()
        if self._is_told or now < self._quiet_until:
            log.debug("spans to %s: %s", self._url, reason)
            return
        self._is_told, self._quiet_until = True, now + _QUIET_SECONDS
        log.warning("spans cannot be sent to %s, the server continues: %s", self._url, reason)

    def works_again(self) -> None:
        if self._is_told:
            self._is_told = False
            log.info("%s accepts spans again", self._url)


def _resource() -> Resource:
    """The sender. The environment has priority. Without the command line: it may contain a key."""
    ours = Resource.create({SERVICE_NAME: "penstock", SERVICE_VERSION: VERSION})
    merged = ours.merge(OTELResourceDetector().detect())
    kept = {
        name: value
        for name, value in merged.attributes.items()
        if not name.startswith("process.command")
    }
    return Resource(kept, merged.schema_url)
