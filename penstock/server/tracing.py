"""`penstock serve --otlp-traces-endpoint`: an observer that sends requests' spans to a collector.

The engine hands over a request's story and goes on. A thread makes spans of it, and batches of
OpenTelemetry's carry them away; what either cannot keep up with is left out and counted. That a
collector is down, slow or odd is told once in the log, and disturbs nobody.
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

CLOSE_SECONDS = 3.0  # for what is still queued at the end
_MAX_QUEUED = 4096
_QUIET_SECONDS = 60.0  # between two lines of the log, of a collector that comes and goes
_MAX_REASON_CHARS = 400


class Tracer:
    """An observer. Made before the model is loaded, so that what is wrong costs nobody a wait."""

    def __init__(
        self,
        url: str,
        exporter: SpanExporter | None = None,
        *,
        max_queued: int = _MAX_QUEUED,
    ) -> None:
        """Raises ConfigError if OpenTelemetry's own settings do not let it begin."""
        self._url = url
        self._ear = _Ear(url)
        self._ear.listen()
        try:
            self._courier = _Courier(exporter or OTLPSpanExporter(url), self._ear)
            # Its sampler is the environment's: by default all, and what the caller says goes first.
            self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(self._courier))
        except (ValueError, RuntimeError, OSError) as error:
            self._ear.leave()
            raise ConfigError(
                f"spans cannot be sent ({error}): expected settings that OpenTelemetry takes; "
                "look at the variables that begin with OTEL_."
            ) from None
        self._tracer = self._provider.get_tracer("penstock", VERSION)
        self._model = ""
        self._queue: Queue[RequestStory | None] = Queue(max_queued)
        self._num_left_out = 0  # requests, by the engine's thread
        self._num_spoilt = 0  # and by ours
        self._num_made = 0  # spans
        self._thread = threading.Thread(target=self._run, name="penstock-trace", daemon=True)

    def begin(self, model: str) -> None:
        """The engine is there."""
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
                log.warning("requests end faster than spans are made: some are left out")

    def close(self) -> None:
        """Send what is left, as far as the collector takes it within a few seconds."""
        end = time.monotonic() + CLOSE_SECONDS
        if self._thread.is_alive():
            with suppress(Full):
                self._queue.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(max(0.0, end - time.monotonic()))
        num_lost = self._num_made - self._courier.num_taken
        num_left_out = self._num_left_out + self._num_spoilt
        if num_left_out or num_lost:
            log.warning(
                "%d requests were left out of tracing, and %d spans have not reached %s",
                num_left_out,
                num_lost,
                self._url,
            )
        if not self._thread.is_alive():  # else it still tries, and goes with the process
            self._ear.leave()

    def _run(self) -> None:
        while (told := self._queue.get()) is not None:
            # Taken anew each time: the wall clock is set right now and then.
            offset_ns = time.time_ns() - time.monotonic_ns()
            try:
                self._num_made += emit(self._tracer, told, model=self._model, offset_ns=offset_ns)
            except Exception:
                self._num_spoilt += 1
                log.debug("a request's spans could not be made", exc_info=True)
        self._provider.shutdown()  # takes as long as the collector: `close` does not wait for all


class _Courier(SpanExporter):
    """Hands batches on, and counts what is taken."""

    def __init__(self, exporter: SpanExporter, ear: _Ear) -> None:
        self._exporter = exporter
        self._ear = ear
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_taken += len(spans)
            self._ear.works_again()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Ear(logging.Handler):
    """Hears what OpenTelemetry says, every few seconds while something is wrong; tells it once."""

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
        # Of a header that it cannot read it repeats all, and that is where credentials are.
        is_header = record.name == "opentelemetry.util.re"
        said = str(record.msg) if is_header else record.getMessage()
        reason = "".join(c if c.isprintable() else " " for c in said[:_MAX_REASON_CHARS])
        now = time.monotonic()
        if self._is_told or now < self._quiet_until:
            log.debug("spans to %s: %s", self._url, reason)
            return
        self._is_told, self._quiet_until = True, now + _QUIET_SECONDS
        log.warning("spans to %s are in trouble, serving goes on: %s", self._url, reason)

    def works_again(self) -> None:
        if self._is_told:
            self._is_told = False
            log.info("%s takes spans", self._url)


def _resource() -> Resource:
    """Who sends. The environment wins, and the command line stays here: a key may stand in it."""
    ours = Resource.create({SERVICE_NAME: "penstock", SERVICE_VERSION: VERSION})
    merged = ours.merge(OTELResourceDetector().detect())
    kept = {
        name: value
        for name, value in merged.attributes.items()
        if not name.startswith("process.command")
    }
    return Resource(kept, merged.schema_url)
