"""Output that is passed through: a real pipe at one end, real files at the other."""

import datetime as dt
import io
import os
import queue
import threading
from pathlib import Path

import pytest

from datasvc.trainer.launch.ranks.rank_output import LinePump

MARK = b"\x1emark "


class Screen:
    """Hands over what is written as it comes."""

    def __init__(self):
        self.lines = queue.SimpleQueue()

    def write(self, line):
        self.lines.put(line)

    def next(self):
        return self.lines.get(timeout=30)


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    with open(write_end, "wb", buffering=0) as file:
        yield os.fdopen(read_end, "rb"), file


def pump_all(content, **settings):
    """Passes everything through; what the screen showed, and the last lines."""
    read_end, write_end = os.pipe()
    screen = io.BytesIO()
    pump = LinePump(os.fdopen(read_end, "rb"), screen.write, prefix=b"[0] ", **settings)
    with open(write_end, "wb", buffering=0) as file:
        file.write(content)
    last_lines = pump.last_lines(timeout_s=30)
    return screen.getvalue(), last_lines


def test_a_progress_bar_is_shown_while_it_grows(pipe):
    source, rank = pipe
    screen = Screen()
    LinePump(source, screen.write, prefix=b"[0] ")
    rank.write(b"10%\r20%\r")
    assert screen.next() == b"[0] 10%\r"
    rank.write(b"30%\r\n")
    assert screen.next() == b"[0] 20%\r"
    assert screen.next() == b"[0] 30%\r\n"


def test_a_line_begins_with_the_time_when_it_came_on_the_screen_alone():
    shown, last_lines = pump_all(b"one\n", read_clock=lambda: dt.datetime(2026, 1, 2, 3, 4, 5, 678900))  # noqa: DTZ001
    assert shown == b"2026-01-02 03:04:05.678 [0] one\n"
    assert last_lines == ["one"]


def test_of_a_progress_bar_only_the_last_state_is_among_the_last_lines():
    shown, last_lines = pump_all(b"".join(b"first\n" if i == 0 else b"%d%%\r" % i for i in range(100)) + b"done\n")
    assert last_lines == ["first", "done"]
    assert shown.count(b"%\r") == 99


def test_a_line_without_end_is_passed_on_in_pieces_and_the_file_has_it_whole(tmp_path, pipe):
    source, rank = pipe
    screen = Screen()
    file = (tmp_path / "out").open("wb")
    pump = LinePump(source, screen.write, [file], prefix=b"")
    content = b"x" * (1 << 20)
    writing = threading.Thread(target=rank.write, args=(content,))
    writing.start()
    # Something comes although the line has not ended.
    assert len(screen.next()) <= 1 << 18
    writing.join(30)
    rank.write(b"\n")
    rank.close()
    assert all(len(line) <= 2000 for line in pump.last_lines(timeout_s=30))
    assert (tmp_path / "out").read_bytes() == content + b"\n"


@pytest.mark.parametrize("length", [0, 5, *range((1 << 16) - 20, (1 << 16) + 20), 1 << 17])
def test_a_report_after_a_line_of_any_length_is_handled_and_not_shown(length):
    reports = []
    content = b"y" * length + MARK + b"ended 0\n"
    shown, _ = pump_all(content, mark=MARK, on_report=reports.append)
    assert reports == ["ended 0"]
    assert shown.replace(b"[0] ", b"").replace(b"\n", b"") == b"y" * length


def test_an_output_file_that_cannot_be_written_is_closed_with_a_message_and_the_rank_continues(capfd, tmp_path):
    with Path("/dev/full").open("wb") as full, (tmp_path / "good").open("wb") as good:
        shown, last_lines = pump_all(b"a\nb\nc\n", files=[full, good])
    assert (shown, last_lines) == (b"[0] a\n[0] b\n[0] c\n", ["a", "b", "c"])
    assert (tmp_path / "good").read_bytes() == b"a\nb\nc\n"
    assert capfd.readouterr().err == (
        "datasvc-run: cannot write /dev/full any more: [Errno 28] No space left on device\n"
    )


def test_a_screen_that_cannot_be_written_is_given_up_and_the_file_is_not(capfd, tmp_path):
    read_end, write_end = os.pipe()
    with Path("/dev/full").open("wb", buffering=0) as full, (tmp_path / "out").open("wb") as file:
        pump = LinePump(os.fdopen(read_end, "rb"), full.write, [file], prefix=b"")
        with open(write_end, "wb") as rank:
            rank.write(b"a\nb\n")
        pump.last_lines(timeout_s=30)
    assert (tmp_path / "out").read_bytes() == b"a\nb\n"
    assert capfd.readouterr().err.count("cannot print the output of a rank any more") == 1
