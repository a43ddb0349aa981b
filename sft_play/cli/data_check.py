"""`make data-check`: bad rows, doubles and leaks, lengths, what is learned, and real rows; nothing is trained."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.cli.inputs import config_path
from sft_play.cli.options import Options, positive
from sft_play.cli.run_start import check_positions
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.resolve import Resolved, overrides, resolve
from sft_play.config.rules import refuse_unavailable
from sft_play.config.schema import Config
from sft_play.errors import ExitCode, SftPlayError
from sft_play.facts.data import DataFacts
from sft_play.facts.locate import locate_tokenizer
from sft_play.facts.model import read_model_facts

if TYPE_CHECKING:
    from sft_play.data.report import RowReport
    from sft_play.data.token_report import TokenReport

LISTED_ROWS = 100
STREAMED = "fine: rows are tokenised while training (data.streaming); the figures are those of the first ones"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Check the data of CONFIG and prepare them, so that a training finds them in the cache.

    Raises:
        SftPlayError: what a training would refuse; all that can be said of the data is printed before.
    """
    parser = Options(prog="make data-check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the report for programs, as docs/data.md describes it")
    parser.add_argument("--limit", type=positive, default=LISTED_ROWS, help="bad rows listed at most (%(default)s)")
    options = parser.parse_args(list(argv))
    resolved = resolve(config_path(environ), environ, distributed=True, inputs=INPUTS_OF["data-check"])
    refuse_unavailable(resolved)
    announce(resolved)
    config = resolved.config

    from sft_play.data.report import check_rows
    from sft_play.data.report_text import row_lines, token_lines
    from sft_play.data.token_report import report_as_json

    with progress_line() as progress:
        rows = check_rows(config, options.limit, progress)
    if not options.json:
        show(row_lines(rows))
    tokens, refused = None, rows.refusal()
    if refused is None:
        tokens, refused = look_at_tokens(config, rows)
    if options.json:
        print(json.dumps({"config": str(resolved.path)} | report_as_json(rows, tokens, refused)))
    elif tokens:
        show(["", *token_lines(tokens, colour=_colours(environ), rows_told=True, limit=options.limit)])
    if refused:
        raise refused
    if tokens and not options.json:
        cached = f"fine: a training takes these tokens from the cache ({tokens.facts.key[:8]})"
        show(["", STREAMED if config.data.streaming else cached])
    return ExitCode.DONE


def look_at_tokens(config: Config, rows: RowReport) -> tuple[TokenReport | None, SftPlayError | None]:
    """Prepare the data; what can be said of them, and what a training would refuse."""
    from sft_play.data.prepare import prepare
    from sft_play.data.token_report import make_token_report

    report = None
    try:
        folder = locate_tokenizer(config.model.name, config.model.revision)
        with progress_line() as progress:
            prepared = prepare(config, folder, Path(config.run.output_dir) / ".cache" / "tokens", progress)
            report = make_token_report(config, prepared, folder, known_bad=rows.bad)
        refuse_positions(folder, prepared.facts)
    except SftPlayError as error:
        return report, error
    return report, None


def refuse_positions(folder: Path, data: DataFacts) -> None:
    """Refuse rows longer than the model can see, where its config.json is there.

    Raises:
        ConfigError: naming the key.
    """
    if (folder / "config.json").is_file():
        check_positions(read_model_facts(str(folder)), data)


def announce(resolved: Resolved) -> None:
    """What the environment overrides, and the config's notes and warnings: on stderr, the report is for stdout."""
    lines = [f"override: {line}" for line in overrides(resolved)]
    lines += [f"note: {note}" for note in resolved.notes]
    lines += [f"warning: {warning}" for warning in resolved.warnings]
    for line in lines:
        print(line, file=sys.stderr)


def show(lines: Iterator[str] | Sequence[str]) -> None:
    """Print lines at once, in whatever the terminal's encoding can say of them."""
    encoding = sys.stdout.encoding or "utf-8"
    text = "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)
    print(text, flush=True)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Says how far it is on a line that vanishes; on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    width = shutil.get_terminal_size().columns - 1

    def say(text: str) -> None:
        print(f"\r\x1b[K{text.removeprefix('data: ')[:width]}", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _colours(environ: Mapping[str, str]) -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in environ and environ.get("TERM") != "dumb"
