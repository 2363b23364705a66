"""How a source reads only a partition of itself by the names of its files: paths with fields in them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence, Set
from datetime import datetime
from string import Formatter

from dagster_unified.connectors.files.folder import as_regex, has_star
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.connectors import Dimensions, Slice, TimeRange

_PLAIN = re.compile(r"[\w.=+@:-][\w .=+@:-]*")
_DIRECTIVES = frozenset("aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ%")
"""The letters of `strftime`; a `-` before one leaves out leading zeros."""


class PathTemplate:
    """A path with `{start:%Y-%m-%d}`, `{end:…}`, `{key}` or, for several dimensions, `{name}` or `{name:%Y}` in it.

    Raises `PipelineError` where the path is no template, or a field's format is no time format.
    """

    def __init__(self, path: str, where: str) -> None:
        self.path, self.where = path, where
        try:
            pieces = list(Formatter().parse(path))
        except ValueError as error:
            raise PipelineError(
                f"{where}: {path!r} is not a path template: {error}; write {{start:%Y-%m-%d}} or {{key}}"
            ) from None
        self._pieces = [(text, name, form or "") for text, name, form, _ in pieces]
        for _, name, form, conversion in pieces:
            if name is not None and not name.isidentifier():
                raise self._error(
                    f"has {{{name}}}, which no partition has; write {{{{ and }}}} for braces that are part of a name"
                )
            if conversion:
                raise self._error(
                    f"has the conversion '!{conversion}' for {{{name}}}; write {{start:%Y-%m-%d}} or {{key}}"
                )
            if form:
                self._check_format(name or "", form)

    def check(self, known: Dimensions) -> None:
        """Raise `PipelineError` for a field that partitions with these dimensions do not have."""
        times = {*known.in_time, *(("start", "end") if known.in_time else ())} - {""}
        names = {*times, *known.names, "key"} - {""}
        for _, name, form in self._pieces:
            if name is None:
                continue
            if name not in names:
                listed = ", ".join(f"{{{n}}}" for n in sorted(names))
                raise self._error(f"asks for '{name}', and a partition has {listed}{nearest(name, names)}")
            if form and name not in times:
                raise self._error(f"formats {{{name}}} as a time, '{form}', and it is a text; write {{{name}}}")

    def _check_format(self, name: str, form: str) -> None:
        advice = f"write {{{name or 'start'}:%Y-%m-%d}}"
        directives = re.findall(r"%-?.?", form)
        if all(directive == "%%" for directive in directives):
            raise self._error(f"has the format '{form}' for {{{name}}}, which is the same at every time; {advice}")
        for directive in directives:
            if directive[-1] not in _DIRECTIVES or directive == "%":
                raise self._error(
                    f"has the format '{form}' for {{{name}}}, in which '{directive}' is no directive of strftime;"
                    f" {advice}"
                )

    def _error(self, problem: str) -> PipelineError:
        return PipelineError(f"{self.where}: the path template '{self.path}' {problem}")

    def has_fields(self) -> bool:
        """Whether partitions have paths of their own."""
        return any(name is not None for _, name, _ in self._pieces)

    def everything(self) -> str:
        """The pattern that all partitions' paths match."""
        return self._filled(lambda _name, form: "/".join("*" for _ in form.split("/")))

    def of(self, slice_: Slice) -> str:
        """The path of one partition."""
        return self._filled(lambda name, form: self._value(name, form, slice_))

    def names(self, dimensions: Set[str]) -> bool:
        """Whether a field of the path belongs to one of these dimensions in time."""
        return any(name in {*dimensions, "start", "end", "key"} for _, name, _ in self._pieces)

    def tells_no_time(self) -> str | None:
        """The reason why files' paths do not tell their partition in time; None where they do."""
        return self._times if isinstance(self._times, str) else None

    def ends_by(self, name: str, moment: datetime) -> bool:
        """Whether a file is of a partition that ends by a moment, in the partitions' time zone.

        `name` is the path of the file below the folder before the first field.
        """
        return not isinstance(self._times, str) and self._times.end_by(name, moment)

    @functools.cached_property
    def _times(self) -> PathTimes | str:
        names = [name for _, name, _ in self._pieces if name is not None]
        field = next((name for name in ("start", "end", "key") if name in names), None)
        if field is None:
            return f"the path template '{self.path}' has no {{start:%Y-%m-%d}}, which would tell a file's partition"
        folders = self._pieces[0][0].split("/")
        below = next((n for n, folder in enumerate(folders) if has_star(folder)), len(folders) - 1)
        pieces = [("/".join(folders[below:]), *self._pieces[0][1:]), *self._pieces[1:]]
        try:
            return PathTimes(field, pieces)
        except KeyError as unknown:
            return f"the path template '{self.path}' has %{unknown.args[0]}, which cannot be read back from a path"

    def _filled(self, value: Callable[[str, str], str]) -> str:
        return "".join(text + (value(name, form) if name is not None else "") for text, name, form in self._pieces)

    def _value(self, name: str, form: str, slice_: Slice) -> str:
        time = slice_.time()
        known: dict[str, datetime | str] = {
            "key": slice_.key,
            **({"start": time.start, "end": time.end} if time is not None else {}),
        }
        known |= {n: p.start if isinstance(p, TimeRange) else p for n, p in slice_.dimensions.items() if n}
        value = known[name]
        text = value.strftime(form or "%Y-%m-%d") if isinstance(value, datetime) else str(value)
        if not all(
            segment not in (".", "..") and _PLAIN.fullmatch(segment)
            for segment in (text.split("/") if isinstance(value, datetime) else [text])
        ):
            raise PipelineError(
                f"{self.where}: partition '{slice_.key}' gives {text!r} for {{{name}}}, which cannot be part of a path"
            )
        return text


