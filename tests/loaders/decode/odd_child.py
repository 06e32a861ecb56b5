"""Run in place of the child that tries backends: it ends, hangs or answers as `ODD_CHILD` says."""

import os
import signal
import sys

BEHAVIOUR = os.environ["ODD_CHILD"]

if __name__ == "__main__":
    if BEHAVIOUR == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if BEHAVIOUR == "status":
        os._exit(3)
    if BEHAVIOUR == "hang":
        signal.pause()
    if BEHAVIOUR == "answer":
        sys.stdout.write('{"rate": 50.0}\n{"rate": 70.0}\n')
    if BEHAVIOUR == "segfault at windows":
        from datasvc.loaders.decode.choice import trial
        from datasvc.loaders.decode.choice.choose import make_backend

        def make(config, backend, **options):
            if backend == "gpu-window":
                os.kill(os.getpid(), signal.SIGSEGV)
            return make_backend(config, backend, **options)

        trial.make_backend = make
        trial.main()
