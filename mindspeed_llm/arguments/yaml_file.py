"""Reading CONFIG.yaml into (dotted name, raw value, line) entries, with errors that name file and line.

The file is composed into nodes and not constructed: texts stay as they are written, so that YAML's own guesses
(`1e-5` is text, `no` is False, `12:30` is 750) do not get between the user and the flag, and every entry knows its
line. Groups may be nested (`training:` / `lr: ...`) or flat (`training.lr: ...`), in one file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments.paths import missing

_NULL_TAG = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Entry:
    """One key of the file. raw: text, list of texts, dict or None; plain: the text stands without quotes (so `None` means unset)."""

    key: str
    raw: Any
    plain: bool
    place: str


def read_yaml(path: str, group_names: list[str]) -> list[Entry]:
    """Return the entries of a YAML file in order; a key given twice is an error.

    Raises ConfigurationError: no such file, not YAML, not a mapping, a key twice.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(f"CONFIG.yaml: {missing(path)}")
    loader = yaml.SafeLoader(file.read_text(encoding="utf-8"))
    try:
        root = loader.get_single_node()
        entries = [] if root is None or root.tag == _NULL_TAG else list(_entries(loader, path, root, group_names))
    except yaml.YAMLError as error:
        raise ConfigurationError(_syntax_message(path, error)) from None
    finally:
        loader.dispose()
    _refuse_duplicates(entries)
    return entries


def _entries(loader: yaml.SafeLoader, path: str, root: yaml.Node, group_names: list[str]):
    for key, node, place in _items(loader, path, root):
        if key not in group_names or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL_TAG):
            if key not in group_names:
                yield _entry(loader, key, node, place)
            continue
        if not isinstance(node, yaml.MappingNode):
            raise ConfigurationError(f"{place}: {key} is a group of flags; write its flags below it, indented")
        for name, value, value_place in _items(loader, path, node):
            yield _entry(loader, f"{key}.{name}", value, value_place)


def _items(loader: yaml.SafeLoader, path: str, node: yaml.Node):
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"{path}, line {node.start_mark.line + 1}: expected `key: value` lines")
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        yield str(key_node.value), value_node, f"{path}, line {key_node.start_mark.line + 1}"


def _entry(loader: yaml.SafeLoader, key: str, node: yaml.Node, place: str) -> Entry:
    if isinstance(node, yaml.ScalarNode):
        null = node.tag == _NULL_TAG and node.value in ("", "~")
        return Entry(key, None if null else node.value, plain=node.style is None, place=place)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(child, yaml.ScalarNode) for child in node.value):
        return Entry(key, [child.value for child in node.value], plain=False, place=place)
    return Entry(key, loader.construct_document(node), plain=False, place=place)


def _refuse_duplicates(entries: list[Entry]) -> None:
    seen: dict[str, Entry] = {}
    for entry in entries:
        if entry.key in seen:
            raise ConfigurationError(f"{entry.place}: {entry.key} is given twice, first at {seen[entry.key].place}")
        seen[entry.key] = entry


def _syntax_message(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else path
    problem = getattr(error, "problem", None) or str(error)
    return f"{place}: not YAML: {problem} (quote module patterns: '*lm_head', 'model.layers.{{*}}')".replace(
        "{{*}}", "{*}"
    )
