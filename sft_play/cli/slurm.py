"""`make slurm`: write an sbatch script that trains a config on several machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sft_play.cli.inputs import config_path
from sft_play.cli.options import Options, positive
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.keys import VARIABLES
from sft_play.config.resolve import resolve
from sft_play.config.rules import refuse_unavailable
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentProblem, UsageError
from sft_play.launch.slurm import SlurmJob, render_sbatch
from sft_play.record.run_dir import run_name

MEETING = ("dist.num_nodes", "dist.node_rank", "dist.main_address", "dist.main_port")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Check the config as the run would, write the script and say how to submit it.

    Raises:
        SftPlayError: the config is wrong, fewer than two machines are asked for, or the place cannot be written.
    """
    parser = Options(prog="make slurm", description=__doc__)
    parser.add_argument("--gpus-per-node", type=positive, help="GPUs of each machine; whole machines without")
    for name in ("partition", "account", "qos", "constraint", "time"):
        parser.add_argument(f"--{name}", help=f"sbatch's own --{name}")
    options = parser.parse_args(list(argv))
    config = checked(environ)
    name = run_name(config_path(environ).stem, config)
    folder = Path(config.run.output_dir) / "slurm"
    job = SlurmJob(
        name=name,
        command=command_for(config),
        nodes=config.dist.num_nodes,
        gpus=options.gpus_per_node or gpus_of(config),
        variables=variables_of(environ),
        python=Path(sys.executable),
        folder=Path.cwd(),
        script=(folder / f"{name}.sbatch").absolute(),
        options=tuple(
            f"--{one}={value}" for one in ("partition", "account", "qos", "constraint", "time")
            if (value := getattr(options, one))
        ),
    )  # fmt: skip
    write(job)
    print(f"wrote {folder / job.script.name}: {job.command} on {job.nodes} machines")
    print(f"submit  sbatch '{folder / job.script.name}'")
    print(f"output  {folder / job.output.name} (%j is the job's number); a preempted job saves and queues again")
    return 0


def checked(environ: Mapping[str, str]) -> Config:
    """The config as each machine will read it.

    Raises:
        UsageError: the number of machines is missing or 1, or something is given that the allocation decides.
    """
    given = [name for name in environ if VARIABLES.get(name) in MEETING[1:]]
    if given:
        fix = "leave it out: machines, address and port come from the allocation"
        raise UsageError("is decided by Slurm", where=given[0], fix=fix)
    placeholders = {"MAIN_ADDRESS": "from-the-allocation", "MAIN_PORT": "29500"}
    several = {} if environ.get("NUM_NODES") in (None, "1") else placeholders
    resolved = resolve(config_path(environ), {**environ, **several}, inputs=INPUTS_OF["slurm"])
    refuse_unavailable(resolved)
    if resolved.config.dist.num_nodes < 2:
        raise UsageError(
            "several machines are needed", where="NUM_NODES", fix="NUM_NODES=4; one machine needs no script"
        )
    return resolved.config


def command_for(config: Config) -> str:
    """DeepSpeed where the config asks for ZeRO, else the best strategy."""
    dist = config.dist
    zero = dist.strategy.startswith("zero") or dist.zero_level is not None or dist.deepspeed_config is not None
    return "train-deepspeed" if zero else "train-distributed"


def gpus_of(config: Config) -> int | None:
    """GPUs of each machine, where the config counts or names them."""
    gpus = config.dist.gpus
    if isinstance(gpus, tuple):
        return None  # ids count inside a whole machine
    return gpus if isinstance(gpus, int) and gpus else None


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """CONFIG and every override, so that the job trains what was checked here."""
    keys = {name: environ[name] for name in sorted(environ) if name in VARIABLES and VARIABLES[name] not in MEETING}
    return {"CONFIG": str(config_path(environ).absolute()), **keys}


def write(job: SlurmJob) -> None:
    """Write the script.

    Raises:
        EnvironmentProblem: the place cannot be written.
    """
    try:
        job.script.parent.mkdir(parents=True, exist_ok=True)
        job.script.write_text(render_sbatch(job), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(
            f"cannot be written: {reason}", where=str(job.script), fix="set run.output_dir"
        ) from error
