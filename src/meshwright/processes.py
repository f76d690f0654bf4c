"""Several processes, one run: who is there, that all ask for the same, and who is missing, dead or silent.

Before JAX starts, every process calls process 0, which compares what they were asked to do and names whoever does not
come. The connections stay open while the run lasts: a process that ends or falls silent is named on all others, and they
stop. (JAX alone would wait in a collective, or abort without a name.)

Messages are JSON, one a line, over TCP.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.config import Refused, require

COME_S = 120.0
"""How long processes wait for each other at the start."""
SILENT_S = 30.0
"""A process that has not been heard for so long counts as dead."""


@dataclass(frozen=True)
class Place:
    """Which process of how many this one is, and where process 0 is called: host:port."""

    coordinator: str
    count: int
    index: int

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        require(
            bool(host) and port.isdecimal() and 0 < int(port) < 65536,
            f"--coordinator {self.coordinator!r} must be HOST:PORT, where process 0 can be called",
        )
        require(self.count >= 1, f"--processes {self.count} must be at least 1")
        require(
            0 <= self.index < self.count,
            f"--process-id {self.index} must be from 0 to {self.count - 1}, for --processes {self.count}",
        )

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass
class Crew:
    """The processes of a run, seen from one of them; process 0 has a line to each other, the others one to it."""

    place: Place
    told: dict[str, Any]
    """What process 0 decided for all."""
    _lines: dict[int, "_Line"]
    _silent_s: float
    _left: set[int] = field(default_factory=set)
    _answers: dict[str, dict[int, Any]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def agree(self, what: str, value: str) -> None:
        """Wait until every process has said its `value`; refuse, on all, where they are not equal."""
        if self.place.index:
            self._lines[0].send(agree=what, value=value)
            verdict = self._wait(what, 1)[0]
        else:
            values = {0: value} | self._wait(what, self.place.count - 1)
            other = next((i for i, one in sorted(values.items()) if one != value), None)
            verdict = "" if other is None else f"process {other} has {what} {values[other]}, process 0 has {value}"
            for line in self._lines.values():
                line.send(agree=what, value=verdict)
        require(not verdict, verdict)

    def _wait(self, what: str, count: int) -> dict[int, Any]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._answers.get(what, ())) >= count)
            return self._answers.pop(what)

    def watch(self) -> None:
        """From now on stop this process, by name of the culprit, when another one ends before it said so."""
        for index, line in self._lines.items():
            threading.Thread(target=self._listen, args=(index, line), daemon=True).start()
        threading.Thread(target=self._call, daemon=True).start()

    def _call(self) -> None:
        while True:
            time.sleep(self._silent_s / 10)
            for line in self._lines.values():
                line.send()

    def _listen(self, index: int, line: "_Line") -> None:
        while True:
            try:
                message = line.receive(self._silent_s)
            except TimeoutError:
                return self._stop(f"process {index} has not been heard for {self._silent_s:.0f} s", 1)
            if message is None:
                return None if index in self._left else self._stop(f"process {index} has died", 1)
            if "agree" in message:
                with self._changed:
                    self._answers.setdefault(message["agree"], {})[index] = message["value"]
                    self._changed.notify_all()
            if "stop" in message:
                return self._stop(message["stop"], message["status"])
            if "bye" in message:
                self._left.add(index)

    def _stop(self, text: str, status: int) -> None:
        """Tell the others, and end this process: its main thread may be waiting for what never comes."""
        for line in self._lines.values():
            line.send(stop=text, status=status)
        print(f"\nmeshwright: {text}; process {self.place.index} of {self.place.count} stops", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)

    def leave(self) -> None:
        """This process has done its part."""
        for line in self._lines.values():
            line.send(bye=True)

    def abandon(self, text: str, status: int) -> None:
        """End this process and all others, with the reason. Where another one has died, that is the reason."""
        time.sleep(0.5 if status == 1 else 0)  # a death shows as a failed collective too: let the listener name it
        for line in self._lines.values():
            line.send(stop=f"process {self.place.index} stopped: {text}", status=status)
        print(f"\nmeshwright: {text}", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


class _Line:
    """A connection that carries JSON objects."""

    def __init__(self, connection: socket.socket):
        self._connection, self._unread = connection, b""
        self._sending = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def send(self, **message: Any) -> None:
        """Send; to one who has left, nothing."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, within_s: float) -> dict[str, Any] | None:
        """The next message, None where the other end is gone; TimeoutError where nothing came `within_s`."""
        end = time.monotonic() + within_s
        while b"\n" not in self._unread:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            try:
                more = self._connection.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None


