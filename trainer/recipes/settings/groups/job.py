"""The groups of settings of the job: checkpoints that it saves and starts from, caches, ranks and reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.ledger.skipped_steps import parse_skip
from datasvc.models.saving.save_policy import parse_duration, parse_policy
from datasvc.repository.logs.references import check_name, parse_reference
from datasvc.trainer.recipes.reporting.metric_logs import check_logs
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup, naming


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(SettingGroup):
    """When and how a run saves its state.

    Attributes:
        name: model name of the checkpoints.
        checkpoint_every: steps between checkpoints; the end of the run always commits one.
        max_stall: maximum share of the training time that checkpoints take, such as "3%"; to stay below it,
            checkpoints are made less often. None: no limit.
        checkpoint_overlap: what happens to a checkpoint while earlier ones are being written: "queue": it is
            written after them, and the run waits if there are two; "refuse": it is skipped.
        codec: storage of weights: "none": raw; "planes": compressed; "delta": the difference to the previous
            checkpoint, where that is smaller.
        grace: maximum time from SIGTERM or Ctrl-C to the end of the run, which saves a last checkpoint.
        local_checkpoints: folder on a disk of each node for checkpoints between those in the repository; each is kept
            on two nodes. A run that is started again continues the newest, also after the loss of a node. None: none.
        every_local: steps between two checkpoints on the disks of the nodes; less than `checkpoint_every`.
    """

    title: ClassVar[str] = "checkpoints"

    name: Annotated[str, Metavar("NAME")]
    checkpoint_every: Annotated[int, Metavar("STEPS"), Range(1)] = 1000
    max_stall: Annotated[str | None, Metavar("PERCENT")] = None
    # A test compares the choices with `OVERLAPS` and `CODECS`, whose modules import torch.
    checkpoint_overlap: Literal["queue", "refuse"] = "queue"
    codec: Literal["none", "planes", "delta"] = "delta"
    grace: Annotated[str, Metavar("DURATION")] = "30s"
    local_checkpoints: Annotated[str | None, Metavar("FOLDER")] = None
    every_local: Annotated[int | None, Metavar("STEPS"), Range(1)] = None

    def check(self) -> None:
        """Check the name, the forms of share and duration, and that the settings of the nodes go together."""
        check_name(self.name, "model")
        parse_policy(self.checkpoint_every, self.max_stall)
        parse_duration(self.grace)
        if (self.local_checkpoints is None) != (self.every_local is None):
            raise ConfigError(
                f"local_checkpoints is {self.local_checkpoints!r} and every_local is {self.every_local!r}; give both "
                "--local-checkpoints FOLDER and --every-local STEPS, or neither"
            )
        if self.local_checkpoints == "":
            raise ConfigError("local_checkpoints is empty; give a folder on a disk of the node, such as /nvme/ckpt")
        if self.every_local is not None and self.every_local >= self.checkpoint_every:
            raise ConfigError(
                f"every_local is {self.every_local} and checkpoint_every is {self.checkpoint_every}: each checkpoint "
                "in the repository is on the nodes too, so there would be none between two of them; give fewer steps "
                "for --every-local, or leave out --local-checkpoints"
            )


@dataclass(frozen=True, kw_only=True)
class StartSettings(SettingGroup):
    """Whether a run continues a version, or takes its weights.

    Attributes:
        resume: "auto" continues the newest version of `name` if there is one; "never" starts a new run; a model
            version such as "digits-cnn@3" continues that version.
        init_from: model version whose weights a new run starts with, such as "digits-cnn@3", for fine-tuning on other
            data; a run that continues a checkpoint ignores it. None: random weights.
        init_exclude: tensors that keep their random weights with `init_from`, such as "head": names, prefixes of
            whole segments, or patterns with `*`.
        skip: steps after the start whose batches are not trained on, such as "1200-1210,1300"; or samples of the
            batch of a step, "1205:0-31". A step of which nothing is left changes no weight, but counts. Later steps
            keep their batches. The checkpoints have the skipped positions, so a resumed run needs no `skip`.
    """

    title: ClassVar[str] = "start of the run"

    resume: Annotated[str, Metavar("{auto,never,NAME@VERSION}")] = "auto"
    init_from: Annotated[str | None, Metavar("NAME@VERSION")] = None
    init_exclude: Annotated[tuple[str, ...], Metavar("TENSOR")] = ()
    skip: Annotated[str | None, Metavar("STEPS")] = None

    def check(self) -> None:
        """Check the forms of versions and steps, and that at most one version is given."""
        if self.skip is not None:
            parse_skip(self.skip)
        if self.resume not in ("auto", "never") and "@" not in self.resume:
            raise ConfigError(
                f"resume is {self.resume!r}; expected 'auto', 'never' or a version such as 'digits-cnn@3'"
            )
        with naming("resume", self.resume):
            parse_reference(self.resume, "model")
        if self.init_from is not None:
            with naming("init_from", self.init_from):
                parse_reference(self.init_from, "model")
            if self.resume not in ("auto", "never"):
                raise ConfigError(
                    f"resume is {self.resume!r} and init_from is {self.init_from!r}; give one of them: a run that "
                    "continues a version has its weights"
                )
        elif self.init_exclude:
            raise ConfigError("init_exclude names tensors of the version of --init-from; give that too")


@dataclass(frozen=True, kw_only=True)
class CacheSettings(SettingGroup):
    """Where a run reads data and checkpoints from.

    Attributes:
        cache: folder of the node's cache; None or empty: the repository is read directly.
        cache_budget: budget of the node's cache, such as "50GB"; None: its present budget.
        peers: nodes to read from before the repository, written as for `datasvc stage --peers`; "ranks": the nodes of
            this job, each with a server that the job starts; None: no peers.
        tenant: tenant of the cache whose quota this run is charged to; see `datasvc cache quota`.
    """

    title: ClassVar[str] = "cache of the node"

    cache: Annotated[str | None, Metavar("FOLDER")] = None
    cache_budget: Annotated[str | None, Metavar("SIZE")] = None
    peers: Annotated[str | None, Metavar("{ranks,NODES}")] = None
    tenant: Annotated[str, Metavar("NAME")] = "default"

    def check(self) -> None:
        """Check that the settings of a cache come with its folder, and the forms of tenant and budget."""
        check_name(self.tenant, "tenant")
        if self.tenant != "default" and not self.cache:
            raise ConfigError(
                "tenant is a tenant of a node cache: set its folder with --cache, or give --tenant default"
            )
        if self.peers is not None and not self.cache:
            raise ConfigError("peers need a node cache: set its folder with --cache, or give --peers ''")
        if self.cache_budget is not None:
            if not self.cache:
                raise ConfigError(
                    "cache_budget is the budget of a node cache: set its folder with --cache, or give "
                    "--cache-budget ''"
                )
            # Imported here, because most runs have no budget, and need the cache only after this check.
            from datasvc.cache import parse_budget

            with naming("cache_budget", self.cache_budget):
                parse_budget(self.cache_budget, Path("/"))  # any folder: only the form of the budget is checked


@dataclass(frozen=True, kw_only=True)
class RankSettings(SettingGroup):
    """How the ranks of a job train together.

    Attributes:
        elastic: whether the run goes on when ranks fail, leave or join, for jobs that are started with `datasvc-run
            --min-num-proc`; see docs/how-to/elastic.md.
        commit_every: for an elastic run: steps between copies of the state to host memory. At a copy, ranks may join
            and leave. After a failure that leaves no rank with a whole state, the remaining ranks repeat the steps
            since the newest copy; so they do with a --compression with residuals, NCCL, and some
            rounds of --sync.
    """

    title: ClassVar[str] = "ranks"

    elastic: bool = False
    commit_every: Annotated[int, Metavar("STEPS"), Range(1)] = 10

    def check(self) -> None:
        """Check that copies are made."""
        if not self.elastic and self.commit_every != RankSettings.commit_every:
            raise ConfigError(
                f"commit_every is {self.commit_every}, and only an elastic run copies its state; give --elastic, or "
                f"leave it at {RankSettings.commit_every}"
            )


@dataclass(frozen=True, kw_only=True)
class ReportSettings(SettingGroup):
    """What a run reports, and where.

    Attributes:
        run_log: write a log of the run to the repository, which `datasvc runs` and `datasvc ui` show.
        log_to: experiment trackers: "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:EXPERIMENT".
        signals: record the loss of every sample, in 2 bytes a sample and epoch, for `repo.datasets`' columns; needs
            the log of the run. None: nothing is recorded.
        report_every: steps between reports; each report waits for the device.
        metrics_port: port on which the first rank of a node serves the metrics of its loaders for Prometheus; the
            next ranks of the node use the next ports. None: no metrics.
        profile: file for a trace of the loader's steps, written at the end of each epoch together with a printed
            report; with several ranks each has its own file, such as `trace.0.json`. None: no trace.
    """

    title: ClassVar[str] = "reports"

    run_log: bool = True
    log_to: Annotated[tuple[str, ...], Metavar("TRACKER:TARGET")] = ()
    signals: Literal["loss"] | None = None
    report_every: Annotated[int, Metavar("STEPS"), Range(1)] = 1
    metrics_port: Annotated[int | None, Metavar("PORT"), Range(1)] = None
    profile: Annotated[str | None, Metavar("FILE")] = None

    def check(self) -> None:
        """Check the trackers and signals, and that the folder of the trace exists."""
        check_logs(self.log_to)
        if self.signals is not None and not self.run_log:
            raise ConfigError("signals belong to the log of the run; leave out --no-run-log, or --signals")
        # Check the folder now: the trace is written at the end of an epoch, which may be hours away.
        if self.profile is not None and not Path(self.profile).absolute().parent.is_dir():
            raise ConfigError(f"profile is {self.profile!r}, and its folder does not exist; create the folder first")
