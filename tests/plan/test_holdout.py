"""benchmarks/holdout.py: runs on a table of two families; docs/plan_holdout.md is of the constants that ship."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

from tests.plan.test_accuracy import PLAIN, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from holdout import digest, knobs, render

DOCS = ROOT / "docs"


def families(page: str) -> list[str]:
    """First cells of the table's rows but the last, which is of all families."""
    return re.findall(r"^\| (\w\S* .*?) \|", (DOCS / page).read_text(encoding="utf-8"), re.M)[1:-1]


def test_each_family_is_predicted_with_constants_of_the_other(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    rows = [{**PLAIN, "id": f"{family}-1", "allocated_gib": gib} for family, gib in (("aa", "36.1"), ("bb", "50"))]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=sorted(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, "benchmarks/holdout.py", "--table", table, "--docs", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    page = (tmp_path / "plan_holdout.md").read_text()
    assert page == render(done.stdout.splitlines(), digest(knobs()))
    errors = dict(re.findall(r"^\| (aa|bb) \S+ \| ([\d.]+)% ", page, re.M))
    assert float(errors["bb"]) > 10  # its figure was made up, and it is not fitted to itself


def test_the_page_is_of_the_constants_that_ship_and_of_the_same_families_as_the_accuracy_report() -> None:
    command = "python benchmarks/holdout.py --table FILE.csv"
    page = (DOCS / "plan_holdout.md").read_text(encoding="utf-8")
    assert page.startswith(render([], digest(knobs())).rstrip("\n")), f"constants changed: {command}"
    assert families("plan_holdout.md") == families("plan_accuracy.md"), command
