"""Text files as sources: CSV and JSON, whose rows may not fit their schema."""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from dagster_unified.arrow_types import with_nulls_declared
from dagster_unified.connectors.files.file_columns import first_lines
from dagster_unified.connectors.files.sources import FileSource, Load
from dagster_unified.connectors.files.texts import (
    SQUEEZED,
    UNREADABLE,
    CsvRows,
    JsonRows,
    Rows,
    as_texts,
    converted,
    expected,
    explained,
    has_half_surrogates,
    is_overflow,
    misfits_of_text,
    of_text,
    squeezed,
    unfit,
    within,
)
from dagster_unified.connectors.protocol.frame import MALFORMED, OnMalformed, fitting, non_deterministic, spark_schema
from dagster_unified.errors import MalformedInputError, PipelineError
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import load_one

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from typing_extensions import TypeForm
    from upath import UPath

    from dagster_unified.connectors.files.texts import Check

_VALUE, _ROW, _MORE, _CORRUPT = "value", "__row", "__more", "__corrupt"
"""Columns: a line that Spark scans, a row as it stands in its file, surplus fields, and text that is no JSON."""

_FIRST_BYTES = 1_000_000
"""Bytes of a file in which its first line is searched."""

_SHOWN = 200
"""Characters of a value that are shown at most."""

_UNDECODED = "\ufffd"
"""Spark's replacement of bytes that are not UTF-8."""

_NO_CHARACTER, _NO_DELIMITER = "\uffff", "\ufffe"
"""No characters. One stands before quotes that are escaped by themselves; by default NUL does, and is lost."""

_FILE, _PARSED, _CONVERTED, _FIRST = "__file", "__parsed", "__value", "__first"
"""Columns: a row's file, the parsed row, its fields' values by place, and its first problem."""

_SCANNED = "__field"
"""Columns: the text between the delimiters of a line, by place, with its quotes."""

_NO_VALUE = f"{_NO_DELIMITER}{_NO_CHARACTER}{_NO_DELIMITER}"
"""Stands for a missing value where none is to be taken for one."""


