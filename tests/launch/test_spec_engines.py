"""Every template and every filled file, read by accelerate and DeepSpeed, and held beside what the worker sets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.json_text import parse_json
from sft_play.launch.spec import WorkerInputs, launch_spec
from sft_play.plan.build import Plan
from tests.launch.planned import STRATEGIES, make_config, make_plan, make_run
from tests.tiny import ROOT

ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "deepspeed_configs").glob("*.json"))
INPUTS = WorkerInputs(model_path=Path("/m"), splits={}, stamp={}, config_yaml="")
LAUNCHED = tuple(name for name in STRATEGIES if name not in ("single", "layer_split"))
CASES = [
    *((name, "none", nodes) for name in LAUNCHED for nodes in (1, 2)),
    ("fsdp", "params", 1),
    ("zero2", "optimizer", 1),
    ("zero3", "optimizer", 1),
    ("zero3", "params", 2),
]
ZERO = [
    *((f"zero{stage}", offload, None) for stage in (1, 2, 3) for offload in ("none", "optimizer")),
    ("zero3", "params", None),
    ("zero3", "optimizer", "/fast/disk"),
    ("zero3", "params", "/fast/disk"),
]


class _Ranks:
    """Tells DeepSpeed how many ranks there will be, as Megatron's object does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


def written(tmp_path: Path, strategy: str, offload: str, nodes: int, **dist: Any) -> tuple[Plan, list[str], Any]:
    """The files of a launch on the disk: (plan, launcher's arguments, run)."""
    config = make_config(nodes=nodes, dist=dist)
    plan = make_plan(strategy, nodes=nodes, gpus=4, offload=offload)
    run = make_run(folder=tmp_path / "a run")
    spec = launch_spec(config, plan, run, INPUTS)
    run.create()
    for path, text in spec.files.items():
        path.write_text(text, encoding="utf-8")
    return plan, list(spec.argv[3:]), run


def launch_environment(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What `accelerate launch` would hand to the worker, by its own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    for name in ("MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    args, defaults, mixed_from_file = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if not args.use_deepspeed:
        return prepare_multi_gpu_env(args) | {"processes": str(args.num_processes), "nodes": str(args.num_machines)}
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if mixed_from_file else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    _, environment = prepare_deepspeed_cmd_env(args)
    return environment | {"processes": str(args.num_processes), "nodes": str(args.num_machines)}


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.name)
def test_accelerate_loads_every_template(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(path))
    assert loaded.num_processes > 1
    assert "#" in path.read_text()


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.name)
def test_deepspeed_and_accelerate_read_every_template(path: Path) -> None:
    """hjson is what DeepSpeed reads files with; accelerate's class is the one that knows `auto`."""
    import hjson
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    values = parse_json(path.read_text())
    assert hjson.loads(path.read_text()) == values
    assert HfDeepSpeedConfig(values).config["zero_optimization"]["stage"] == int(path.name[4])


@pytest.mark.parametrize(("strategy", "offload", "nodes"), CASES)
def test_what_accelerate_tells_the_worker_is_what_the_worker_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, offload: str, nodes: int
) -> None:
    from sft_play.runtime.arguments import engine_arguments

    plan, arguments, run = written(tmp_path, strategy, offload, nodes)
    told = launch_environment(arguments, monkeypatch)
    own = engine_arguments(make_config(nodes=nodes), plan, run)
    assert (told["processes"], told["nodes"]) == (str(plan.world_size), str(nodes))
    assert told["ACCELERATE_MIXED_PRECISION"] == ("no" if strategy.startswith("zero") else plan.autocast)
    assert ("ACCELERATE_USE_DEEPSPEED" in told) == ("deepspeed" in own)
    assert ("ACCELERATE_USE_FSDP" in told) == bool(own.get("fsdp"))
    assert ("ACCELERATE_USE_PARALLELISM_CONFIG" in told) == ("parallelism_config" in own)
    if "deepspeed" in own:
        assert Path(told["ACCELERATE_DEEPSPEED_CONFIG_FILE"]) == Path(own["deepspeed"])
        assert told["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == str(strategy == "zero3").lower()
    for name, value in own.get("fsdp_config", {}).items():
        variable = {"cpu_offload": "OFFLOAD_PARAMS"}.get(name, name.upper())
        assert told[f"FSDP_{variable}"] == (str(value).lower() if isinstance(value, bool) else str(value)), name
    if mesh := own.get("parallelism_config"):
        sizes = {
            name: int(told[f"PARALLELISM_CONFIG_{name.upper()}"]) for name in ("dp_replicate_size", "dp_shard_size")
        }
        assert sizes == {name: getattr(mesh, name) for name in sizes}


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize(("strategy", "offload", "nvme"), ZERO)
def test_deepspeed_takes_every_filled_file_as_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, offload: str, nvme: str | None, mode: str
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)
    config = make_config(dist={"nvme_path": nvme}, tuning={"mode": mode})
    plan = make_plan(strategy, gpus=4, offload=offload)
    run = make_run(folder=tmp_path / "a run")
    run.create()
    run.deepspeed_json.write_text(launch_spec(config, plan, run, INPUTS).files[run.deepspeed_json])
    assert '"auto"' not in run.deepspeed_json.read_text()
    read = DeepSpeedConfig(str(run.deepspeed_json), mpu=_Ranks(4))
    assert read.zero_optimization_stage == int(strategy[-1])
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (4, 2)
    assert read.train_batch_size == plan.global_batch
    assert read.gradient_clipping == config.train.max_grad_norm
    zero = read.zero_config
    for section, wanted in (
        (zero.offload_optimizer, offload != "none"),
        (zero.offload_param, offload == "params"),
    ):
        assert bool(section) == wanted
        if section:
            assert section.device == ("nvme" if nvme else "cpu")
            assert section.pin_memory
            assert str(section.nvme_path) == str(nvme)
    assert (read.bfloat16_config.enabled, read.torch_autocast_enabled) == (mode == "full", mode == "lora")


