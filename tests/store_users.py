"""Users of one store in this process and in another, which can be killed; same calls for both."""

import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from cachestore_connector.errors import Code
from cachestore_connector.store import Store

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
from pages_of_bytes import block_ids


def content(block, seed, size):
    """The bytes that block number ``block`` has in version ``seed``."""
    return np.random.default_rng([block, seed]).integers(0, 256, size, dtype=np.uint8)


def block_id(block):
    """The id of block number ``block``."""
    return block_ids(1, prefix=f"property-{block}")


class StoreUser:
    """Opens a store, and moves numbered blocks between it and memory of its own."""

    def __init__(self):
        self.store, self.options = None, None

    def open(self, options):
        """Open, or open anew."""
        self.close()
        self.store, self.options = Store(options), options

    def dump(self, blocks, seed):
        """Dump versions ``seed`` of blocks; a code for each."""
        pages = [content(block, seed, self._size()) for block in blocks]
        return self._move(Store.dump, blocks, np.array(pages))

    def load(self, blocks):
        """(code, bytes) of each block; the bytes are none where the code isn't OK."""
        pages = np.full((len(blocks), self._size()), 0xA5, dtype=np.uint8)
        codes = self._move(Store.load, blocks, pages)
        return [
            (code, page.tobytes() if code == Code.OK else None)
            for code, page in zip(codes, pages, strict=True)
        ]

    def lookup(self, blocks):
        """Whether each block is stored."""
        return self.store.lookup(b"".join(map(block_id, blocks)))

    def clear(self):
        """Forget them all."""
        self.store.clear()

    def stats(self):
        """The store's counters."""
        return self.store.stats()

    def close(self):
        """End the store, if it is open; what it said goes."""
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def _size(self):
        return sum(self.options.tensor_sizes)

    def _move(self, move, blocks, pages):
        sizes = np.array(self.options.tensor_sizes, dtype=np.uint64)
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.uint64)
        first = pages.ctypes.data + np.arange(len(pages), dtype=np.uint64) * pages.shape[1]
        addresses = first.astype(np.uint64)[:, None] + starts
        ids = b"".join(map(block_id, blocks))
        return move(self.store, ids, addresses, np.tile(sizes, (len(pages), 1)))


class OtherProcess:
    """A `StoreUser` in a process of its own, which starts when it is needed.

    It is forked by a process that has imported everything and has no threads: that takes a
    fiftieth of starting Python.
    """

    def __init__(self):
        self._control = self._pid = self._stream = None

    def __getattr__(self, name):
        """Any call of `StoreUser`."""
        if name.startswith("_") or not hasattr(StoreUser, name):
            raise AttributeError(name)

        def call(*arguments):
            self.send(name, *arguments)
            answer, error = pickle.load(self._stream)
            if error is not None:
                raise error
            return answer

        return call

    def send(self, name, *arguments):
        """Start a call without waiting for it."""
        if self._pid is None:
            self._start()
        pickle.dump((name, arguments), self._stream)
        self._stream.flush()

    def _start(self):
        if self._control is None:
            self._control, theirs = socket.socketpair()
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._forker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            theirs.close()
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [b"start"], [theirs.fileno()])
        theirs.close()
        self._stream = ours.makefile("rwb")
        ours.close()
        self._pid = int(self._control.recv(20))

    def kill(self):
        """End it by SIGKILL, whatever it is doing, and wait until it is gone."""
        pid, self._pid = self._pid, None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self._control.send(b"%d" % pid)
            assert self._control.recv(20) == b"gone"
            self._stream.close()

    def end(self):
        """`kill` it, and the process that forks it."""
        self.kill()
        control, self._control = self._control, None
        if control is not None:
            control.close()
            self._forker.wait()


def _fork(control):
    """Fork a server for each connection that arrives, wait for each process that was killed."""
    while True:
        message, connections, _, _ = socket.recv_fds(control, 20, 1)
        if not message:
            return
        if not connections:
            os.waitpid(int(message), 0)
            control.send(b"gone")
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            with socket.socket(fileno=connections[0]) as connection:
                _serve(connection.makefile("rwb"))
            os._exit(0)
        os.close(connections[0])
        control.send(b"%d" % pid)


def _serve(stream):
    user = StoreUser()
    while True:
        try:
            name, arguments = pickle.load(stream)
        except EOFError:
            user.close()
            return
        try:
            answer, error = getattr(user, name)(*arguments), None
        except Exception as raised:  # for whoever called
            answer, error = None, raised
        pickle.dump((answer, error), stream)
        stream.flush()


if __name__ == "__main__":
    _fork(socket.socket(fileno=int(sys.argv[1])))
