"""What an author's function does, read from its source: the ground on which it runs faster and gives the same.

`source` finds the text that a function was compiled from, `reading` turns it into the `language`, or says why not,
and `inlining` makes of that what a chain of operators runs. Knows no engine and runs no author's code.
"""
