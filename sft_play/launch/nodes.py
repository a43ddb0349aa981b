"""Where the processes of a run meet: machines, their numbers, and the address and port of the first."""

from __future__ import annotations

from dataclasses import dataclass

from sft_play.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How many machines take part, which of them this is, and where they find each other.

    Attributes:
        address, port: of machine 0; None on one machine, where the launcher takes a free port itself.
        restarts: how often a lost machine or process may come back (torchrun's elastic rendezvous); 0 for never.
    """

    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None
    restarts: int = 0


def meeting_of(config: Config, *, restarts: int = 0) -> Meeting:
    """The meeting that `dist` describes; the config's rules have made sure that several machines have an address."""
    dist = config.dist
    return Meeting(
        nodes=dist.num_nodes,
        node_rank=dist.node_rank,
        address=dist.main_address,
        port=dist.main_port if isinstance(dist.main_port, int) else None,
        restarts=restarts,
    )


def torchrun_options(meeting: Meeting, *, processes_here: int, run_id: str) -> tuple[str, ...]:
    """torchrun's options.

    One machine: `--standalone` lets the launcher bind a free port itself, so that two runs never meet on one. A fixed
    `dist.main_port` is taken as it is. Several machines: fixed ranks at the first one's address; with restarts the
    rendezvous of torchrun, whose host is named (`is_host`): machines do not always recognise their own address.
    """
    each = f"--nproc-per-node={processes_here}"
    again = (f"--max-restarts={meeting.restarts}",) if meeting.restarts else ()
    if meeting.nodes == 1:
        port = (
            ("--standalone",) if meeting.port is None else ("--master-addr=127.0.0.1", f"--master-port={meeting.port}")
        )
        return (*port, each, *again)
    if not meeting.restarts:
        return (
            f"--nnodes={meeting.nodes}",
            f"--node-rank={meeting.node_rank}",
            f"--master-addr={meeting.address}",
            f"--master-port={meeting.port}",
            each,
        )
    host = meeting.node_rank == 0
    return (
        f"--nnodes={meeting.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meeting.address}:{meeting.port}",
        f"--rdzv-conf=is_host={int(host)}",
        f"--rdzv-id={run_id}",
        *((f"--local-addr={meeting.address}",) if host else ()),
        each,
        *again,
    )


def accelerate_options(meeting: Meeting, *, processes: int) -> tuple[str, ...]:
    """accelerate's options for several machines; one machine needs none beside its config file."""
    if meeting.nodes == 1:
        return ()
    return (
        "--num_processes",
        str(processes),
        "--num_machines",
        str(meeting.nodes),
        "--machine_rank",
        str(meeting.node_rank),
        "--main_process_ip",
        str(meeting.address),
        "--main_process_port",
        str(meeting.port),
    )