def join(
    place: Place, asked: dict[str, str], told: dict[str, Any], come_s: float = COME_S, silent_s: float = SILENT_S
) -> Crew:
    """Meet the other processes. `asked` must be equal on all (refused by name and values); `told` is process 0's word.

    Refuses, naming the process, where one does not come within `come_s`.
    """
    if place.index:
        crew = _called(place, asked, come_s, silent_s)
    else:
        crew = Crew(place, told, _gathered(place, asked, told, come_s), silent_s)
    crew.watch()
    return crew


def _gathered(place: Place, asked: dict[str, str], told: dict[str, Any], come_s: float) -> dict[int, _Line]:
    """Process 0: a line to every other process, each told to begin; or all told why not."""
    lines: dict[int, _Line] = {}
    try:
        with _listening(place) as listener:
            end = time.monotonic() + come_s
            while len(lines) < place.count - 1:
                listener.settimeout(max(end - time.monotonic(), 0.001))
                line = None
                try:
                    line = _Line(listener.accept()[0])
                    hello = line.receive(max(min(end - time.monotonic(), 5), 0.001))
                except TimeoutError:
                    hello = None
                if line is not None and hello and "process" in hello:
                    _admit(place, asked, lines, hello, line)
                    continue
                if line is not None:
                    line.close()
                if time.monotonic() >= end:
                    missing = [i for i in range(1, place.count) if i not in lines]
                    raise Refused(
                        f"{_processes(missing)} of {place.count} did not come to {place.coordinator} within"
                        f" {come_s:g} s: start {'it' if len(missing) == 1 else 'them'} with the same --coordinator"
                        " and --processes"
                    )
    except Refused as refusal:
        for line in lines.values():
            line.send(refused=str(refusal))
            line.close()
        raise
    for line in lines.values():
        line.send(told=told)
    return lines


def _admit(place: Place, asked: dict[str, str], lines: dict[int, _Line], hello: dict[str, Any], line: _Line) -> None:
    index, count, theirs = hello["process"], hello["processes"], hello["asked"]
    twice = index in lines or index == 0
    if not twice:
        lines[index] = line
    name = next((name for name in {**asked, **theirs} if asked.get(name) != theirs.get(name)), None)
    problem = (
        f"two processes call themselves --process-id {index}"
        if twice
        else f"process {index} was started with --processes {count}, process 0 with --processes {place.count}"
        if count != place.count
        else f"process {index} was asked for {name}={theirs.get(name)}, process 0 for {name}={asked.get(name)}:"
        " start all with the same configuration and software"
        if name is not None
        else ""
    )
    if problem:
        line.send(refused=problem)
        if twice:
            line.close()
        raise Refused(problem)


@contextlib.contextmanager
def _listening(place: Place) -> Iterator[socket.socket]:
    host, port = place.address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise Refused(f"--coordinator {place.coordinator}: {host} is not known here ({error.strerror})") from None
    try:
        try:
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != 99:  # EADDRNOTAVAIL: the name others call is not the name of an interface here
                raise
            listener = socket.create_server(("", port), family=family)
    except OSError as error:
        raise Refused(
            f"process 0 cannot listen at --coordinator {place.coordinator} ({error.strerror}); name a free port"
        ) from None
    with listener:
        yield listener


def _called(place: Place, asked: dict[str, str], come_s: float, silent_s: float) -> Crew:
    """Another process: call process 0 until it answers, say what was asked, and hear what it decides."""
    end = time.monotonic() + come_s
    while True:
        try:
            connection = socket.create_connection(place.address, timeout=max(end - time.monotonic(), 0.001))
            break
        except OSError as error:
            if time.monotonic() + 0.2 >= end:
                raise Refused(
                    f"process 0 was not found at {place.coordinator} within {come_s:g} s"
                    f" ({error.strerror or error}); start it, or correct --coordinator"
                ) from None
            time.sleep(0.2)
    line = _Line(connection)
    line.send(process=place.index, processes=place.count, asked=asked)
    try:
        answer = line.receive(come_s + 5)
    except TimeoutError:
        answer = None
    if answer is None or "told" not in answer:
        line.close()
        left = f"process 0 at {place.coordinator} left before all {place.count} processes had come"
        raise Refused(left if answer is None else str(answer.get("refused")))
    return Crew(place, answer["told"], {0: line}, silent_s)


def _processes(indices: list[int]) -> str:
    return f"process {indices[0]}" if len(indices) == 1 else f"processes {', '.join(map(str, indices))}"


def free_port(host: str) -> int:
    """A port of this machine that nothing listens at, as far as can be known."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
