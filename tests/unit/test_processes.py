"""What the tests' own helpers tell of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from support.doubles.processes import background_job, children_of, command_of, default_signals, runs

SAYS_SIGNALS = "import signal; print(*(signal.getsignal(number) is signal.SIG_IGN for number in (2, 3)))"


def _ignored() -> str:
    """Whether a process that is started now ignores SIGINT, and SIGQUIT."""
    return subprocess.check_output([sys.executable, "-c", SAYS_SIGNALS], text=True).strip()


def test_what_the_suite_starts_has_default_signals() -> None:
    assert _ignored() == "False False"


def test_what_a_background_job_starts() -> None:
    """It ignores what the job ignores, unless signals are made the default ones; the job itself still ignores them."""
    with background_job():
        assert _ignored() == "True True"
        with default_signals():
            assert _ignored() == "False False"
            for number in (signal.SIGINT, signal.SIGQUIT):
                os.kill(os.getpid(), number)
        assert _ignored() == "True True"


def test_a_process_that_ends() -> None:
    """It is no child that runs as soon as it has ended, whether its exit code has been asked for or not."""
    process = subprocess.Popen([sys.executable, "-c", "input()", "mark"], stdin=subprocess.PIPE)
    with process:
        [seen] = children_of(os.getpid(), "mark")
        assert seen.pid == process.pid and runs(seen) and "mark" in command_of(seen)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert seen.status() == psutil.STATUS_ZOMBIE
        assert not children_of(os.getpid(), "mark") and not runs(seen) and command_of(seen) == ""
    assert not children_of(process.pid) and not runs(seen) and command_of(seen) == ""
