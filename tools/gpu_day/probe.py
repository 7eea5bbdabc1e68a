"""Whether a process can use the CUDA device: it ends with 0 if so, with 3 where there is none."""

from __future__ import annotations

import sys

#: The exit code where there is no device.
NO_DEVICE = 3


def main() -> int:
    """Use the device; the exit code."""
    import torch

    if not torch.cuda.is_available():
        return NO_DEVICE
    if float(torch.ones(8, device="cuda").sum()) != 8.0:
        raise RuntimeError("the device does not add")
    return 0


if __name__ == "__main__":
    sys.exit(main())
