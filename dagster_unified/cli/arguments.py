"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Defines = Annotated[
    list[str], Parameter(name=["-D", "--define"], help="Set an option: key=value. May be repeated.", negative="")
]
