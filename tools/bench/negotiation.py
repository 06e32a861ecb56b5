"""What the engine's negotiation costs by the number of ranks: bits of known requests beside messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

import datasvc.trainer as hvd
from datasvc.trainer.engine.execution.transport import GroupTransport
from datasvc.trainer.engine.negotiation.agreement import Agreement
from datasvc.trainer.engine.negotiation.requests import (
    CollectiveKind,
    CycleMessage,
    Request,
    decode_message,
    encode_message,
)
from tools.bench.ranks import OWN_NETWORK, Step, has_own_network, loopback_bytes, say, time_block
from tools.bench.runner import ROOT, Options, Report, bench, call_command, environment, turns

BITS, MESSAGES, BOTH, BARRIER = "bits", "messages alone", "bits and messages", "barrier"
NUM_REQUESTS = 16  # a cycle; some ten cycles a step for 161 gradients
CYCLES_OF_ALL_RANKS = 2000  # in a block


@bench(repeats=7, ranks=("2,8,32,64", "numbers of ranks, separated by commas"))
def negotiation(options: Options) -> list[Report]:
    """Time and bytes of a cycle of the engine in which all ranks submit 16 known gradients.

    The ranks are forked from one process, so that many fit into the memory, and share the processors. By `bits`: from
    the requests of the ranks to the list of what may run, as in most steps of training. By `bits and messages`: as in
    a cycle with a new request. By `messages alone`: as in every cycle of a negotiation without bits. A `barrier` is
    submission, a cycle, and the wake-ups of both threads. Blocks take turns in one run. Bytes are those that the
    loopback carries, with all headers, of a rank; the ranks are in a network namespace of their own if the system
    gives one.
    """
    reports = []
    for num_ranks in map(int, options.ranks.split(",")):
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for line in run_alone(num_ranks, options.repeats):
            found[line["way"]].append(line)
        report = Report(f"{num_ranks} ranks, gloo over the loopback")
        for way, lines in found.items():
            report.add_row(f"a cycle by {way}" if way != BARRIER else way, "ms", [line["ms"] for line in lines])
            report.add_row(f"{way}, of a rank", "bytes", [line["bytes"] for line in lines])
        for what in ("ms", "bytes"):
            alone = [line[what] for line in found[MESSAGES]]
            for way in (BITS, BOTH):
                report.add_ratio(f"{way} / {MESSAGES}, {what}", [line[what] for line in found[way]], alone)
        reports.append(report)
    return reports


def run_alone(num_ranks: int, repeats: int) -> list[dict[str, float]]:
    """Run the ranks, in a network namespace if this system gives one, and return what rank 0 measured."""
    command = [*(OWN_NETWORK if has_own_network() else []), *call_command(fork_ranks, num_ranks, repeats)]
    variables = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def fork_ranks(num_ranks: int, repeats: int) -> None:
    """Fork the ranks, and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if not pid:
                be_rank(rank, num_ranks, repeats, Path(folder) / "store")
                os._exit(0)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        sys.exit(1)


def be_rank(rank: int, num_ranks: int, repeats: int, store: Path) -> None:
    """Measure in turns; rank 0 prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    transport = GroupTransport(hvd.EngineSettings(), gpu="", local_size=num_ranks)
    hvd.init()
    ways = {way: make_cycle(transport, way) for way in (BITS, MESSAGES, BOTH)} | {BARRIER: hvd.barrier}
    num_cycles = CYCLES_OF_ALL_RANKS // num_ranks
    for step in ways.values():
        step()
    hvd.shutdown()
    for _, way in turns(ways, repeats):
        if way == BARRIER:
            hvd.init()
        before = loopback_bytes()
        elapsed_s, _ = time_block(ways[way], num_cycles)
        sent = (loopback_bytes() - before) / num_cycles / num_ranks
        if way == BARRIER:
            hvd.shutdown()
        say(way=way, ms=1e3 * elapsed_s, bytes=sent)
    transport.close()
    dist.destroy_process_group()


def make_cycle(transport: GroupTransport, way: str) -> Step:
    """Return what the engine's thread does in a cycle until it has the list of what may run, for known requests."""
    agreement = Agreement(transport.rank, transport.size, hvd.EngineSettings().cache_capacity)
    requests = [
        Request(
            name=f"gradient.{number}", kind=CollectiveKind.ALLREDUCE, dtypes=("float32",), shapes=((512, 512, 3, 3),)
        )
        for number in range(NUM_REQUESTS)
    ]

    def cycle() -> None:
        agreement.submit(requests, 0.0)
        bits = agreement.encode_bits(needs_messages=False, sends_every_request=way != BITS)
        outcomes, needs_messages = agreement.apply_bits(bits if way == MESSAGES else transport.combine(bits))
        if needs_messages:
            message = CycleMessage(agreement.take_entries())
            messages = [decode_message(data) for data in transport.exchange(encode_message(message))]
            outcomes = agreement.apply_entries([message.entries for message in messages])[1]
        assert len(outcomes) == len(requests), outcomes

    return cycle
