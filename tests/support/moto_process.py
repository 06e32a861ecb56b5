"""moto's S3 server as a process of its own: what it keeps in memory is not part of the process under test.

Run as a program it prints its port, then serves until its standard input ends: with the process that started it.

With the word "google" it stands for the XML interface of Google Cloud Storage, which is that of S3 but for the
headers of conditions. No emulator of Google's has this interface.
"""

import os
import subprocess
import sys

GOOGLE = "google"
KEY, SECRET = "TESTKEY", "MOTOSECRET"  # it accepts any; tests look for these in what is stored and printed


class MotoServer:
    """The server at an address of this machine, running from `start` to `close`.

    Args:
        words: `GOOGLE`, or nothing.
        address: address at which it listens.
    """

    def __init__(self, *words, address="127.0.0.1"):
        self._words, self._address = words, address

    def start(self):
        """Start it; returns when it answers."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://{self._address}:{int(self._process.stdout.readline())}"
        return self

    def close(self):
        """End the process, at once: it would wait for open connections, and a fork may have its standard input."""
        self._process.kill()
        self._process.communicate()


def main():
    """Serve until standard input ends."""
    from moto.server import DomainDispatcherApplication, ThreadedMotoServer

    if GOOGLE in sys.argv:
        answer = DomainDispatcherApplication.__call__

        def answer_google(self, environ, start_response):
            if environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH") == "0":
                environ["HTTP_IF_NONE_MATCH"] = "*"
            # In place of a token; moto looks for the name of the key alone.
            environ["HTTP_AUTHORIZATION"] = f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"
            return answer(self, environ, start_response)

        DomainDispatcherApplication.__call__ = answer_google
    server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
    server.start()
    sys.stdout.write(f"{server.get_host_and_port()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # without a wait for open connections


if __name__ == "__main__":
    main()
