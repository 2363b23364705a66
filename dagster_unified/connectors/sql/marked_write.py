"""Writes rows in one transaction with the marks of who wrote them: exactly-once without two-phase commit.

A mark is a row of a table of the library: a name, and the highest version that was committed under it. The first
statements of a commit raise its marks, on condition that no later ones are there: so they wait for whoever is
committing under the same mark, and a writer that was succeeded finds that it was. Knows no database; each says how it
does the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from dagster_unified.connectors.protocol.commits import C, Commit, CommitConflictError
from dagster_unified.connectors.sql.table_sink import Mode
from dagster_unified.errors import SinkError


class MarkedWrite(ABC, Generic[C]):
    """One transaction of a sink into a table. `where` begins the messages of its errors."""

    def __init__(self, mode: Mode, partition_column: str | None, where: str) -> None:
        self.mode, self.partition_column, self.where = mode, partition_column, where

    def write(self, commits: Sequence[Commit[C]]) -> None:
        """Write all rows of some commits, and their marks; raises `CommitConflictError` where a later mark is there."""
        first = self._mark(commits)
        for number, commit in enumerate(commits):
            self.load(number, commit.committables, self._clear(commit, first[number]))

    def _mark(self, commits: Sequence[Commit[C]]) -> list[bool]:
        """Raise the marks, always in the same order; returns which commits are the first of their deployment."""
        first = [False] * len(commits)
        for name, number in sorted((name, number) for number, commit in enumerate(commits) for name in commit.marks):
            commit = commits[number]
            is_new = self.raise_mark(name, commit.marks[name], again=name != commit.identity.writer)
            if is_new is None:
                raise CommitConflictError(f"{self.where}: {name} has been committed by another job")
            first[number] = first[number] or (is_new and name == commit.identity.deployment)
        return first

    def _clear(self, commit: Commit[C], first: bool) -> str | None:
        """Delete what a commit replaces; returns the partition that its rows are marked with."""
        identity = commit.identity
        if self.mode == "upsert":
            return None
        if identity.replaces is None:
            if self.mode == "overwrite" and (identity.epoch is None or first):
                self.delete_all()
            return None
        again = self.count_run(identity.replaces)
        if self.partition_column is not None:
            self.delete_partition(self.partition_column, identity.partition_key)
            return identity.partition_key
        if again:
            raise SinkError(
                f"{self.where}: partition '{identity.partition_key}' was written before, and its rows cannot be told"
                " from others, so they would be there twice; name a column that says what partition wrote a row, with"
                " partition_column=..., or use mode='upsert'"
            )
        return None

    @abstractmethod
    def raise_mark(self, name: str, version: int, again: bool) -> bool | None:
        """Raise a mark that nobody else changes until this transaction ends; returns whether it is new.

        None where a later version is there, or the same one unless it may come `again`.
        """

    @abstractmethod
    def count_run(self, name: str) -> bool:
        """Wait for other runs of a partition, and count this one; returns whether one has committed before."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete all rows of the table."""

    @abstractmethod
    def delete_partition(self, column: str, key: str) -> None:
        """Delete the rows of a partition."""

    @abstractmethod
    def load(self, number: int, committables: Sequence[C], partition: str | None) -> None:
        """Add the staged rows of the commit with this number, or replace those with their keys."""
