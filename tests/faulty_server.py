"""device_serve.py with steps that go wrong when told to: files in the folder FAULTS say how.

`raise`: the next step raises, once. `raise-always`: every step raises. `slow`: each takes 0.1 s more.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import device_serve
from mesh_transformer.serving import batch

FAULTS = Path(os.environ["FAULTS"])
_decode = batch.Batch.decode


def decode(self, count):
    if (FAULTS / "slow").exists():
        time.sleep(0.1)
    if (FAULTS / "raise").exists():
        (FAULTS / "raise").unlink()
        raise RuntimeError("a secret of the server's")
    if (FAULTS / "raise-always").exists():
        raise RuntimeError("a secret of the server's")
    return _decode(self, count)


if __name__ == "__main__":
    batch.Batch.decode = decode
    sys.exit(device_serve.main())
