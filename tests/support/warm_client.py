# The client of `warm_python`, which writes the first lines: PATH of its socket, REAL interpreter, PLACE of the server
# ruff: noqa: F821
import json
import os
import signal
import socket
import sys

words = sys.argv[1:]
while words[:1] == ["-B"]:  # of multiprocessing where no bytecode is written: the server writes none after its start
    del words[0]
place = (os.getuid(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "pid")))
has_options = not words or (words[0].startswith("-") and words[0] not in ("-c", "-m"))
if has_options or place != PLACE or "LD_PRELOAD" in os.environ:
    os.execv(REAL, [REAL, *words])
fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
fds = [fd for fd in fds if os.get_inheritable(fd)]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(PATH)
    request = {"words": words, "environ": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(), "fds": fds}
    data = json.dumps(request).encode()

    def forward(number, _frame):
        server.sendall(bytes([number]))

    socket.send_fds(server, [b"%d\n" % len(data)], fds)
    for fd in fds:
        if fd > 2:  # such as the end of a pipe whose other end waits for all of its copies
            os.close(fd)
    server.sendall(data)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    answer = b""
    while part := server.recv(64):
        answer += part
status = int(answer or b"-9")
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
