"""The report on a run's data, kept in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.data.prepare import Prepared
from sft_play.data.report_text import token_lines
from sft_play.data.token_report import make_token_report, report_as_json
from sft_play.errors import EnvironmentProblem
from sft_play.record.run_dir import write_atomic


def write_report(folder: Path, config: Config, prepared: Prepared, tokenizer_dir: Path) -> None:
    """Write `report.txt` and `report.json` of the data that a run trains on.

    Raises:
        EnvironmentProblem: the folder cannot be written.
    """
    report = make_token_report(config, prepared, tokenizer_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"read from {origin}" for origin in prepared.origins]
        lines += token_lines(report, colour=False, rows_told=False)
        write_atomic(folder / "report.txt", "\n".join(lines) + "\n")
        values = report_as_json(None, report) | {"origins": list(prepared.origins)}
        write_atomic(folder / "report.json", json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise EnvironmentProblem(f"cannot be written ({error.strerror})", where=str(folder)) from error
