"""Everything that only a GPU can show, in one run of eight minutes; see ``docs/measurements/gpu``.

``python -m tools.gpu_day`` runs the steps of :mod:`tools.gpu_day.plan` in order of value. It works from a checkout and
from the unpacked pack that ``make gpu-pack`` builds, where there is neither cargo nor a network.
"""
