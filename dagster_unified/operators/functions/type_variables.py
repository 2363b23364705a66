"""The type variables of the API: records, keys, values and windows.

A function class is contravariant in its input and covariant in its output: a function of any record runs on a stream of
one kind of record. Streams and state are invariant, since a record's type decides its columns.
"""

from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
A = TypeVar("A")
B = TypeVar("B")
K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")
IN = TypeVar("IN")
OUT = TypeVar("OUT")

In = TypeVar("In", contravariant=True)
In1 = TypeVar("In1", contravariant=True)
In2 = TypeVar("In2", contravariant=True)
Key = TypeVar("Key", contravariant=True)
Win = TypeVar("Win", contravariant=True)

Out = TypeVar("Out", covariant=True)
KeyOut = TypeVar("KeyOut", covariant=True)
"""The key that a selector or a context returns."""
WinOut = TypeVar("WinOut", covariant=True)
"""The window that an assigner or a context returns."""
