"""Other machines over ssh: checks that they can start ranks, and runs commands there.

ssh is called as it is, so user names, ports, keys and jump hosts are those of ~/.ssh/config. It
never asks: what would need a password or a new host key is refused, for all machines at once,
before any rank is started (`require_hosts`).
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline import __version__
from paceline.errors import ClusterError
from paceline.launch.command import require_program

CONNECT_S = 10
ANSWER_S = 60.0  # python starts from a file system that all share, perhaps for the first time
MAX_AT_ONCE = 32
SSH_FAILED = 255  # ssh's own exit code; any other one is that of the command
SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
# A machine that vanishes is noticed after 30 s, and its ranks notice that we have.
ALIVE = ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]

# Said by `python -c` on the other machine: our version there, and the modules that are not.
PROBE = (
    "import importlib.util as u, sys, paceline;"
    "print(paceline.__version__, *(m for m in sys.argv[1:] if not u.find_spec(m)))"
)
# What ssh says, and what that means to the person who reads it.
REASONS = (
    (
        r"Could not resolve|Name or service not known|Temporary failure in name",
        "its name means nothing to this machine",
        "correct the name in the hostfile, or give it an address in DNS or ~/.ssh/config",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "it shows another host key than it did before",
        "if it was installed anew: ssh-keygen -R {host}; then ssh {host} once, by hand",
    ),
    (
        r"Host key verification failed",
        "its host key is not known here, and nobody can be asked",
        "ssh {host} once, by hand, and compare the key",
    ),
    (
        r"Permission denied|Too many authentication failures|No supported authentication",
        "it takes none of your keys, and a password cannot be asked for",
        "ssh-copy-id {host}, or name user and key (User, IdentityFile) in ~/.ssh/config",
    ),
    (
        r"Connection refused",
        "it is up, and no sshd answers at that port",
        "start sshd there, or name its port in ~/.ssh/config",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it does not answer: it is down, or a firewall stands between",
        "bring it up, or leave it out of the hostfile",
    ),
)


def is_here(host: str) -> bool:
    """Tell whether a name means this machine: by what it is called, or by its addresses."""
    own = socket.gethostname()
    if host in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, str(address[0])) for family, _, _, _, address in found)


def _is_own(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))  # only an address of this machine can be bound
        except OSError:
            return False
    return True


def remote_words(host: str, python_words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs this very python there, in this folder, with our PYTHONPATH."""
    path = os.environ.get("PYTHONPATH", "")
    python = ["env", f"PYTHONPATH={path}", sys.executable] if path else [sys.executable]
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*python, *python_words])}"
    return [*SSH, *options, host, there]


def require_hosts(hosts: Sequence[str], modules: Sequence[str] = ()) -> None:
    """Raise all that keeps ranks from being started on these machines; ask them side by side."""
    others = [host for host in hosts if not is_here(host)]
    if not others:
        return
    require_program("ssh", "install OpenSSH's client, or start the launcher on each machine")
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        problems = [found for found in pool.map(lambda h: _explain(h, modules), others) if found]
    if problems:
        raise ClusterError(problems)


def _explain(host: str, modules: Sequence[str]) -> str:
    """Return what is wrong with a machine, or nothing."""
    words = remote_words(host, ["-c", PROBE, *modules])
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        return _problem(
            host, f"it has not answered within {ANSWER_S:g} s", f"try it: ssh {host} hostname"
        )
    said = done.stderr.strip()
    if done.returncode == SSH_FAILED:
        return _unreachable(host, said)
    if done.returncode:
        return _unfit(host, said)
    version, *missing = done.stdout.split()[-1 - len(modules) :] if done.stdout else [""]
    missing = [name for name in missing if name in modules]
    if missing:
        return _problem(
            host, f"{', '.join(missing)} cannot be imported there", "install it on every machine"
        )
    if __version__ not in done.stdout.split():
        what = f"Paceline is {version or 'unknown'} there, and {__version__} here"
        return _problem(host, what, "install the same version on every machine")
    return ""


def _unreachable(host: str, said: str) -> str:
    for pattern, what, hint in REASONS:
        if re.search(pattern, said):
            return _problem(host, f"{what} ({said.splitlines()[-1]})", hint.format(host=host))
    return _problem(
        host, f"ssh failed: {said or 'it said nothing'}", f"try it: ssh {host} hostname"
    )


def _unfit(host: str, said: str) -> str:
    """Explain why python did not come up on a machine that ssh reaches."""
    last = said.splitlines()[-1] if said else "it said nothing"
    hint = (
        f"{os.getcwd()} and {sys.executable}, with what is installed for it, must be on every"
        " machine: keep both on a file system that all share"
    )
    return _problem(host, f"this folder or this python is not there ({last})", hint)


def _problem(host: str, what: str, hint: str) -> str:
    return f"launch.hostfile: {host}: {what}\nhint: {hint}"
