"""Where the two backends meet: the only package that imports both.

Runs them side by side, measures how far apart they are, and reports it. The ``diptych`` command
lives here.
"""
