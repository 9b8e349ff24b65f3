"""Reading CONFIG.yaml into (dotted name, raw value, line) entries, with errors that name file and line.

The file is composed into nodes and not constructed: texts stay as they are written, so that YAML's own guesses (`1e-5`
is text, `no` is False, `12:30` is 750) do not get between the user and the flag, and every entry knows its line. Groups
may be nested (`training:` / `lr: ...`) or flat (`training.lr: ...`), in one file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments.paths import missing

_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Entry:
    """One key of the file.

    Attributes:
        key: dotted name, as written (it may be no flag at all).
        raw: text, a list of texts, anything else as YAML constructs it, or None (no value, `~`).
        plain: a text without quotes, where `None` means unset.
        place: file and line, for messages.
    """

    key: str
    raw: Any
    plain: bool
    place: str


def read_yaml(path: str, group_names: list[str]) -> list[Entry]:
    """Return the entries of a YAML file in order.

    Raises:
        ConfigurationError: no such file, not YAML, not a mapping, or a key given twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"CONFIG.yaml: {missing(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"CONFIG.yaml: {path} cannot be read: {error}") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        entries = [] if root is None or _is_empty(root) else list(_entries(loader, path, root, group_names))
    except yaml.YAMLError as error:
        raise ConfigurationError(_syntax_message(path, error)) from None
    _refuse_duplicates(entries)
    return entries


def _entries(loader: yaml.SafeLoader, path: str, root: yaml.Node, group_names: list[str]) -> Iterator[Entry]:
    for key, node, place in _items(path, root):
        if key not in group_names:
            yield _entry(loader, key, node, place)
        elif isinstance(node, yaml.MappingNode):
            for name, value, value_place in _items(path, node):
                yield _entry(loader, f"{key}.{name}", value, value_place)
        elif not _is_empty(node):
            raise ConfigurationError(f"{place}: {key} is a group of flags; write its flags below it, indented")


def _items(path: str, node: yaml.Node) -> Iterator[tuple[str, yaml.Node, str]]:
    """The (key, value, place) of a mapping: what `<<: *other` brings, unless the mapping has that key itself, first."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"{path}, line {node.start_mark.line + 1}: expected lines of `key: value`")
    own, merged = [], {}
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE_TAG:
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                for item in _items(path, source):
                    merged.setdefault(item[0], item)
        else:
            own.append((str(key_node.value), value_node, f"{path}, line {key_node.start_mark.line + 1}"))
    own_keys = {key for key, _, _ in own}
    yield from (item for key, item in merged.items() if key not in own_keys)
    yield from own


def _entry(loader: yaml.SafeLoader, key: str, node: yaml.Node, place: str) -> Entry:
    if isinstance(node, yaml.ScalarNode):
        return Entry(key, None if _is_empty(node) else node.value, plain=node.style is None, place=place)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(child, yaml.ScalarNode) for child in node.value):
        return Entry(key, [child.value for child in node.value], plain=False, place=place)
    return Entry(key, loader.construct_document(node), plain=False, place=place)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~")


def _refuse_duplicates(entries: list[Entry]) -> None:
    first_place: dict[str, str] = {}
    for entry in entries:
        if entry.key in first_place:
            raise ConfigurationError(f"{entry.place}: {entry.key} is given twice, first at {first_place[entry.key]}")
        first_place[entry.key] = entry.place


def _syntax_message(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else path
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return f"{place}: {problem}" + "; quote module patterns in YAML: '*lm_head', 'model.layers.{*}'"