class PathTimes:
    """The times that one field of a path template has in the paths of files: its start, its end or its key.

    Raises `KeyError` with a directive that cannot be read back.
    """

    def __init__(self, field: str, pieces: Sequence[tuple[str, str | None, str]]) -> None:
        self.field = field
        self._directives: list[str] = []
        pattern = ""
        for text, name, form in pieces:
            pattern += as_regex(text)
            if name == field == "key":
                pattern += "([^/]+)"
            elif name == field:
                pattern += self._pattern(form or "%Y-%m-%d")
            elif name is not None:
                pattern += "/".join("[^/]*" for _ in form.split("/"))
        self._matcher = re.compile(f"{pattern}(?:/.*)?")

    def end_by(self, name: str, moment: datetime) -> bool:
        """Whether the file of this path is of a partition that ends by a moment, in the partitions' time zone.

        The moment is written as the path writes its time, which may be coarser: the day of a partition that begins at
        01:00, since the clock skips the hour before.
        """
        match = self._matcher.fullmatch(name)
        if match is None:
            return False
        texts = "/".join(match.groups())
        forms = _KEYS if self.field == "key" else ["/".join(f"%{directive}" for directive in self._directives)]
        for form in forms:
            with contextlib.suppress(ValueError):
                time, limit = (datetime.strptime(text, form) for text in (texts, moment.strftime(form)))
                return time <= limit if self.field == "end" else time < limit
        return False

    def _pattern(self, form: str) -> str:
        """A format as a regular expression, with a group for the first use of each directive."""
        for short, long in _SHORT.items():
            form = form.replace(short, long)
        pattern = ""
        for literal, directive in re.findall(r"([^%]+)|%-?(.)", form):
            if literal or directive == "%":
                pattern += re.escape(literal or "%")
                continue
            text = _READABLE[directive]
            pattern += f"(?:{text})" if directive in self._directives else f"({text})"
            self._directives += [directive] if directive not in self._directives else []
        return pattern


_READABLE = {
    **dict.fromkeys("mdHIMSyVUW", r"\d{1,2}"),
    **dict.fromkeys("YG", r"\d{4}"),
    **dict.fromkeys("aAbBp", r"[^/\d]+"),
    **dict.fromkeys("uw", r"\d"),
    "j": r"\d{1,3}",
    "f": r"\d{1,6}",
}
"""The directives that `strptime` reads, as regular expressions."""

_SHORT = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S", "%R": "%H:%M", "%h": "%b"}

_KEYS = ("%Y-%m-%d", "%Y-%m-%d-%H:%M")
"""How Dagster writes the keys of days, weeks and months, and of hours."""
