"""The surface that users and their scripts hold on to, literally."""

from __future__ import annotations

import re

import sft_play.errors as errors
from sft_play.config import errors_page
from sft_play.runtime.trainer import SftPlayTrainer
from tests.tiny import ROOT

TARGETS = [
    "help", "install", "install-unsloth", "setup-accelerate", "demo", "config", "data-check", "plan", "gpu-info",
    "memory-check", "doctor",
    "train", "train-distributed", "train-deepspeed", "train-distributed-tb", "train-deepspeed-tb",
    "verify-resume", "smoke", "slurm", "eval", "infer", "serve", "chat", "download",
    "merge", "export", "push", "report", "compare", "runs", "clean-runs", "tensorboard",
    "test", "test-faults", "test-all", "soak", "bench", "bench-overhead", "docs",
]  # fmt: skip
EXIT_CODES = {
    "DONE": 0,
    "CONFIG_OR_DATA": 2,
    "RESUME_REFUSED": 3,
    "ENVIRONMENT": 4,
    "NOT_FINITE": 5,
    "RANK_FAILED": 6,
    "PREEMPTED": 75,
    "INTERRUPTED": 130,
}
# What docs/architecture.md explains; an upgrade of trl or transformers is read against this list.
OVERRIDDEN = {
    "__init__", "get_train_dataloader", "get_batch_samples", "training_step", "_get_grad_norm", "prediction_step",
    "evaluation_loop", "_save_checkpoint", "save_model", "_load_from_checkpoint", "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler", "compute_loss", "_set_signature_columns_if_needed", "_determine_best_metric",
    "_get_train_sampler",
}  # fmt: skip


def test_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^([a-z-]+):.*## ", makefile, re.M) == TARGETS
    phony = re.search(r"^\.PHONY: (.*)$", makefile.replace("\\\n", " "), re.M)
    assert phony is not None
    assert phony[1].split() == TARGETS


def test_every_target_is_one_recipe_line() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in TARGETS:
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.M)
        assert recipe is not None
        assert recipe[1].count("\n") == 1, target
        assert "$(CONFIG)" not in recipe[1]


def test_exit_codes() -> None:
    assert {code.name: int(code) for code in errors.ExitCode} == EXIT_CODES


def test_every_error_class_tells_a_way_out() -> None:
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.SftPlayError)]
    for one in set(classes) - {errors.SftPlayError, errors.SeveralErrors}:
        assert one.hint, one
        assert one.evidence, one
        assert one.__doc__, one


def test_the_catalogue_of_errors_is_current() -> None:
    """`python -m sft_play.config.errors_page` writes it."""
    assert (ROOT / errors_page.PAGE).read_text(encoding="utf-8") == errors_page.render_page()
    assert set(errors_page.MEANINGS) == set(errors_page.AGAIN) == set(errors.ExitCode)


def test_an_error_is_one_line() -> None:
    error = errors.ConfigError("two\nlines", where="here", fix="like\nthis")
    assert error.line() == "here: two lines -> like this"


def test_the_trainer_overrides_these_methods_and_no_others() -> None:
    own = {name for name, value in vars(SftPlayTrainer).items() if callable(value)}
    upstream = {name for name in own if any(hasattr(base, name) for base in SftPlayTrainer.__mro__[1:])}
    assert upstream == OVERRIDDEN
    assert own == upstream, "a new method belongs into a function of its own"


def test_the_overridden_methods_are_explained() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for name in OVERRIDDEN:
        assert f"`{name}`" in text
