"""A web server whose answers have a head without an end: a byte at a time, so that no read of it times out."""

import socket
import threading
from multiprocessing.connection import wait

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n"


class DrippingServer:
    """Sends a head byte by byte, the next one when the last was read; then one header after the other, for ever."""

    def __init__(self):
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            connection.recv(4096)
            try:
                connection.sendall(HEAD)
                while not wait([connection], 0.001):  # until the client hangs up
                    connection.sendall(b"x")
            except OSError:
                return

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._listener.close()
