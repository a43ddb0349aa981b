"""The reference page and the JSON Schema for editors, both made from the schema.

`python -m sft_play.config.reference` writes docs/configuration.md and configs/schema.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_play.config.environment import INPUTS_OF
from sft_play.config.keys import KEYS, SECTIONS, VARIABLE_ALIASES, Key, meanings
from sft_play.config.not_yet import NOT_YET
from sft_play.config.old_names import ADVICE, OLD_NAMES
from sft_play.config.schema import Config
from sft_play.config.values import show

PAGE = Path("docs/configuration.md")
SCHEMA = Path("configs/schema.json")

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m sft_play.config.reference` from sft_play/config/schema.py; edit there. -->

One YAML file, in six sections. Only `model.name` and `data.train` are required:

```yaml
# yaml-language-server: $schema=schema.json
include: base.yaml        # optional: a path or a list of paths, relative to this file
model:
  name: Qwen/Qwen2.5-0.5B-Instruct
data:
  train: data/train.jsonl
train:
  learning_rate: 1e-4
```

The first line lets an editor complete and check keys (the path leads to `configs/schema.json`).

**Which value counts.** Each layer goes over the one before: the default, what `setup-accelerate` wrote, the
files named by `include:` (a later one over an earlier one), the file itself, the environment. A list or a
mapping such as `data.columns` is replaced as a whole. `make config CONFIG=...` prints every value and where it
comes from; `make config KEY=train.learning_rate` explains one; `ARGS=--json` gives both to programs.

**The environment.** Every key is the variable SECTION_KEY, on the make command line or before it:
`make train CONFIG=configs/x.yaml TRAIN_BATCH_SIZE=1 TUNING_LORA_R=64`. Booleans are `true false yes no on off 1 0`,
lists `a,b` (or JSON in brackets), mappings `a=b,c=d`, and `none` takes an optional value away.

**Mistakes.** An unknown key, a wrong type and keys that do not go together are errors, all reported at once,
each with its line. So is a variable on the make command line that is neither a key nor an input of that command; one
that is merely set and close to a key's name is a warning (an error under `run.strict_env`). A setting that would have
no effect is an error too, or a note where a stronger layer switched it off. Tokens and passwords are refused: they
belong in the environment (`HF_TOKEN`).

**Not available yet.** Keys and values marked so are known, and refused by name when a run starts.
"""


def render_page() -> str:
    """docs/configuration.md as text."""
    return "\n".join([_INTRODUCTION, *(line for section in SECTIONS for line in _section(section)), *_appendix()])


def _section(section: str) -> Iterator[str]:
    keys = [key for key in KEYS.values() if key.section == section]
    yield f"## {section}\n\n{meanings()[section]}\n"
    yield "| key | takes | default | meaning | variable |"
    yield "|---|---|---|---|---|"
    for key in keys:
        default = "required" if key.required else f"`{show(key.default)}`"
        cells = [f"`{key.leaf}`", key.type.words, default, meaning_with_gaps(key), f"`{key.variable}`"]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def meaning_with_gaps(key: Key) -> str:
    """A key's meaning and what of it is not available yet."""
    gaps = [one for one in NOT_YET if one.key == key.name]
    if not gaps:
        return meanings()[key.name]
    whole = len(gaps) == 1 and not gaps[0].values
    return f"{meanings()[key.name]} *Not available yet{'' if whole else ': ' + ', '.join(one.said() for one in gaps)}.*"


def _appendix() -> Iterator[str]:
    yield "## Short variables\n"
    yield "| variable | key |\n|---|---|"
    yield from (f"| `{variable}` | `{key}` |" for variable, key in VARIABLE_ALIASES.items())
    yield "\n## Inputs of commands\n"
    yield "They are no keys. On the make command line of another command they are errors.\n"
    yield "| command | inputs |\n|---|---|"
    yield from (f"| `{command}` | {', '.join(f'`{one}`' for one in names)} |" for command, names in INPUTS_OF.items())
    yield ""
    yield "## Names from other tools\n"
    yield "They work at the top level of a file or in their key's section, and a note says what they were taken as.\n"
    yield "| name | key |\n|---|---|"
    yield from (f"| `{name}` | `{key}` |" for name, key in OLD_NAMES.items())
    yield "\nThese have no key of the same meaning:\n"
    yield "| name | instead |\n|---|---|"
    yield from (f"| `{name}` | {text} |" for name, text in ADVICE.items())
    yield ""


def render_schema() -> str:
    """configs/schema.json as text: what a file may hold, with nothing required, as includes may give the rest."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for name in SECTIONS:
        part = _section_schema(schema, name)
        part.pop("required", None)
        part["description"] = meanings()[name]
    for key in KEYS.values():
        properties = _section_schema(schema, key.section)["properties"]
        properties[key.leaf] = _key_schema(key, properties[key.leaf])
    schema.pop("required", None)
    for name in [one for one in SECTIONS if "." not in one]:
        schema["properties"][name] = {"$ref": schema["properties"][name]["$ref"]}
    schema["properties"] = _include_schema() | schema["properties"] | _old_names_schema(schema)
    schema |= {"$schema": "http://json-schema.org/draft-07/schema#", "title": "sft-play config"}
    schema["description"] = "A config of sft-play; docs/configuration.md describes every key."
    schema["$defs"] = definitions
    return json.dumps(schema, indent=2) + "\n"


def _section_schema(schema: dict[str, Any], section: str) -> dict[str, Any]:
    part = schema
    for name in section.split("."):
        reference = part["properties"][name]["$ref"]
        part = schema["$defs"][reference.rpartition("/")[2]]
    return part


def _key_schema(key: Key, made: dict[str, Any]) -> dict[str, Any]:
    """pydantic's schema of a key, loosened to what a file may write, with its meaning."""
    made = {name: value for name, value in made.items() if name not in ("title", "default", "description")}
    loose: list[dict[str, Any]] = []
    if key.type.listed:
        loose.append({"type": "string"})
    if key.type.nullable and not key.type.text:
        loose.append({"const": "none"})
    if loose:
        made = {"anyOf": [*made.pop("anyOf", [made]), *loose]}
    made["description"] = f"{meaning_with_gaps(key).replace('*', '')} Variable: {key.variable}."
    if not key.required:
        made["default"] = json.loads(json.dumps(key.default))
    return made


def _include_schema() -> dict[str, Any]:
    paths = [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
    return {"include": {"anyOf": paths, "description": "Config files under this one, relative to it."}}


def _old_names_schema(schema: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for name, target in OLD_NAMES.items():
        key = KEYS[target]
        kind = _section_schema(schema, key.section)["properties"][key.leaf]
        text = f"Old name of {target}."
        made[name] = {**kind, "description": text, "deprecated": True, "deprecationMessage": text}
        made[name].pop("default", None)
    return made


def main() -> int:
    """Writes both files under the repository's root."""
    root = Path(__file__).resolve().parents[2]
    for path, text in ((PAGE, render_page()), (SCHEMA, render_schema())):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
