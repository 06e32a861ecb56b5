"""Runs a program of torchtitan that is killed when it is about to save after a given step.

Arguments: the step, the program, and the program's own arguments.
"""

import os
import runpy
import signal
import sys

from datasvc.integrations.torchtitan import TitanVersions

killed_step, program = int(sys.argv[1]), sys.argv[2]
save = TitanVersions.save


def save_or_die(versions, curr_step, last_step=False):
    if curr_step == killed_step:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(versions, curr_step, last_step)


TitanVersions.save = save_or_die
sys.argv = sys.argv[2:]
runpy.run_path(program, run_name="__main__")
