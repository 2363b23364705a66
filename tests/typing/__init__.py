"""What a checker sees is what runs.

Every file here is read by mypy and by pyright, both strict, and then run by pytest. `assert_type` says what is seen. A
line that has to be rejected carries an ignore comment for each checker, and both checkers fail where such a comment is
not needed.
"""
