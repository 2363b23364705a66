"""Replaces a method of an object from another file than that of its class."""


def replaced(function):
    """Let `process_element` tell more of its record."""
    original = function.process_element

    def process_element(value, ctx):
        return [(str(value), 1) for _ in original(value, ctx)]

    function.process_element = process_element
