"""Finds methods of a workload that nothing calls, and names the right one, before anything starts.

A hook of another framework would be ignored without a word, and the run would not be the one its
author wrote: that is an error. Any other public method that neither Paceline nor the file's own
code calls is a warning. Names that begin with an underscore are free.
"""

import ast
import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from paceline.records import Finding
from paceline.workloads.base import Workload

OPTIMIZER = (
    "set optim.name, optim.lr, optim.groups and the other keys of optim, or write"
    " build_optimizer(self, model, config)"
)
SCHEDULE = "set optim.schedule.name, or write learning_rate(self, step, config)"
LOSS = "write loss(self, model, batch): it returns the summed loss and how many were summed"
VALIDATION = (
    "write evaluate(self, model, batch), which returns (sum, count) by name; its data comes from"
    ' build_data(self, config, split) where split is "val", and train.eval_every says when'
)
DATA = "return a data set from build_data(self, config, split)"
COLLATE = "write collate(self, samples), which returns a batch: paceline.data.pad(samples) pads"
METRICS = (
    "write evaluate(self, model, batch), which returns (sum, count) or paceline.Items by name, and"
    " metrics(self, found), which makes numbers of all Items"
)
MODEL = "return a torch module from build_model(self, config), with a forward of its own"
PREPARE = "write prepare(self, config, say): it runs once, before the ranks start"
NO_HOOK = "there is no hook inside a step: do it in `loss`, or in the model's forward"
ON_STEP = "write on_step(self, step, record), which is told of each step with its numbers"
ON_EVAL = "write on_eval(self, step, metrics), which is told of each evaluation with its numbers"
ON_CHECKPOINT = "write on_checkpoint(self, step, path), which is told of each checkpoint"

# What other frameworks call, and what does it here.
FOREIGN = {
    "backward": NO_HOOK,
    "build_criterion": LOSS,
    "build_dataloader": DATA,
    "build_dataset": DATA,
    "build_datasets": DATA,
    "build_loss": LOSS,
    "build_lr_scheduler": SCHEDULE,
    "build_optimizers": OPTIMIZER,
    "build_scheduler": SCHEDULE,
    "collate_fn": COLLATE,
    "compute_loss": LOSS,
    "compute_metrics": METRICS,
    "configure_callbacks": ON_STEP,
    "configure_gradient_clipping": "set optim.clip",
    "configure_model": MODEL,
    "configure_optimizers": OPTIMIZER,
    "create_optimizer": OPTIMIZER,
    "create_optimizer_and_scheduler": OPTIMIZER,
    "create_scheduler": SCHEDULE,
    "data_collator": COLLATE,
    "evaluation_step": VALIDATION,
    "forward": MODEL,
    "get_eval_dataloader": VALIDATION,
    "get_train_dataloader": DATA,
    "log_metrics": METRICS,
    "lr_scheduler_step": SCHEDULE,
    "on_evaluate": ON_EVAL,
    "on_log": ON_STEP,
    "on_save": ON_CHECKPOINT,
    "on_save_checkpoint": ON_CHECKPOINT,
    "on_step_end": ON_STEP,
    "optimizer_step": OPTIMIZER,
    "optimizer_zero_grad": NO_HOOK,
    "predict_step": NO_HOOK,
    "prepare_data": PREPARE,
    "setup": PREPARE,
    "test_dataloader": VALIDATION,
    "test_step": VALIDATION,
    "train_dataloader": DATA,
    "train_step": LOSS,
    "training_step": LOSS,
    "val_dataloader": VALIDATION,
    "validation_step": VALIDATION,
}
# By how a name begins, the first that fits.
FOREIGN_PREFIXES = {
    "on_train_batch": ON_STEP,
    "on_train_": NO_HOOK,
    "on_validation_": ON_EVAL,
    "on_epoch_": ON_EVAL,
    "on_before_": NO_HOOK,
    "on_after_": NO_HOOK,
    "on_fit_": NO_HOOK,
}
SEAM = frozenset(name for name in dir(Workload) if not name.startswith("_"))


def check_methods(kind: type[Workload]) -> Iterator[Finding]:
    """Yield one finding for each method that would be ignored."""
    for owner in kind.__mro__:
        if not issubclass(owner, Workload) or owner.__module__.startswith("paceline."):
            continue
        called = _attributes_read(owner)
        for name, value in vars(owner).items():
            is_method = isinstance(value, FunctionType | staticmethod | classmethod)
            if is_method and not name.startswith("_") and name not in SEAM | called:
                yield _ignored(kind, name)


def _ignored(kind: type[Workload], name: str) -> Finding:
    prefixed = (hint for begin, hint in FOREIGN_PREFIXES.items() if name.startswith(begin))
    foreign = FOREIGN.get(name) or next(prefixed, None)
    if foreign is not None:
        return Finding.error(
            f"{kind.__name__}.{name}",
            "is a method of other frameworks, and Paceline never calls it",
            hint=f"{foreign}; then take it out, or name it _{name}",
        )
    close = difflib.get_close_matches(name, SEAM, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else f"name it _{name} if that is meant"
    return Finding.warning(
        f"{kind.__name__}.{name}",
        "is called by nothing, neither by Paceline nor in its own file",
        hint=hint,
    )


def _attributes_read(kind: type[Workload]) -> frozenset[str]:
    """Return the names that the class's own file takes from any object, as in `self.collate`."""
    try:
        file = inspect.getsourcefile(kind)
        tree = ast.parse(Path(file).read_bytes()) if file else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    return frozenset(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