@pytest.mark.parametrize("autocast", ["fp32", "fp16", "bf16"])
def test_every_precision_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autocast: str) -> None:
    config, plan, run = make_config(), make_plan("ddp", autocast=autocast), make_run(folder=tmp_path / "run")
    spec = launch_spec(config, plan, run, INPUTS)
    run.create()
    run.accelerate_yaml.write_text(spec.files[run.accelerate_yaml])
    told = launch_environment(list(spec.argv[3:]), monkeypatch)
    assert told["ACCELERATE_MIXED_PRECISION"] == ("no" if autocast == "fp32" else autocast)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_accelerate_starts_the_processes_that_the_file_names(tmp_path: Path, strategy: str) -> None:
    """The filled file with its GPUs taken away, started for real: two processes meet and know each other."""
    _, arguments, run = written(tmp_path, strategy, "none", 1)
    text = run.accelerate_yaml.read_text().replace("use_cpu: false", "use_cpu: true")
    run.accelerate_yaml.write_text(text.replace("num_processes: 4", "num_processes: 2"))
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, pathlib\n"
        "keys = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')\n"
        "pathlib.Path(sys.argv[1], 'rank-' + os.environ['RANK']).write_text(' '.join(os.environ[k] for k in keys))\n"
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *arguments[: arguments.index("-m")]]
    done = subprocess.run(
        [*launcher, str(program), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["0 2 0", "1 2 1"]


USERS = """{
  "train_batch_size": 64, "gradient_clipping": 0.5, "steps_per_print": 10, "bf16": {"enabled": "auto"},
  "zero_optimization": {
    "stage": 3, "reduce_bucket_size": 1000000, "stage3_prefetch_bucket_size": "auto",
    "offload_optimizer": {"device": "cpu", "pin_memory": false, "ratio": 0.5},
  },
  "aio": {"block_size": 4096}, // the engine's own
}
"""


def test_a_users_file_is_filled_and_its_own_words_are_kept(tmp_path: Path) -> None:
    from sft_play.launch.deepspeed import deepspeed_config

    path = tmp_path / "ds.json"
    path.write_text(USERS)
    config = make_config(dist={"deepspeed_config": str(path)}, train={"max_grad_norm": 0.5})
    filled = deepspeed_config(config, make_plan("zero3", gpus=4, offload="optimizer", global_batch=64))
    assert filled["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 1000000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.5},
    }
    assert (filled["steps_per_print"], filled["aio"]) == (10, {"block_size": 4096})
    assert (filled["train_batch_size"], filled["train_micro_batch_size_per_gpu"]) == (64, 4)
    assert filled["torch_autocast"]["enabled"]
    assert filled["bf16"] == {"enabled": False}
    path.write_text(USERS.replace('"enabled": "auto"', '"enabled": true'))
    assert deepspeed_config(config, make_plan("zero3", gpus=4, offload="optimizer", global_batch=64)) == filled
    whole = make_config(dist={"deepspeed_config": str(path)}, train={"max_grad_norm": 0.5}, tuning={"mode": "full"})
    assert deepspeed_config(whole, make_plan("zero3", gpus=4, global_batch=64))["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"train_batch_size": 32', "train_batch_size: 32 in the file, and the plan needs 16"),
        ('"zero_force_ds_cpu_optimizer": true', "the plan needs false"),
        ('"torch_autocast": {"dtype": "float16"}', "torch_autocast.dtype: float16 in the file"),
        ('"fp16": {"initial_scale_power": 8}', "fp16.initial_scale_power has no effect"),
    ],
)
def test_what_the_plan_contradicts_is_refused_at_its_line(tmp_path: Path, text: str, said: str) -> None:
    from sft_play.errors import ConfigError
    from sft_play.launch.deepspeed import deepspeed_config

    path = tmp_path / "ds.json"
    path.write_text(f'{{"zero_optimization": {{"stage": 2}},\n{text}}}')
    with pytest.raises(ConfigError) as caught:
        deepspeed_config(make_config(dist={"deepspeed_config": str(path)}), make_plan("zero2"))
    assert said in caught.value.line()
    assert caught.value.where == f"{path}:2"
