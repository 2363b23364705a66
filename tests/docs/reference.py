"""The API reference as plain Markdown: readable on a code host, where nothing is built.

An outline in `outlines/` is a page with the names that it documents: `::: package`, and below it the options that
`griffe2md` takes. The names are replaced by their signatures and docstrings.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import cast

import griffe
import yaml
from griffe2md import ConfigDict, render_object_docs

OUTLINES = Path(__file__).parent / "outlines"
ROOT = Path(__file__).parents[2]

_ENTRY = re.compile(r"^::: (?P<name>\S+)\n(?P<options>(?:    .*\n?)*)", re.MULTILINE)

_OPTIONS = ConfigDict(
    docstring_section_style="list",
    filters=["!^_"],
    heading_level=2,
    inherited_members=False,
    line_length=100,
    merge_init_into_class=True,
    separate_signature=True,
    show_bases=False,
    show_if_no_docstring=False,
    show_object_full_path=False,
    show_root_full_path=False,
    show_root_heading=False,
    show_root_members_full_path=False,
    show_signature_annotations=True,
    summary=False,
)


def reference_page(outline: Path) -> str:
    """The page that an outline describes."""
    page = _ENTRY.sub(lambda entry: _documented(entry["name"], entry["options"]), outline.read_text())
    return page.rstrip("\n") + "\n"


def _documented(name: str, options: str) -> str:
    given = yaml.safe_load(options)["options"] if options else {}
    found = _package()[name.partition(".")[2]]
    members = given.pop("members", None) or found.exports
    objects = [found[member] for member in members] if members else [found]
    config = cast(ConfigDict, {**_OPTIONS, "show_root_heading": bool(members) or found.is_class, **given})
    return "\n".join(render_object_docs(documented, config) for documented in objects)


@cache
def _package() -> griffe.Object | griffe.Alias:
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google")
    package = loader.load("dagster_unified")
    loader.resolve_aliases(external=False)
    return package
