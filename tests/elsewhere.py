"""The program on a machine of another name and network, which shares this one's folders.

python -m tests.elsewhere HOST train --resume run      needs root, for the namespaces
"""

import ctypes
import os
import socket
import sys

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def move_to(host: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS | CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(host)


if __name__ == "__main__":
    from paceline.cli import main

    move_to(sys.argv.pop(1))
    main()
