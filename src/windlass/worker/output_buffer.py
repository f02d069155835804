"""Collects what a worker and its handlers print, bounded and by attempt, until it is sent.

Adding output never blocks, from any thread, and costs little when output is dropped. Four limits hold: bytes per
second (with a burst), bytes per attempt, bytes that wait while nothing can be sent, and bytes per line. Output beyond
them is dropped and its lines are counted. The last dropped lines are kept: they are sent when the rate allows it again,
or when their attempt ends, because the end of an output usually explains it.

Lines are masked when they are taken: known secrets by value, also those that continue on the next line of the batch,
and the hidden parts of the attempt's payload.
"""

import contextlib
import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from windlass.model.payload_privacy import PayloadPrivacy
from windlass.model.redaction import mask_known_lines
from windlass.model.task import Claim, storable
from windlass.model.worker_log import MAX_CHUNKS, MAX_LINE_CHARACTERS, AttemptKey, LogChunk
from windlass.worker.nonblocking_stderr import standard_error

# Bytes that wait to be sent: half a minute at the default rate, and all the memory that an outage costs.
MAX_WAITING_BYTES = 1 << 20
# The end of dropped output is kept, up to this size: per attempt, and in all.
MAX_TAIL_BYTES = 16 << 10
MAX_TAILS_BYTES = 4 << 20
# A burst of this many seconds' worth of output is accepted.
BURST_S = 16.0
# Ends of dropped outputs have a rate of their own, this share of the other: otherwise nothing would be left for them.
TAIL_SHARE = 0.5
# A longer line is cut. Twice what is sent: a secret that begins in the sent part is masked as a whole.
MAX_LINE_BYTES = 2 * MAX_LINE_CHARACTERS
# Bytes of lines in one batch: JSON escapes make it larger, at most to six times its size.
MAX_BATCH_BYTES = 128 << 10
MAX_BATCH_LINES = 5_000

# Texts that finalisers print while their thread adds output. More are dropped.
MAX_REENTERED = 100

# The attempt that the current code belongs to, for handlers in the worker's own process.
current_attempt: ContextVar[AttemptKey | None] = ContextVar("current_attempt", default=None)


@dataclass(frozen=True, slots=True)
class OutputLimits:
    bytes_per_s: float = 32_768.0
    bytes_per_attempt: int = 1 << 20


@dataclass(slots=True)
class _WaitingLine:
    stream: "_OutputStream"
    at: float
    content: bytes
    # Lines before it that are not sent.
    dropped: int = 0