class TextSource(FileSource[Out]):
    """A text format, whose rows may not fit their schema."""

    def __init__(
        self,
        path: str,
        record: TypeForm[Out],
        name: str | None = None,
        on_malformed: OnMalformed = "fail",
        monitor: bool = False,
        max_files_per_trigger: int | None = None,
    ) -> None:
        super().__init__(path, record, name, monitor, max_files_per_trigger)
        if on_malformed not in ("fail", "drop", "divert"):
            raise PipelineError(
                f"source '{self.name}': on_malformed is 'fail', 'drop' or 'divert', not {on_malformed!r}"
            )
        self.on_malformed = on_malformed

    def describe(self) -> str:
        return f"{super().describe()}, malformed rows: {self.on_malformed}"

    def _read(self, spark: SparkSession, files: Sequence[UPath], load: Load, path_fields: Collection[str]) -> DataFrame:
        schema, options = self._scanned(path_fields)
        reader = spark.read.format(self.scanned_as).schema(schema).options(**options, **self._rooted(path_fields))
        return self._checked(self._in_folders(load(reader), path_fields), path_fields)

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        files = self._first_files()
        path_fields = self._path_fields(files[0]) if files else set()
        return self.unread(
            self._checked(self._stream(spark, *self._scanned(path_fields), folder, path_fields), path_fields)
        )

    def _scanned(self, path_fields: Collection[str]) -> tuple[StructType, dict[str, Any]]:
        """The columns and options with which Spark scans the files; by default only for their lines."""
        return self._text_columns([_VALUE], path_fields), {}

    def _text_columns(self, names: Iterable[str], path_fields: Collection[str]) -> StructType:
        """Columns with these names, and those of the fields that folder names give, all of texts."""
        from pyspark.sql.types import StringType, StructField, StructType

        in_path = [name for name in self.records.names if name in path_fields]
        return StructType([StructField(name, StringType()) for name in [*names, *in_path]])

    def _file_fields(self, path_fields: Collection[str]) -> pa.Schema:
        return pa.schema([field for field in self.records.schema if field.name not in path_fields])

    @abstractmethod
    def _parsed(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        """The scanned rows, with a column for each field."""

    @abstractmethod
    def _is_broken(self, path_fields: Collection[str]) -> Column:
        """Whether the text of a row is malformed, whatever its values are."""

    @abstractmethod
    def _misfits(self, field: pa.Field, value: Column) -> Iterator[Check]:
        """The checks of a field's column, except for a missing value; `value` is what `_value` returned."""

    @abstractmethod
    def _value(self, field: pa.Field) -> Column:
        """The values of a field, null where they do not fit."""

    @property
    @abstractmethod
    def rows(self) -> Rows:
        """The form of the rows."""

    def _row(self, path_fields: Collection[str]) -> Column:
        """The row as it stands in its file."""
        from pyspark.sql import functions as F

        return F.col(_ROW)

    def _checked(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        """Each row with its first problem; or, where a malformed row fails the run, only rows that fit.

        What is used more than once gets a projection of its own, which Catalyst then computes once.
        """
        from pyspark.sql import functions as F

        names = self.records.names
        # Catalyst reads all that it knows of a file where this is asked for behind a parser
        frame = self._parsed(frame.withColumn(_FILE, F.col("_metadata.file_path")), path_fields)
        values = {f"{_CONVERTED}{place}": name for place, name in enumerate(names)}
        fields = dict(zip(names, self.records.schema, strict=True))
        frame = frame.withColumns(
            {
                column: of_text(F.col(name), fields[name]) if name in path_fields else self._value(fields[name])
                for column, name in values.items()
            }
        )
        checks = list(self._checks(path_fields, {name: F.col(column) for column, name in values.items()}))
        first, reason = F.when(checks[0][0], F.lit(0)), F.when(F.col(_FIRST) == 0, checks[0][1])
        for place, (is_so, message) in enumerate(checks[1:], 1):
            first, reason = first.when(is_so, F.lit(place)), reason.when(F.col(_FIRST) == place, message)
        problem = F.when(
            F.col(_FIRST).isNotNull(),
            F.struct(
                F.col(_FILE).alias("file"),
                self._row(path_fields).alias("row"),
                non_deterministic(reason).alias("reason"),
            ),
        )
        frame = frame.withColumn(_FIRST, first)
        columns = [F.col(column).alias(name) for column, name in values.items()]
        if self.on_malformed != "fail":
            return frame.select(*columns, problem.alias(MALFORMED))
        return frame.withColumn(MALFORMED, problem).where(fitting(self.name)).select(*columns)

    def _checks(self, path_fields: Collection[str], values: Mapping[str, Column]) -> Iterator[tuple[Column, Column]]:
        """Each check of a row, in order: whether the row fails it, and the reason."""
        from pyspark.sql import functions as F

        yield self._is_broken(path_fields), F.lit(f"{UNREADABLE} {self.records.describe()}")
        for field, info in zip(self.records.schema, self.records.types, strict=True):
            column, value = F.col(field.name), values[field.name]
            declared = field.with_type(with_nulls_declared(field.type, info))
            for absent, test in within(declared, field.name, _missing):
                yield test(column), F.lit(absent)
            misfits = misfits_of_text(field, value) if field.name in path_fields else self._misfits(field, value)
            for misfit, test in misfits:
                yield test(column), _with_value(misfit, column, field.type)
        for name, enum in self.records.members().items():
            members = [member.value for member in enum]
            listed = ", ".join(map(repr, members))
            unknown = f"field '{name}' is not a value of {enum.__name__}, which has {listed}"
            kind = self.records.schema.field(name).type
            yield ~F.col(name).isin(members), _with_value(unknown, F.col(name), kind)

    def locate(self, spark: SparkSession, file: str, row: str, reason: str) -> MalformedInputError:
        """The error for a malformed row, with its line looked up in its file."""
        from pyspark.sql import functions as F

        file = unquote(file)
        first = row.splitlines()[0] if row else row
        text = load_one(spark.read.format("text"), file)
        lines = text.coalesce(1).select("value", (F.monotonically_increasing_id() + 1).alias("line"))
        matches = lines.where(F.regexp_replace("value", SQUEEZED, "") == squeezed(first)).limit(1).collect()
        line = f", line {matches[0].line}" if matches else ""
        reason = explained(self.rows, file, row, reason)
        return MalformedInputError(
            f"source '{self.name}': {_shown(file)}{line}: {reason}: {row[:200]}; fix the file, or read it with"
            " on_malformed='drop' or 'divert'"
        )


class CsvSource(TextSource[Out]):
    """CSV files: a path, a folder, a pattern with `*`, or a path template such as `sales/{start:%Y-%m-%d}.csv`.

    No other character makes a pattern; `[*]` is a star, and `{{` a brace.

    In BATCH a run reads the files that are there when it begins; a run for a partition those of which the template
    says so. In STREAMING the same files are read, and the input ends. With `monitor` it does not end, and only
    STREAMING reads it: each file once, as it appears, in the order of their age, and at most `max_files_per_trigger`
    in a micro-batch. Such a file has to appear at once, by a rename.

    `null_value` is the text that stands for a missing value, besides none at all. Unless it is given, an empty text in
    quotes is missing as well, as it is to pandas; where it is given, `""` is an empty text. With `header` the first
    line names the columns, and must name them in the order of the record's fields. A datetime without a zone is in UTC.
    A text may be in quotes, with quotes in it doubled, as RFC 4180 has it and most programs write it; `escape` is
    another character that stands before them, such as a backslash. A row whose quotes do not close is malformed. A row
    is one line, so that a line break in a text leaves two rows that are malformed. With `multi_line` such a text is
    read, and each file by one task; in a file whose lines end with CR LF, these two in a text become LF, and a quote
    that does not close makes the rows up to the next one part of its own. Blanks belong to a text, and a line of
    separators is a row; an empty line is none. A file with a header and one column is read by one task as well; where
    a tab or a blank is the delimiter, each line that names the columns is taken for a header. Files are in UTF-8; a
    text with other bytes makes its row malformed.

    A row that does not fit its record type fails the run with `MalformedInputError`, which names file and line. With
    `on_malformed="drop"` such rows are left out and counted; with `"divert"` they are kept in a table of their own.
    Raises `PipelineError` for a path without files, unless `monitor`, and `MalformedInputError` for a file whose header
    has other columns: the driver looks at the first line of each.

    Examples:
        >>> files = pipeline.from_source(CsvSource("sales/*.csv", Sale, name="files"))
        >>> [sale.amount for sale in collect(files, inputs={"files": [Sale("north", 3, at(9, 0))]})]
        [3]
    """

    format = "csv"

    def __init__(
        self,
        path: str,
        record: TypeForm[Out],
        name: str | None = None,
        on_malformed: OnMalformed = "fail",
        header: bool = True,
        delimiter: str = ",",
        null_value: str = "",
        escape: str = '"',
        multi_line: bool = False,
        monitor: bool = False,
        max_files_per_trigger: int | None = None,
    ) -> None:
        super().__init__(path, record, name, on_malformed, monitor, max_files_per_trigger)
        self.multi_line = multi_line
        if len(escape) != 1:
            raise PipelineError(f"source '{self.name}': escape is one character, not {escape!r}")
        self.header, self.null_value, self.escape = header, null_value, escape
        self.delimiter = "\t" if delimiter == r"\t" else delimiter
        nested = next((field.name for field in self.records.schema if pa.types.is_nested(field.type)), None)
        if nested is not None:
            raise PipelineError(f"source '{self.name}': field '{nested}' is nested, which CSV cannot hold; read JSON")

    def settings(self) -> str:
        settings = sorted({**self._dialect(), "header": self.header, "multiLine": self.multi_line}.items())
        return f"{super().settings()} {settings}"

    def _dialect(self) -> dict[str, str]:
        return {
            "sep": self.delimiter,
            "nullValue": self.null_value,
            "escape": self.escape,
            "charToEscapeQuoteEscaping": _NO_CHARACTER if self.escape == '"' else self.escape,
        }

    @property
    def scanned_as(self) -> str:
        return "text" if self._scans_lines else "csv"

    @property
    def _scans_lines(self) -> bool:
        """Whether Spark's CSV reader may miss rows: it leaves out lines of blanks and control characters."""
        blank = all(character <= " " for character in self.delimiter)
        return not self.multi_line and (blank or (len(self.records.names) == 1 and not self.header))

    @property
    def _scans_whole(self) -> bool:
        """Whether one task has to scan the lines: a header of one column may look like a row."""
        return not self.multi_line and not self._scans_lines and len(self.records.names) == 1

    @property
    def rows(self) -> CsvRows:
        return CsvRows(self.records.names, self.delimiter, self.escape)

    def _rows(self, path_fields: Collection[str]) -> CsvRows:
        return CsvRows(tuple(self._file_fields(path_fields).names), self.delimiter, self.escape)

    def _scanned(self, path_fields: Collection[str]) -> tuple[StructType, dict[str, Any]]:
        """Lines, split at the delimiter without regard to quotes.

        Spark returns a line as it stands in the file where it has more or fewer fields; else its fields give the line.
        With `multi_line` quotes say where a row ends: one column too many makes Spark return each row as it stands.
        """
        if self._scans_lines:
            return super()._scanned(path_fields)
        if self._scans_whole:
            lines = {"sep": _NO_DELIMITER, "quote": _NO_CHARACTER, "header": True, "multiLine": True}
            return self._text_columns([_VALUE], path_fields), lines
        names = self._file_fields(path_fields).names
        options = {
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": _ROW,
            "columnPruning": "false",
            "header": self.header,
            "multiLine": self.multi_line,
        }
        if self.multi_line:
            return self._text_columns([*names, _MORE, _ROW], path_fields), {**self._dialect(), **options}
        plain = {"sep": self.delimiter, "quote": _NO_CHARACTER, "escape": _NO_CHARACTER, "nullValue": _NO_VALUE}
        return self._text_columns([*_scanned_columns(names), _ROW], path_fields), {**plain, **options}

    def _parsed(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        from pyspark.sql import functions as F

        rows = self._rows(path_fields)
        if self._scans_lines or self._scans_whole:
            frame = frame.withColumnRenamed(_VALUE, _ROW)
            row = F.col(_ROW)
            is_row = row != "" if len(rows.names) == 1 else row.contains(self.delimiter) | row.rlike(r"[^\x00-\x20]")
            if self._scans_lines and self.header:
                is_row &= ~row.rlike(rows.header)
            frame = frame.where(is_row).withColumn(_PARSED, self._from_csv(row, rows))
            return frame.withColumns({name: F.col(f"{_PARSED}.{name}") for name in rows.names})
        if self.multi_line:
            keep_blanks = {"ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}
            written = F.to_csv(F.struct(*rows.names, _MORE), {**self._dialect(), **keep_blanks})
            # Spark gives no row of exactly one field too many as it stands in the file
            return frame.withColumn(_ROW, F.coalesce(_ROW, written))
        scanned = dict(zip(rows.names, map(F.col, _scanned_columns(rows.names)), strict=True))
        has_quotes = F.col(_ROW).contains('"')
        for text in scanned.values():
            has_quotes |= text.contains('"')
        frame = frame.withColumn(_PARSED, F.when(has_quotes, self._from_csv(self._row(path_fields), rows)))
        has_quotes = F.col(_PARSED).isNotNull()
        if self.null_value:
            scanned = {name: F.nullif(text, F.lit(self.null_value)) for name, text in scanned.items()}
        return frame.withColumns(
            {name: F.when(has_quotes, F.col(f"{_PARSED}.{name}")).otherwise(text) for name, text in scanned.items()}
        )

    def _from_csv(self, row: Column, rows: CsvRows) -> Column:
        from pyspark.sql import functions as F

        fields = ", ".join(f"`{name}` string" for name in rows.names)
        return F.from_csv(row, fields, {**self._dialect(), "mode": "PERMISSIVE"})

    @property
    def _scans_fields(self) -> bool:
        """Whether Spark scans the text between the delimiters of a line."""
        return not (self.multi_line or self._scans_lines or self._scans_whole)

    def _row(self, path_fields: Collection[str]) -> Column:
        from pyspark.sql import functions as F

        row = F.col(_ROW)
        if not self._scans_fields:
            return row
        texts = [
            F.coalesce(F.col(column), F.lit("")) for column in _scanned_columns(self._file_fields(path_fields).names)
        ]
        return F.coalesce(row, F.concat_ws(self.delimiter, *texts))

    def _is_broken(self, path_fields: Collection[str]) -> Column:
        from pyspark.sql import functions as F

        rows, row = self._rows(path_fields), self._row(path_fields)
        if self._scans_fields:
            return F.when(F.col(_PARSED).isNotNull(), ~row.rlike(rows.row)).otherwise(F.col(_ROW).isNotNull())
        apart = F.length(row) - F.length(F.replace(row, F.lit(self.delimiter), F.lit("")))
        counted = apart == len(self.delimiter) * (len(rows.names) - 1)
        return F.when(row.contains('"'), ~row.rlike(rows.row)).otherwise(~counted)

    def _misfits(self, field: pa.Field, value: Column) -> Iterator[Check]:
        from pyspark.sql import functions as F

        yield from misfits_of_text(field, value)
        if pa.types.is_boolean(field.type):  # Spark takes other words for one as well
            problem = f"field '{field.name}' is not {expected(field.type)}"
            yield problem, lambda text: ~F.lower(F.trim(text)).isin("true", "false")
        if pa.types.is_string(field.type):
            problem = f"field '{field.name}' has bytes that are not UTF-8, or U+FFFD, which stands for such bytes"
            yield problem, lambda text: text.contains(_UNDECODED)

    def _value(self, field: pa.Field) -> Column:
        from pyspark.sql import functions as F

        return of_text(F.col(field.name), field)

    def _check_each(self, spark: SparkSession, files: Sequence[UPath]) -> None:
        """Raises `MalformedInputError` for a file whose first line does not name the fields."""
        super()._check_each(spark, files)
        if not self.header or not files:
            return
        _silence(spark)
        path_fields = self._path_fields(files[0])
        rows = self._rows(path_fields)
        for file, line in zip(files, first_lines(spark, files), strict=True):
            if line is not None and not rows.is_header(line):
                columns = [name.strip() for name in next(csv.reader([line], delimiter=self.delimiter[:1]), [])]
                raise MalformedInputError(
                    f"source '{self.name}': the header of {file} has the columns {', '.join(columns)}, and"
                    f" {self.records.describe()} needs {', '.join(rows.names)}, in this order; correct the file or the"
                    " record, or read it with header=False if its first line is no header"
                )


class JsonSource(TextSource[Out]):
    """JSON files, one object per line.

    Paths, modes, partitions and malformed rows are as in `CsvSource`; there is an example at `CsvSource`. A member
    that the record does not have is ignored; a field that the object does not have is None, or makes the row
    malformed where the field may not be None. Half a surrogate pair is no character, and makes its row malformed. Spark
    reads one object of a line, and nothing of what follows it there;
    bounded files whose first line has more are a `PipelineError`.
    """

    format = "json"

    def _look_at(self, file: UPath) -> None:
        try:
            with file.open("rb") as opened:
                start = opened.read(_FIRST_BYTES).decode("utf-8-sig", "replace").lstrip()
            _, end = json.JSONDecoder().raw_decode(start)
        except (OSError, ValueError, RecursionError):  # Spark says what is wrong with it
            return
        more = start[end:].partition("\n")[0].strip()
        if more:
            raise PipelineError(
                f"source '{self.name}': the first line of {file} goes on behind its first object, with"
                f" {more[:40]!r}, and only one object of a line is read; write one to a line, as `jq -c .` does"
            )

    @property
    def scanned_as(self) -> str:
        return "text"

    def _parsed(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StringType

        file_schema = self._file_fields(path_fields)
        schema = spark_schema(as_texts(file_schema)).add(_CORRUPT, StringType())
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        row = F.col(_ROW)
        frame = frame.withColumnRenamed(_VALUE, _ROW).where(row.contains("{") | row.rlike(r"\S"))
        frame = frame.withColumn(_PARSED, F.from_json(_ROW, schema, options))
        return frame.withColumns({name: F.col(f"{_PARSED}.{name}") for name in file_schema.names})

    def _is_broken(self, path_fields: Collection[str]) -> Column:
        from pyspark.sql import functions as F

        row = F.col(_ROW)
        no_object = F.col(f"{_PARSED}.{_CORRUPT}").isNotNull() | ~F.ltrim(row).startswith("{")
        return no_object | has_half_surrogates(row) | ~F.is_valid_utf8(row)

    def _misfits(self, field: pa.Field, value: Column) -> Iterator[Check]:
        checks = unfit if pa.types.is_nested(field.type) else partial(unfit, value=value)
        return chain(within(field, field.name, checks), within(field, field.name, _overflows))

    def _value(self, field: pa.Field) -> Column:
        from pyspark.sql import functions as F

        return converted(F.col(field.name), field)

    @property
    def rows(self) -> Rows:
        return JsonRows(self.records.schema)


def _scanned_columns(names: Collection[str]) -> list[str]:
    return [f"{_SCANNED}{place}" for place in range(len(names))]


def _silence(spark: SparkSession) -> None:
    """Have Spark not warn, for each file, that its header has one column fewer than are scanned."""
    if not is_connect(spark):
        logging = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
        checker = "org.apache.spark.sql.catalyst.csv.CSVHeaderChecker"
        logging.core.config.Configurator.setLevel(checker, logging.Level.ERROR)


def _missing(field: pa.Field, path: str) -> Iterator[Check]:
    if not field.nullable:
        yield f"field '{path}' is missing, and its type does not allow None", lambda value: value.isNull()


def _overflows(field: pa.Field, path: str) -> Iterator[Check]:
    from pyspark.sql import functions as F

    if pa.types.is_floating(field.type):
        yield f"field '{path}' is not {expected(field.type)}", lambda value: is_overflow(value, F.col(_ROW))


def _with_value(problem: str, value: Column, kind: pa.DataType) -> Column:
    from pyspark.sql import functions as F

    text = F.to_json(value) if pa.types.is_nested(kind) else value.cast("string")
    return F.concat(F.lit(f"{problem}; it is '"), F.substring(text, 1, _SHOWN), F.lit("'"))


def _shown(file: str) -> str:
    return file.removeprefix("file:").replace("///", "/")
