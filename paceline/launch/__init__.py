"""Starting ranks, and seeing them to their end. The words are torch's: a rank is a process of the
group, ranks meet at a store, an agent starts the ranks of one machine.

Whoever starts it, a rank is always the child of a supervisor that never touches a device.

    alone                      paceline train
                               local.py -> attempts.py -> supervisor.py -fork-> rank.py, N times
                               the store is in the supervisor

    under a launcher           torchrun -> paceline train, N times      (srun, mpirun, deepspeed)
                               member.py -> supervisor.py -fork-> rank.py, each its own rank
                               rendezvous.py: all meet at one store; rank 0 plans, decides about
                               attempts and concludes, the others follow what it signs (signed.py)

    we call the launcher       paceline train launch.launcher=torchrun
                               torchrun.py -> command.py -> torchrun -> python -m MODULE, N times
                               each of those as "under a launcher", with the plan on disk already;
                               this process watches the command, and concludes

    base.py         the seams: Task (what a verb hands down), Launcher, and the plan they share
    attempts.py     does another attempt follow a failure?         archive.py    attempts on disk
    supervisor.py   owns processes (process.py), keeps deadlines (deadlines.py), passes on signals
    ending.py       what launcher and ranks left -> how it ended, judged once
    follow.py       the files of a live run -> lines for the user

Which launchers there are, and what each of them is, is said in machine/launchers.py.
"""

from importlib import import_module

from paceline.errors import ConfigError
from paceline.launch.base import Launcher
from paceline.machine.launchers import LAUNCHERS


def find_launcher(name: str) -> Launcher:
    """Return the launcher of this name; there is none for whatever else started this process."""
    if name not in LAUNCHERS:
        raise ConfigError(
            "this process is a rank among others already, started by the variables RANK and"
            " WORLD_SIZE\nhint: unset them to see how Paceline would start ranks"
        )
    module, _, attribute = LAUNCHERS[name].code.partition(":")
    launcher: Launcher = getattr(import_module(module), attribute)()
    return launcher
