"""Two hosts that are reached by ssh and by nothing else, on this one machine.

    with SshCluster(tmp_path) as hosts:
        done = hosts.run(["ssh", "n1", "hostname"])

Its hosts are those of cluster.py; `n1` and `n2` have an sshd each, with keys made for them. What is
in /etc/ssh there is the cluster's own, so ssh is called as a user would.
"""

import functools
import shutil
import subprocess
import time
from pathlib import Path

from tests.schedulers.cluster import NODES, POLL_S, START_S, Cluster, why_no_namespaces

CLIENT = """\
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
"""
SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
"""
# sshd wants a user of its name, and an empty folder, whether or not its package is installed here.
OWN_FILES = """\
mount --bind ssh /etc/ssh
mount --bind passwd /etc/passwd
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
"""
SSHD_USER = "sshd:x:110:65534::/run/sshd:/usr/sbin/nologin\n"


@functools.cache
def why_not() -> str | None:
    """What keeps these hosts from being made on this machine; None if nothing does."""
    return why_no_namespaces(("ssh", "sshd", "ssh-keygen"), "openssh-server openssh-client")


class SshCluster(Cluster):
    name = "ssh"
    on_login = OWN_FILES
    on_node = f"exec {shutil.which('sshd')} -D -e -f {{folder}}/sshd_config 2>sshd-$1.log"
    daemons = {"sshd", "ssh"}

    def write_files(self) -> None:
        for name in ("key", "host_key", "wrong_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True, capture_output=True)
        public = (self.folder / "host_key.pub").read_text()
        users = Path("/etc/passwd").read_text()
        files = {
            "known_hosts": "".join(f"{host} {public}" for host in NODES),
            "sshd_config": SERVER.format(folder=self.folder),
            "passwd": users if "\nsshd:" in users else users + SSHD_USER,
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "ssh").mkdir()
        self.use_key("key")

    def use_key(self, name: str) -> None:
        """Have ssh show this key from now on: `key` is the right one."""
        text = CLIENT.format(folder=self.folder).replace("/key\n", f"/{name}\n")
        (self.folder / "ssh" / "ssh_config").write_text(text)

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        for host in NODES:
            while self.run(["ssh", host, "true"], timeout=START_S).returncode:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{host} has no sshd after {START_S} s\n{self.logs()}")
                time.sleep(POLL_S)
