"""moto's S3 server as a process of its own: what it keeps in memory is not part of the process under test.

Run as a program it prints its port, then serves until its standard input ends: with the process that started it.
"""

import subprocess
import sys

KEY, SECRET = "TESTKEY", "MOTOSECRET"  # it accepts any; tests look for these in what is stored and printed


class MotoServer:
    """The server at an address of this machine, running from `start` to `close`."""

    def __init__(self, address="127.0.0.1"):
        self._address = address

    def start(self):
        """Start it; returns when it answers."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = f"http://{self._address}:{int(self._process.stdout.readline())}"
        return self

    def close(self):
        """End the process."""
        self._process.communicate()


def main():
    """Serve until standard input ends."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
    server.start()
    sys.stdout.write(f"{server.get_host_and_port()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
