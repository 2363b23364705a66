"""Iterations as the engines run them: a body compiled to a loop, and its rounds driven one after another."""
