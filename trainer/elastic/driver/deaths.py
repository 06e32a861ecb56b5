"""Records the deaths of workers, and chooses the one that the launcher reports as the cause. Used by `membership`.

A death is the unexpected end of a worker. The termination of a worker that missed a deadline also counts, unless the
worker had to exit anyway. A round is a period with a fixed assignment of ranks to workers. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasvc.trainer.elastic.driver.actions import Finish
from datasvc.trainer.elastic.driver.workers import Worker
from datasvc.trainer.launch.ranks.job import describe_end, exit_status_of
from datasvc.trainer.rendezvous.messages import ScriptError

# The exit status of ssh if it cannot reach the host.
_UNREACHABLE_STATUS = 255
# Limits on the report of the launcher: deaths listed besides the cause, and the length of a line of output.
_MAX_OTHERS = 8
_MAX_LINE_CHARACTERS = 200


@dataclass(frozen=True)
class Death:
    """The unexpected end of a worker.

    Args:
        worker: worker that ended.
        returncode: return code of its process; negative for a signal.
        trouble: cause, as text that follows the worker's name, such as "did not start in time"; None if `returncode`
            is the only description.
        has_started: whether its command has run. Also False if the worker missed a deadline and is terminated.
        last_line: last line of its output that is not blank; empty if there is none.
    """

    worker: Worker
    returncode: int
    trouble: str | None = None
    has_started: bool = True
    last_line: str = ""

    @property
    def is_program_error(self) -> bool:
        """Whether the program itself failed, not by a signal or by ssh, so that it may fail on every host."""
        return self.has_started and self.trouble is None and 0 < self.returncode != _UNREACHABLE_STATUS


@dataclass
class Deaths:
    """The deaths of a job, and the errors that programs have reported.

    Attributes:
        num_all: number of all deaths.
        since_round: deaths since the last round began, without those with status 0.
        errors: last error that each worker has reported, by the name of the worker.
    """

    num_all: int = 0
    since_round: list[Death] = field(default_factory=list)
    errors: dict[str, ScriptError] = field(default_factory=dict)

    def add(self, death: Death) -> None:
        """Record a death. A death with status 0 is counted, but is not reported as a failure."""
        self.num_all += 1
        if death.returncode:
            self.since_round.append(death)

    def ends_job(self, worker: str) -> bool:
        """Return whether the worker has reported an error that would occur in a new round too."""
        return worker in self.errors and self.errors[worker].ends_job

    def describe(self, death: Death) -> str:
        """Describe a death by a text that follows the worker's name, such as "exited with status 1"."""
        text = death.trouble or describe_end(death.returncode)
        error = self.errors.get(death.worker.name)
        if error is not None:
            return f"{text}: {error.text}"
        # A program that catches its own exception usually prints it last.
        if death.is_program_error and death.last_line:
            return f'{text} (its output ended with "{death.last_line[:_MAX_LINE_CHARACTERS]}")'
        return text

    def choose_cause(self) -> Death | None:
        """Return the most likely cause of the deaths since the last round began; None if there are none.

        It is the first death with a reported error, else the first death. But if none of the dead workers has been in
        a round, the first error of the program comes before other deaths, such as an unreachable host.
        """
        with_error = [death for death in self.since_round if death.worker.name in self.errors]
        # The loss of one member makes the programs of the other members fail. If members died, an error of a program
        # may therefore be a consequence, and does not come before other deaths.
        have_members_died = any(death.worker.may_have_state for death in self.since_round)
        program_errors = [death for death in self.since_round if death.is_program_error and not have_members_died]
        candidates = [*with_error, *program_errors, *self.since_round]
        return candidates[0] if candidates else None

    def finish(self, cause: Death, why: str = "") -> Finish:
        """Return the action that ends the job because of a death. `why` follows the description of the death."""
        status = exit_status_of(cause.returncode)
        return Finish(status, self.describe(cause) + why, cause.worker.name, self.list_others(cause))

    def list_others(self, cause: Death | None = None) -> tuple[str, ...]:
        """Return one line for each death since the last round began, except `cause`."""
        others = [
            f"{death.worker.describe()} {self.describe(death)}" for death in self.since_round if death is not cause
        ]
        if len(others) > _MAX_OTHERS:
            others[_MAX_OTHERS:] = [f"and {len(others) - _MAX_OTHERS} more"]
        return tuple(others)

    def cover_slots(self, slots: set[tuple[str, int]]) -> bool:
        """Return whether the program failed in each of these slots (host, slot), and no death has another cause."""
        # After another kind of death, such as an unreachable host, a new worker may succeed.
        failed = {(death.worker.host, death.worker.slot) for death in self.since_round}
        return bool(failed) and slots <= failed and all(death.is_program_error for death in self.since_round)
