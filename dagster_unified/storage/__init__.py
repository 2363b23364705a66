"""Files on disks and in object stores: paths, conditional writes, and the store that a process uses.

Knows how Spark and `universal_pathlib` write a path; not what the files hold.
"""
