"""Finds tool calls in an answer while it is generated.

    parser = CallParser(HERMES, tools)
    for text in answer: deltas += parser.feed(text)
    deltas += parser.finish()

A call is reported once its name is known and its arguments begin; then its arguments, as they are
written. Text that turns out not to be a call is content, as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.server.tools.formats import ToolFormat
from penstock.server.tools.reading import SPACE, num_shared
from penstock.server.tools.tool import Tool

_MAX_HEADER_CHARS = 1 << 16  # of a call whose name is not known yet
_MAX_SPACE_CHARS = 1 << 10  # before a call, or before its object: models may write nothing else


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of a call: first its id and name, then pieces of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = str | CallDelta


class CallParser:
    """`max_calls`: those after it are left out."""

    def __init__(
        self, form: ToolFormat, tools: Sequence[Tool], max_calls: int | None = None
    ) -> None:
        self._form = form
        self._tools = tools
        self._names = frozenset(tool.name for tool in tools)
        self._max_calls = max_calls
        self._held = ""  # not decided yet
        self._raw = ""  # where a call may have begun: content, if it did not
        self._reader = form.reader(tools)
        self._is_told = False  # whether the call that is being read has been reported
        # Without a beginning, only the start of an answer may be a call.
        self._state = self._content if form.begin else self._before
        self._out: list[Delta] = []
        self._is_cut = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        while self._held and self._state():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """What is left when the answer has ended."""
        if self._state == self._call and not self._is_told:
            self._raw += self._reader.text
        if self._state in (self._before, self._call):
            left = self._raw + self._held
            if not left.strip(SPACE + ",;"):
                left = "" if self.num_calls else left
        else:
            left = self._held
        self._held = self._raw = ""
        if self._state == self._call and self._is_told:
            left = ""
            self._is_cut = self._is_kept(self.num_calls)
        if left.strip() or not self.num_calls:
            self._say(left)
        self._state = self._rest
        return self._take()

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun that is not complete. One that is left out does not count."""
        return self._is_cut

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _say(self, text: str) -> None:
        if text:
            self._out.append(text)

    # Each state decides about the next part of what is held. It returns False if more is needed.

    def _rest(self) -> bool:
        self._say(self._held)
        self._held = ""
        return False

    def _content(self) -> bool:
        begin = self._form.begin
        place = self._held.find(begin)
        if place < 0:
            # Whitespace before a call is left out.
            keep = _num_before_space(self._held[: len(self._held) - num_shared(self._held, begin)])
            self._say(self._held[:keep])
            self._held = self._held[keep:]
            return False
        before = self._held[: _num_before_space(self._held[:place])]
        self._say(before)
        self._raw = self._held[len(before) : place + len(begin)]
        self._held = self._held[place + len(begin) :]
        self._state = self._before
        return True

    def _before(self) -> bool:
        """An object follows, or this is not a call."""
        ahead = self._held.lstrip(SPACE)
        if len(self._held) - len(ahead) > _MAX_SPACE_CHARS:
            return self._give_back("")
        opening = self._form.opening
        if opening and not self.num_calls:
            if len(ahead) < len(opening) and opening.startswith(ahead):
                return False
            ahead = ahead.removeprefix(opening).lstrip(SPACE)
        if not ahead:
            return False
        starts = self._form.starts(ahead)
        if starts is None:
            return False
        if not starts:
            return self._give_back("")
        taken = len(self._held) - len(ahead)
        self._raw += self._held[:taken]
        self._held = ahead
        self._reader, self._is_told = self._form.reader(self._tools), False
        self._state = self._call
        return True

    def _call(self) -> bool:
        reader = self._reader
        self._held = self._held[reader.feed(self._held) :]
        if not self._is_told:
            is_call = reader.name is not None and self._may_be(reader.name)
            if is_call and (reader.has_value or reader.is_complete):
                self._is_told = True
                self._tell(CallDelta(self.num_calls, "", self._form.new_id(), reader.name))
                if not reader.has_value:
                    self._tell(CallDelta(self.num_calls, "{}"))
            elif (
                (reader.name is not None and not is_call)
                or reader.is_complete
                or reader.is_broken
                or reader.num_chars > _MAX_HEADER_CHARS
            ):
                return self._give_back(reader.text)
        if self._is_told:
            piece = reader.take_value()
            if piece:
                self._tell(CallDelta(self.num_calls, piece))
        if reader.is_complete or reader.is_broken:
            self.num_calls += 1
            self._raw = ""
            self._state = self._after
            return True
        return False

    def _after(self) -> bool:
        """After a call: its end, a separator and the next call, or content."""
        self._held = ahead = self._held.lstrip(SPACE)
        form = self._form
        if not ahead:
            return False
        if form.separator and ahead.startswith(form.separator):
            self._held = ahead[len(form.separator) :]
            self._state = self._before
            return True
        if form.end and len(ahead) < len(form.end) and form.end.startswith(ahead):
            return False
        self._held = ahead.removeprefix(form.end)
        self._state = self._gap
        return True

    def _gap(self) -> bool:
        """Whitespace after a call is left out."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._content if self._form.begin else self._rest
        return bool(self._held)

    def _may_be(self, name: str) -> bool:
        # Without a beginning, an answer that is any other object looks like a call.
        return bool(self._form.begin) or name in self._names

    def _tell(self, delta: CallDelta) -> None:
        if self._is_kept(delta.index):
            self._out.append(delta)

    def _is_kept(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def _give_back(self, read: str) -> bool:
        """It was not a call."""
        self._say(self._raw + read)
        self._raw = ""
        self._state = self._content if self._form.begin else self._rest
        return True


def _num_before_space(text: str) -> int:
    """How many characters stand before the whitespace at the end, of which only so much counts."""
    return max(len(text.rstrip(SPACE)), len(text) - _MAX_SPACE_CHARS)
