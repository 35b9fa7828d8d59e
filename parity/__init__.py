"""Comparison of the two backends, and the ``diptych`` command.

This is the only package that imports both backends. It trains them side by side, measures their differences, and
reports them.
"""
