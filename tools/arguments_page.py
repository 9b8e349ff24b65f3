"""Write docs/arguments.md, the table of every flag, from the dataclasses of mindspeed_llm/arguments.

    python tools/arguments_page.py            writes the page
    python tools/arguments_page.py --check    exits with status 1 when the page is not what would be written

Types, defaults, help texts and what works come from the one table that the parser uses, so the page cannot say
something else; a test runs --check.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_llm.arguments import GROUPS, all_flags
from mindspeed_llm.arguments.flag import WORKS, Flag
from mindspeed_llm.arguments.values import written

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "arguments.md"

_INTRODUCTION = """\
# Arguments

<!-- Written by tools/arguments_page.py; change the dataclasses in mindspeed_llm/arguments and run it again. -->

```
torchrun --nproc_per_node 2 train_fsdp2.py CONFIG.yaml --training.lr 3e-3 --parallel.recompute
```

`CONFIG.yaml` is optional and comes first. The command line wins over it, and it wins over the defaults below.

- YAML has the groups as keys with their flags below, or flat keys (`training.lr: 3e-3`), or both.
- A bare boolean flag means True; `--parallel.recompute False` (also `true`, `0`, `1`) sets it either way.
- `None` or `null` means unset: None where the table allows it, else the default.
- Lists are separated by spaces on the command line, and a list or one text in YAML; `'[]'` is the empty list.
- JSON objects are text on the command line (`'{"PREFIX": 0.3}'`) and keys below the flag in YAML.
- Module patterns are full names with wildcards: `*` any characters, `?` one character, `{*}` one dotted component,
  `{0-3}` a number in that range. Quote them in YAML and in the shell.
- An unknown or misspelled name, a wrong type or choice, sizes that contradict each other and paths that do not exist
  end the program with one message and exit status 2 before torch is imported.

Status: **works**; **no effect** is accepted, and a value other than the default is answered with one warning;
**not built yet** refuses any value other than the default. A run writes its resolved configuration to
`OUTPUT_DIR/config.yaml`, which can be handed back as `CONFIG.yaml`.
"""


def page() -> str:
    """Return the text of docs/arguments.md."""
    parts = [_INTRODUCTION]
    for group, group_class in GROUPS.items():
        rows = [_row(row) for row in all_flags().values() if row.group == group]
        parts.append(
            f"## {group}\n\n{group_class.__doc__}\n\n"
            "| flag | value | default | status | meaning |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def _row(row: Flag) -> str:
    default = "required" if row.required else f"`{written(row.default)}`"
    meaning = row.help
    if row.status != WORKS:
        meaning += f" ({row.note})"
    for values, built in row.unbuilt_by_reason().items():
        meaning += f" ({', '.join(values)} not built yet: {built})"
    meaning = meaning.replace("*", r"\*")  # no emphasis
    return f"| `{row.dotted}` | {row.allowed} | {default} | {row.status} | {meaning} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 when the page is stale")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale; run python tools/arguments_page.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
