"""Read a trace file line by line, plain or gzipped, with bounded memory."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

from penstock.errors import TraceError
from penstock.units import MiB

MAX_LINE_BYTES = 64 * MiB
_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_LINES = 200
_HEAD_BYTES = 1 * MiB


class TraceLine(NamedTuple):
    number: int  # from 1
    text: str  # without the line break
    is_cut: bool  # the file ends without a line break here


class TraceFile:
    """A trace file. Its errors name the file and the line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The trace's name: the file name without .gz and its extension."""
        return self.path.name.removesuffix(".gz").rpartition(".")[0] or self.path.name

    def fault(self, number: int, sentence: str) -> TraceError:
        """An error about one line."""
        return TraceError(f"{self.path}, line {number}: {sentence}")

    def fault_of_all(self, sentence: str) -> TraceError:
        """An error about the whole file."""
        return TraceError(f"{self.path}: {sentence}")

    def lines(self) -> Iterator[TraceLine]:
        """All lines that are not blank. Raises TraceError."""
        number = 0
        with self._open() as file:
            while True:
                raw = self._read_line(file, number + 1)
                if not raw:
                    return
                number += 1
                if raw.isspace():
                    continue
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise self.fault(
                        number, "the bytes are not UTF-8: expected text, or gzipped text."
                    ) from None
                yield TraceLine(number, text.rstrip("\r\n"), not raw.endswith(b"\n"))

    def head(self) -> list[str]:
        """The first lines: enough to recognise the format."""
        found: list[str] = []
        num_bytes = 0
        for line in self.lines():
            found.append(line.text)
            num_bytes += len(line.text)
            if len(found) >= _HEAD_LINES or num_bytes >= _HEAD_BYTES:
                break
        return found

    def _open(self) -> IO[bytes]:
        try:
            with self.path.open("rb") as file:
                is_gzip = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            if is_gzip:
                return cast("IO[bytes]", gzip.open(self.path, "rb"))
            return self.path.open("rb")
        except IsADirectoryError:
            raise self.fault_of_all(
                "this is a folder: expected a trace file; give its path."
            ) from None
        except FileNotFoundError:
            raise self.fault_of_all(
                "there is no such file: expected a trace; check the path."
            ) from None
        except OSError as error:
            raise self.fault_of_all(f"it cannot be opened ({error.strerror or error}).") from None

    def _read_line(self, file: IO[bytes], number: int) -> bytes:
        try:
            raw = file.readline(MAX_LINE_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise self.fault(
                number, "the gzip data is damaged or cut off here; copy the file again."
            ) from None
        except OSError as error:
            raise self.fault(number, f"it cannot be read ({error.strerror or error}).") from None
        if len(raw) > MAX_LINE_BYTES:
            raise self.fault(
                number,
                f"longer than {MAX_LINE_BYTES // MiB} MiB: expected one request per line; check "
                "that this is a trace and has line breaks.",
            )
        return raw
