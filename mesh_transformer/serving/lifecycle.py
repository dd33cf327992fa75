"""The server's life: a port of its own, the model loaded behind it, and an orderly end.

The port is bound before anything slow is done. /health says `loading` until the model has compiled. SIGTERM and Ctrl-C
drain: nothing new is taken, what is there is finished, for `Limits.drain` seconds at most; a second one ends at once.
An engine that has failed ends the process with EXIT_FAILED, one that could not load with EXIT_USER.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from mesh_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, DeviceError, MeshTransformerError
from mesh_transformer.serving.app import create_app
from mesh_transformer.serving.batch import Batch
from mesh_transformer.serving.engine import Engine, State
from mesh_transformer.serving.service import Service

logger = logging.getLogger(__name__)

BACKLOG = 2048
LAST_WORDS = 1.0  # seconds for which a failed server still says so on /health
_FLUSH = 5.0  # seconds for what was answered to leave, and for the engine's last step


def bind(host: str, port: int) -> socket.socket:
    """A listening address, before anything else is done. Raises DeviceError where it is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # so that a second server on the same port is refused now, not after loading
    except (OSError, OverflowError) as error:
        sock.close()
        raise DeviceError(
            f"cannot listen on {host}, port {port} ({error}): choose others with --host, --port, or end what uses it"
        ) from error
    return sock


class _Server(uvicorn.Server):
    """uvicorn's, which ends when the engine has nothing left to do, or has failed."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: float) -> None:
        super().__init__(config)
        self._engine, self._drain = engine, drain
        self._drain_until: float | None = None
        self._failed_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT."""
        if self._drain_until is not None:
            self.should_exit = self.force_exit = True
            return
        # The engine is told in `on_tick`: a handler must not wait for a lock that the code it broke into may hold.
        self._drain_until = time.monotonic() + self._drain

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        now, engine = time.monotonic(), self._engine
        if self._drain_until is not None:
            if engine.state in (State.LOADING, State.READY):
                logger.info("ending: %d running and %d waiting texts first", engine.running, engine.waiting)
                engine.drain()
            if engine.idle or now > self._drain_until:
                self.should_exit = True
        if engine.state is State.FAILED:
            self._failed_at = self._failed_at or now
            if now - self._failed_at > LAST_WORDS:
                self.should_exit = True
        if self.should_exit:
            # Whoever is left is told now, so that their connections can close.
            engine.stop(seconds=0)
        return await super().on_tick(counter)


def serve(
    service: Service, load: Callable[[], Batch], sock: socket.socket, origins: Sequence[str], keys: Sequence[str]
) -> int:
    """Serves until it is told to end; returns the exit code. `load` makes the batch, on the engine's thread."""
    engine = service.engine
    config = uvicorn.Config(
        create_app(service, origins, keys), log_config=None, access_log=False, lifespan="off", server_header=False,
        backlog=BACKLOG, timeout_graceful_shutdown=int(_FLUSH), ws="none",
    )  # fmt: skip
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    engine.start(load)
    host, port = sock.getsockname()[:2]
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    _Server(config, engine, service.limits.drain).run(sockets=[sock])
    ended = engine.stop(_FLUSH)
    if engine.error is not None:
        code = _explain(engine.error)
    else:
        logger.info("ended")
        code = EXIT_DONE
    if not ended:
        # A step or a compilation that cannot be waited for: an interpreter's orderly end would crash in it.
        sys.stderr.flush()
        os._exit(code)
    return code


def _explain(error: BaseException) -> int:
    """Says why the engine ended; the exit code for that."""
    if isinstance(error, MeshTransformerError):
        sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
        return EXIT_USER
    logger.error("the engine has failed: %s", "".join(str(error).splitlines()[:1]), exc_info=error)
    return EXIT_FAILED
