"""Records why workers died and chooses the failure that the launcher reports. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from datasvc.trainer.elastic.driver.actions import Finish
from datasvc.trainer.elastic.driver.workers import Worker
from datasvc.trainer.launch.ranks.job import describe_end
from datasvc.trainer.rendezvous.messages import ScriptError

_UNREACHABLE_STATUS = 255
_MAX_OTHERS = 8
_MAX_LINE_CHARACTERS = 200


@dataclass(frozen=True)
class Death:
    """The end of a worker that should have gone on.

    Args:
        worker: whose.
        returncode: negative for a signal.
        trouble: what happened, in words that follow its name, where the return code does not say so.
        has_started: False if its command never ran.
        last_line: of its output; empty if it printed nothing.
    """

    worker: Worker
    returncode: int
    trouble: str | None = None
    has_started: bool = True
    last_line: str = ""

    @property
    def is_programs_fault(self) -> bool:
        """Whether the program says itself that it failed; it may do so everywhere."""
        return self.has_started and self.trouble is None and 0 < self.returncode != _UNREACHABLE_STATUS


@dataclass
class Deaths:
    """The deaths of a job, and the errors that programs have reported."""

    num_all: int = 0
    since_round: list[Death] = field(default_factory=list)
    errors: dict[str, ScriptError] = field(default_factory=dict)

    def add(self, death: Death) -> None:
        """Counts a death."""
        self.num_all += 1
        if death.returncode:
            self.since_round.append(death)

    def ends_job(self, worker: str) -> bool:
        """Whether the program of this worker has said that no new round would mend its error."""
        return worker in self.errors and self.errors[worker].ends_job

    def describe(self, death: Death) -> str:
        """What happened, in words that follow the worker's name."""
        how = death.trouble or describe_end(death.returncode)
        error = self.errors.get(death.worker.name)
        if error is not None:
            return f"{how}: {error.text}"
        # A program that catches its own exception prints it, if anything.
        if death.is_programs_fault and death.last_line:
            return f'{how} (its output ended with "{death.last_line[:_MAX_LINE_CHARACTERS]}")'
        return how

    def choose_cause(self) -> Death | None:
        """The first death in this round; one of an error of its own goes before those that may follow from it.

        Of workers that have been in no round the program's fault goes before a host out of reach.
        """
        own = [death for death in self.since_round if death.worker.name in self.errors]
        # A rank that is lost makes the other members fail, so among members the first death counts.
        has_members = any(death.worker.may_have_state for death in self.since_round)
        faults = [death for death in self.since_round if death.is_programs_fault and not has_members]
        return next(iter([*own, *faults, *self.since_round]), None)

    def finish(self, cause: Death, why: str = "") -> Finish:
        """The end of the job because of a death, with the others of this round."""
        status = cause.returncode if cause.returncode > 0 else 128 - cause.returncode
        return Finish(status, self.describe(cause) + why, cause.worker.name, self.list_others(cause))

    def list_others(self, cause: Death | None = None) -> tuple[str, ...]:
        """The deaths in this round but one, a line each."""
        others = [
            f"{death.worker.describe()} {self.describe(death)}" for death in self.since_round if death is not cause
        ]
        if len(others) > _MAX_OTHERS:
            others[_MAX_OTHERS:] = [f"and {len(others) - _MAX_OTHERS} more"]
        return tuple(others)

    def have_filled(self, slots: set[tuple[str, int]]) -> bool:
        """Whether all deaths in this round are the program's fault, and each of these slots of a host had one."""
        # After another death, of a host out of reach say, the program may still run on a host that comes.
        failed = {(each.worker.host, each.worker.slot) for each in self.since_round}
        return bool(failed) and slots <= failed and all(each.is_programs_fault for each in self.since_round)