@dataclass(slots=True)
class _OutputStream:
    """The output of one attempt, or of the worker itself (key None)."""

    key: AttemptKey | None
    claim: Claim | None = None
    privacy: PayloadPrivacy = field(default_factory=PayloadPrivacy)
    sent_bytes: int = 0
    # The beginning of a line whose end has not been printed; or the rest of that line is discarded.
    partial: bytes = b""
    is_line_cut: bool = False
    dropped: int = 0
    # The end of the dropped output: whole lines, which are among the counted ones.
    tail: bytes = b""
    _filter: Callable[[str], str] | None = None

    def hide(self, text: str) -> str:
        """The text without the hidden parts of the attempt's payload."""
        if self.claim is None or not self.privacy.hides(self.claim.queue):
            return text
        if self._filter is None:
            self._filter = self.privacy.text_filter(self.claim.queue, self.claim.payload)
        return self._filter(text)


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Lines that are sent in one call. A repeated call has the same id."""

    lines: list[_WaitingLine]
    id: UUID = field(default_factory=uuid4)

    def chunks(self, now: float) -> list[LogChunk]:
        """Masked, one chunk per attempt, in the order of their first lines."""
        by_key: dict[AttemptKey | None, list[_WaitingLine]] = {}
        for line in self.lines:
            by_key.setdefault(line.stream.key, []).append(line)
        chunks: list[LogChunk] = []
        for key, lines in by_key.items():
            start = 0
            # A gap begins a new chunk: its count belongs before the chunk's first line.
            for end in [*(n for n, line in enumerate(lines) if line.dropped and n > 0), len(lines)]:
                chunks.append(_chunk(key, lines[start:end], now))
                start = end
        return chunks


def _chunk(key: AttemptKey | None, lines: list[_WaitingLine], now: float) -> LogChunk:
    return LogChunk(
        tuple(_masked_lines(lines)),
        tuple(max(0, round(1000 * (now - line.at))) for line in lines),
        key.task_id if key is not None else None,
        key.attempt if key is not None else None,
        lines[0].dropped,
    )


def _masked_lines(lines: list[_WaitingLine]) -> Iterator[str]:
    # A program that shows progress returns to the start of its line: only the last state counts.
    texts = [line.content.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
    for line, masked in zip(lines, mask_known_lines(texts), strict=True):
        text = storable(line.stream.hide(masked))
        # Cut after masking: a part of a secret is secret too.
        yield text if len(text) <= MAX_LINE_CHARACTERS else f"{text[:MAX_LINE_CHARACTERS]} [line cut]"


class _TokenBucket:
    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = burst, clock()

    @property
    def tokens(self) -> float:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return self._tokens

    def use(self, count: int) -> None:
        self._tokens -= count


class OutputBuffer:
    """`privacy`: the parts of payloads that must not be sent, by queue."""

    def __init__(
        self,
        limits: OutputLimits | None = None,
        privacy: PayloadPrivacy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or OutputLimits()
        self._privacy = privacy or PayloadPrivacy()
        self._clock = clock
        rate = self._limits.bytes_per_s
        self._bucket = _TokenBucket(rate, BURST_S * rate, clock)
        self._tail_bucket = _TokenBucket(TAIL_SHARE * rate, TAIL_SHARE * BURST_S * rate, clock)
        # Less than either bucket can hold.
        self._max_tail_bytes = min(MAX_TAIL_BYTES, int(TAIL_SHARE * BURST_S * rate / 2))
        # Re-entrant: the garbage collector may run a finaliser that prints, on a thread that is in here already.
        self._lock = threading.RLock()
        self._is_held = False
        self._reentered: deque[tuple[bytes, AttemptKey | None]] = deque(maxlen=MAX_REENTERED)
        self._own = _OutputStream(None)
        self._streams: dict[AttemptKey, _OutputStream] = {}
        self._waiting: deque[_WaitingLine] = deque()
        self._waiting_bytes = 0
        # Dropped lines that no later line could report yet: their attempts ended.
        self._unreported = 0

    def begin(self, claim: Claim) -> AttemptKey:
        """An attempt begins. Output with its key is kept apart until `end`."""
        key = AttemptKey(claim.task_id, claim.attempt)
        with self._exclusive():
            self._streams[key] = _OutputStream(key, claim, self._privacy)
        return key

    def end(self, key: AttemptKey) -> None:
        with self._exclusive():
            stream = self._streams.pop(key, None)
            if stream is not None:
                self._close(stream)

    def close(self) -> None:
        """The worker stops: complete its own last line."""
        with self._exclusive():
            for stream in [*self._streams.values(), self._own]:
                self._close(stream)
            self._streams.clear()

    def add(self, data: bytes, key: AttemptKey | None = None, dropped: int = 0) -> None:
        """Output of an attempt; of the worker itself without a key, or if the attempt has ended.

        `dropped`: lines before it that the sender dropped.
        """
        with self._lock:
            if self._is_held:
                self._reentered.append((data, key))
                return
            with self._exclusive():
                if dropped > 0:
                    self._stream(key).dropped += dropped
                self._add(data, key)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            self._is_held = True
            try:
                yield
                # Bounded: a finaliser that prints runs once.
                while self._reentered:
                    self._add(*self._reentered.popleft())
            finally:
                self._is_held = False

    @property
    def is_empty(self) -> bool:
        with self._exclusive():
            return not self._waiting and not any(each.tail for each in (self._own, *self._streams.values()))

    def take(self) -> LogBatch | None:
        """Remove and return the next batch, or None. The caller keeps the batch until a call with it succeeds."""
        with self._exclusive():
            self._send_tails()
            lines: list[_WaitingLine] = []
            size_bytes, keys = 0, set()
            gaps = 0
            while self._waiting and size_bytes < MAX_BATCH_BYTES and len(lines) < MAX_BATCH_LINES:
                line = self._waiting[0]
                gaps += line.dropped > 0
                keys.add(line.stream.key)
                if len(keys) + gaps > MAX_CHUNKS:
                    break
                lines.append(self._waiting.popleft())
                size_bytes += len(line.content) + 1
            self._waiting_bytes -= size_bytes
        return LogBatch(lines) if lines else None

    def count_lost(self, batch: LogBatch) -> int:
        """A batch is not sent: the next line of each attempt, or of the worker itself, reports how many are missing."""
        lost: dict[AttemptKey | None, int] = {}
        for line in batch.lines:
            lost[line.stream.key] = lost.get(line.stream.key, 0) + 1 + line.dropped
        with self._exclusive():
            for key, count in lost.items():
                waiting = next((line for line in self._waiting if line.stream.key == key), None)
                if waiting is not None:
                    waiting.dropped += count
                elif key is None or key in self._streams:
                    self._stream(key).dropped += count
                else:
                    self._unreported += count
        return sum(lost.values())

    # All below: the caller holds the lock.

    def _stream(self, key: AttemptKey | None) -> _OutputStream:
        return self._streams.get(key, self._own) if key is not None else self._own

    def _add(self, data: bytes, key: AttemptKey | None) -> None:
        stream = self._stream(key)
        if stream.is_line_cut:
            _, newline, data = data.partition(b"\n")
            stream.is_line_cut = not newline
        whole, newline, rest = (stream.partial + data).rpartition(b"\n")
        # Progress without line feeds: only its last state is kept.
        rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if len(rest) > MAX_LINE_BYTES:
            whole, newline, rest = whole + newline + rest, b"\n", b""
            stream.is_line_cut = True
        stream.partial = rest
        if newline:
            self._admit(stream, whole)

    def _admit(self, stream: _OutputStream, whole: bytes) -> None:
        """Accept as many of these complete lines as the limits allow, and drop the rest."""
        allowed = self._allowed(stream)
        if len(whole) < allowed:
            self._accept(stream, whole, self._bucket)
            return
        end = whole.rfind(b"\n", 0, max(0, int(allowed)))
        if end > 0:
            self._accept(stream, whole[:end], self._bucket)
            whole = whole[end + 1 :]
        stream.dropped += whole.count(b"\n") + 1
        max_tail = min(self._max_tail_bytes, MAX_TAILS_BYTES // (1 + len(self._streams)))
        tail = (stream.tail + whole[-max_tail:] + b"\n")[-max_tail:]
        # Only whole lines.
        stream.tail = tail if len(tail) < max_tail else tail[tail.find(b"\n") + 1 :]

    def _allowed(self, stream: _OutputStream) -> float:
        allowed = min(self._bucket.tokens, MAX_WAITING_BYTES - self._waiting_bytes)
        return allowed if stream.key is None else min(allowed, self._limits.bytes_per_attempt - stream.sent_bytes)

    def _accept(self, stream: _OutputStream, whole: bytes, bucket: _TokenBucket) -> None:
        bucket.use(len(whole) + 1)
        stream.sent_bytes += len(whole) + 1
        now = self._clock()
        stream.tail = b""
        if stream.key is None:
            stream.dropped, self._unreported = stream.dropped + self._unreported, 0
        for line in whole.split(b"\n"):
            content = line[:MAX_LINE_BYTES]
            self._waiting.append(_WaitingLine(stream, now, content, stream.dropped))
            self._waiting_bytes += len(content) + 1
            stream.dropped = 0

    def _send_tails(self) -> None:
        """The ends of outputs that were dropped because of the rate, once it allows them."""
        for stream in (self._own, *self._streams.values()):
            if stream.tail and len(stream.tail) < self._allowed(stream):
                self._accept_tail(stream, self._bucket)

    def _accept_tail(self, stream: _OutputStream, bucket: _TokenBucket) -> None:
        whole = stream.tail.removesuffix(b"\n")
        stream.dropped -= whole.count(b"\n") + 1
        self._accept(stream, whole, bucket)

    def _close(self, stream: _OutputStream) -> None:
        if stream.partial:
            partial, stream.partial = stream.partial, b""
            self._admit(stream, partial)
        has_room = self._waiting_bytes + len(stream.tail) <= MAX_WAITING_BYTES + MAX_TAILS_BYTES
        if stream.tail and has_room and len(stream.tail) <= self._tail_bucket.tokens:
            self._accept_tail(stream, self._tail_bucket)
        self._unreported += stream.dropped
        stream.dropped, stream.tail = 0, b""


class _CopiedStream(io.TextIOBase):
    """Standard output or error whose text is also added to a buffer, as output of the current attempt."""

    def __init__(self, stream: Any, add: Callable[[bytes, AttemptKey | None], None]) -> None:
        self._stream = stream
        self._add = add

    def write(self, text: str) -> int:
        written: int = self._stream.write(text)
        self._add(text.encode(errors="backslashreplace"), current_attempt.get())
        return written

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def captured_output(buffer: OutputBuffer) -> Iterator[None]:
    """Add to `buffer` what this process prints, and what it forwards from its children.

    Text that code in this process writes past Python's streams, to the file descriptors, is not captured.
    """
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _CopiedStream(stdout, buffer.add), _CopiedStream(stderr, buffer.add)
    standard_error.copy_to = buffer.add
    try:
        yield
    finally:
        standard_error.copy_to = None
        sys.stdout, sys.stderr = stdout, stderr
