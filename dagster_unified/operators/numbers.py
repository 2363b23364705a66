"""The numbers of entries among the pages of a key group that are no pages. A leaf: loaded where little may be."""

INDEX = 2**31 - 2
"""The group's index, where it lies among the pages."""

BROADCAST = 2**31 - 1
"""The group's copy of broadcast state."""

COLUMNS = 2**30
"""The first of the columns of the group's solution set, in a delta iteration over Arrow batches."""
