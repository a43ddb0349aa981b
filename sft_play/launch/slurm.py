"""An sbatch script as a value: one task a machine, which starts the same command that a person would."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Seconds between the warning and the end of the allocation, in which a checkpoint is written.
GRACE_SECONDS = 180
# Once one machine has left, the others get this long before Slurm ends them: to save, and no longer.
WAIT_SECONDS = 300

SCRIPT = """\
#!/bin/bash
# {command} on {nodes} machines, one task each. Written by make slurm; submit it with: sbatch {script}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{options}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{grace}
#SBATCH --output={output}

set -u
cd {folder} || exit 4
python={python}

# All meet at the first machine of the allocation; the port follows from the job, so that two jobs do not share one.
MAIN_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
[ -n "$MAIN_ADDRESS" ] || {{ echo "error: the allocation names no machine" >&2; exit 4; }}
export MAIN_ADDRESS MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))
{exports}

# Preemption sends TERM, the end of the time limit USR1; both ask the run to save and leave with 75.
step=
leave() {{ [ -z "$step" ] || kill -TERM "$step" 2>/dev/null; }}
trap leave TERM USR1

srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={wait} \\
    bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" -m sft_play {command}' "$python" &
step=$!
wait "$step"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do
    wait "$step" # a signal ended the wait before; the step itself was still saving
    code=$?
done
if [ "$code" -gt 128 ]; then
    wait "$step" # it may have ended just then
    last=$?
    [ "$last" -eq 127 ] || code=$last
fi

if [ "$code" -eq 75 ]; then
    echo "saved; the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a script is made from.

    Attributes:
        command: `train-distributed` or `train-deepspeed`.
        gpus: of each machine; None for whole machines.
        variables: what the command reads: CONFIG and the overrides of keys.
        options: further options of sbatch, such as `--partition=a100`.
        script: where the script will lie; its output lies beside it.
        folder: where the command runs.
    """

    name: str
    command: str
    nodes: int
    gpus: int | None
    variables: Mapping[str, str]
    python: Path
    folder: Path
    script: Path
    options: tuple[str, ...] = field(default=())

    @property
    def output(self) -> Path:
        """Where Slurm writes what the job prints; `%j` is the job's number."""
        return self.script.with_name(f"{self.script.stem}-%j.out")


def render_sbatch(job: SlurmJob) -> str:
    """The script. Values never reach a shell unquoted; sbatch reads its options by the same rules of quoting."""
    whole = "--exclusive" if job.gpus is None else f"--gpus-per-node={job.gpus}"
    exports = {**job.variables, "NUM_NODES": str(job.nodes)}
    return SCRIPT.format(
        command=job.command,
        nodes=job.nodes,
        name=shlex.quote(job.name),
        script=shlex.quote(str(job.script)),
        options="\n".join(f"#SBATCH {_option(one)}" for one in (whole, *job.options)),
        grace=GRACE_SECONDS,
        output=_quoted(str(job.output)),
        folder=shlex.quote(str(job.folder)),
        python=shlex.quote(str(job.python)),
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        wait=WAIT_SECONDS,
    )


def _option(text: str) -> str:
    name, sign, value = text.partition("=")
    return f"{name}{sign}{_quoted(value)}" if sign else name


def _quoted(text: str) -> str:
    """In double quotes where needed, which is all that sbatch's own lines understand."""
    return text if not set(text) & set(" \t'\"\\") else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
