"""One short hash of a step's files, so that a result can name the weights that it belongs to."""

from __future__ import annotations

import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor

from mesh_transformer import gcs, storage
from mesh_transformer.checkpoint import layout, manifest, survey
from mesh_transformer.checkpoint.npz import file_crc32c

logger = logging.getLogger(__name__)

_WORKERS = 4


def step_hash(step_dir: str) -> str:
    """Of names, sizes and checksums of a step's data files; 16 hexadecimal digits.

    Taken from the manifest, which loading checks; files of the 2021 library, which wrote none, are read once more.
    """
    path = storage.normalise(step_dir)
    described = manifest.read(path)
    if described is not None:
        files = {name: (entry.bytes, entry.crc32c) for name, entry in described.files.items()}
    else:
        logger.info("%s has no manifest: taking the checksums of its files", path)
        files = _read(path)
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:16]


def _read(path: str) -> dict[str, tuple[int, str]]:
    places = {
        f"{shard}/{file}": layout.shard_file(path, shard, file)
        for shard in range(survey.count_shards(path))
        for file in range(layout.FILES)
    }

    def entry(place: str) -> tuple[int, str]:
        return storage.size(place), gcs.crc32c(place) if gcs.owns(place) else file_crc32c(place)

    with ThreadPoolExecutor(_WORKERS) as pool:
        return dict(zip(places, pool.map(entry, places.values()), strict=True))
