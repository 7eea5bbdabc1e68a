"""The first minutes of somebody who installs the wheel: ``make first-minutes``."""
