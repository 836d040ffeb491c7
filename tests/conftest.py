"""Fixtures shared by the tests: the scripts under test, as modules."""

import importlib
import signal

import pytest

# A shell's background jobs, and nohup, ignore these, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(params=["pqn_fixed_atari", "pqn_abs_atari"])
def script(request):
    """Each script in turn, for what both of them must do."""
    return importlib.import_module(request.param)


@pytest.fixture
def abs_script():
    """The adaptive script, for the batch rule that only it has."""
    return importlib.import_module("pqn_abs_atari")
