"""`make doctor` on this machine: once as it is, once with as much broken as can be at the same time."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli.doctor import main
from sft_play.errors import SftPlayError
from tests.tiny import ROOT, Done, Workplace, make_workplace

CANARY = "hf_canaryCANARYcanary"
GROUPS = ["Program", "GPUs", "Machine", "Disk", "Network and clock", "Stack"]
# The command line with a last word about itself: what the parent loaded.
PARENT = (
    "import sys; from sft_play.cli.app import run; code = run(['doctor', *sys.argv[1:]]);"
    "print('loaded', *sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
)


@dataclass
class Taken:
    """A port that is bound, and one that nobody listens to."""

    bound: int
    closed: int


@pytest.fixture(scope="module")
def ports() -> Iterator[Taken]:
    with socket.socket() as bound, socket.socket() as closed:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        closed.bind(("127.0.0.1", 0))  # never listens: connecting is refused
        yield Taken(bound.getsockname()[1], closed.getsockname()[1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("doctor"), tiny_model)


def start(place: Workplace, *words: str, files: int = 1024, **variables: str) -> Done:
    """The doctor in a process of its own that may open so many files."""
    environ = {key: value for key, value in place.environ().items() if key not in ("HF_HUB_OFFLINE", "LANG")}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, *words],
        cwd=place.path,
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard)),
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def healthy(place: Workplace, ports: Taken) -> Done:
    """A machine on which all works but the hub, with a config, a token and TensorBoard's port taken."""
    return start(
        place,
        CONFIG="tiny.yaml",
        HF_TOKEN=CANARY,
        WANDB_API_KEY=CANARY[::-1],
        HF_ENDPOINT=f"http://me:{CANARY}@127.0.0.1:{ports.closed}",
        RUN_TENSORBOARD_PORT=str(ports.bound),
        LANG="C.UTF-8",
    )


@pytest.fixture(scope="module")
def broken(place: Workplace, ports: Taken) -> tuple[Done, dict[str, Any]]:
    """Everything at once that a variable or a limit can break."""
    fake = place.path / "packages/trl-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.0.1\n")
    (place.path / "a-file").write_text("")
    place.write("broken.yaml", model={"name": "nobody/no-such-model-of-ours"}, dist={"cpu_offload": "optimizer"})
    done = start(
        place,
        "--json",
        files=200,
        CONFIG="broken.yaml",
        PYTHONPATH=f"{fake.parent}{os.pathsep}{ROOT}",
        RUN_OUTPUT_DIR="a-file/runs",
        MAIN_PORT=str(ports.bound),
        HF_HUB_OFFLINE="1",
        HF_TOKEN=CANARY,
        GLOO_SOCKET_IFNAME="nosuchlink0",
        PATH="/nonexistent",
        LC_ALL="C",
        PYTHONCOERCECLOCALE="0",
        PYTHONUTF8="0",
    )
    return done, {one["name"]: one for one in json.loads(done.out)["findings"]}


def test_a_healthy_machine_is_ready(healthy: Done, place: Workplace) -> None:
    assert healthy.code == 0, healthy.out + healthy.err
    headings = [line for line in healthy.out.splitlines() if line and not line.startswith((" ", "verdict"))]
    assert headings == [*GROUPS, "tiny.yaml"]
    assert healthy.out.splitlines()[-1].startswith("verdict: ready to train (0 failed, ")
    for words in (
        "ok stack torch 2.",
        f"ok write access runs (to be made in {place.path}): written, renamed, locked",
        "MB/s written with fsync",
        "ok bf16 ",
        "ok 4-bit an NF4 layer forward and backward on cpu",
        "ok all-reduce 2 ranks under gloo, 16 MiB at ",
        f"ok model {place.model}: ",
    ):
        assert words in " ".join(healthy.out.split())
    assert not [path for path in place.path.iterdir() if path.name.startswith((".doctor", "runs"))]


def test_what_is_only_a_warning_says_its_cure(healthy: Done, ports: Taken) -> None:
    page = " ".join(healthy.out.split())
    assert f"warning TensorBoard port {ports.bound} is taken, " in page
    assert f"warning hub http://127.0.0.1:{ports.closed} cannot be reached (Connection refused) -> check the " in page
    assert "ok GPUs hidden by CUDA_VISIBLE_DEVICES" in page


def test_the_page_is_at_most_80_columns_wide(healthy: Done) -> None:
    for line in healthy.out.splitlines():
        assert len(line) <= 80 or len(max(line.split(), key=len)) > 40, line


def test_the_parent_loads_no_torch(healthy: Done, broken: tuple[Done, dict[str, Any]]) -> None:
    for done in (healthy, broken[0]):
        assert done.err.splitlines()[-1] == "loaded", done.err


def test_no_token_is_shown(healthy: Done, broken: tuple[Done, dict[str, Any]]) -> None:
    shown = healthy.out + healthy.err + broken[0].out + broken[0].err
    assert CANARY not in shown
    assert CANARY[::-1] not in shown
    assert "HF_TOKEN is set" not in healthy.out  # it is told beside a hub that answers
    assert len(shown) > 4000


@pytest.mark.parametrize(
    ("name", "found", "cure"),
    [
        ("trl", "0.0.1 is installed, 1.", "make install"),
        ("file handles", "200 at once", "ulimit -n "),
        ("write access", "a-file is a file, not a folder", "RUN_OUTPUT_DIR"),
        ("rendezvous", "Address already in use", "MAIN_PORT"),
        ("all-reduce", "gloo: ended with ", "GLOO_SOCKET_IFNAME"),
        ("model", "is not on this disk and HF_HUB_OFFLINE is set", "local folder"),
        ("disk for it", "no-such-model-of-ours", ""),
        ("offload", "a C++ compiler", "cpu_offload"),
    ],
)
def test_what_is_broken_fails_with_its_cure(
    broken: tuple[Done, dict[str, Any]], name: str, found: str, cure: str
) -> None:
    done, findings = broken
    assert done.code == 4
    assert findings[name]["state"] == "fail", findings[name]
    assert found in findings[name]["found"]
    assert cure in findings[name]["cure"]


def test_one_fault_hides_no_other_line(broken: tuple[Done, dict[str, Any]]) -> None:
    done, findings = broken
    told = json.loads(done.out)
    assert (told["version"], told["ready"]) == (1, False)
    assert [*dict.fromkeys(one["group"] for one in told["findings"])] == [*GROUPS, "broken.yaml"]
    assert findings["encoding"]["state"] == "warning"
    assert findings["hub"]["found"].startswith("left alone: HF_HUB_OFFLINE is set")
    for name in ("torch", "bf16", "4-bit", "others"):
        assert findings[name]["state"] == "ok", findings[name]
    for one in told["findings"]:
        assert set(one) == {"group", "name", "state", "found", "cure"}
        assert (one["cure"] is None) == (one["state"] == "ok"), one
    assert "this check" not in findings


def test_a_wrong_config_or_word_is_an_error_of_its_own(place: Workplace) -> None:
    with pytest.raises(SftPlayError, match="batch_size"):
        main([], {"CONFIG": str(place.path / "tiny.yaml"), "TRAIN_BATCH_SIZE": "many"})
    with pytest.raises(SftPlayError, match="--nonsense"):
        main(["--nonsense"], {})


def test_the_page_about_it_names_every_line(healthy: Done, broken: tuple[Done, dict[str, Any]]) -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    for name in {*broken[1]} - {"trl"}:
        assert name in page, name
    assert textwrap.dedent(page) == page
