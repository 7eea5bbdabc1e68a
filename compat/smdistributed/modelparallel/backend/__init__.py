"""The module that launchers look in for exceptions; see :mod:`smdistributed.modelparallel.backend.exceptions`."""
