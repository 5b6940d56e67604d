"""What holds a rank's memory, by module: at chosen moments, and whenever memory runs out.

    mem_boot, mem_step1, mem_step<n>   observe.memory=dumps: JSON and text, the ten largest owners
    mem_peak, memory_snapshot.pickle   observe.memory=snapshot: the allocator's history of the first
                                       steps (docs.pytorch.org/memory_viz opens it), and its peak
    mem_oom                            always, when an allocation fails

Parameters, gradients and optimizer state are counted where they lie. Which module an activation
belongs to the allocator knows while its history is recorded: each allocation carries the name of
the module whose forward pass asked for it. Where memory runs out without that, autograd's graph,
which hangs on the frames of the error, is asked what it has saved for whose weights.
"""

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn

from paceline.records.memory import MAX_OWNERS, MemoryDump, Owner
from paceline.records.rundir import RunDir
from paceline.train.verdict import peak_memory

SNAPSHOT_STEPS = 2  # optimizers make their state in the first
MAX_ENTRIES = 400_000
Held = Counter[tuple[str, str]]  # bytes by module and kind
OUTSIDE = ("(no module)", "gradients, optimizer, workspaces")


class MemoryDumps:
    """Call `end` after each step, `dump` at any moment."""

    def __init__(
        self,
        run: RunDir,
        rank: int,
        device: torch.device,
        mode: Literal["off", "dumps", "snapshot"],
        every: int | Literal["off"] = "off",
    ) -> None:
        self._files, self._rank, self._device, self._mode = run, rank, device, mode
        self._every = every
        self._engine: Any = None
        self._first_step = 1
        self._hooks: list[Any] = []

    def watch(self, engine: Any, first_step: int) -> None:
        """Begin: the model stands, and no step was taken yet."""
        self._engine, self._first_step = engine, first_step
        if self._mode == "off":
            return
        self.dump("boot", first_step - 1)
        if self._records_history:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
            self._hooks = list(_name_allocations(engine.module))

    @property
    def _records_history(self) -> bool:
        return self._mode == "snapshot" and self._device.type == "cuda"

    def end(self, step: int) -> None:
        """Write what is due after a step."""
        if self._mode == "off":
            return
        taken = step - self._first_step + 1
        if taken == 1 or (self._every != "off" and step % self._every == 0):
            self.dump(f"step{step}", step)
        if taken == 1 and self._rank == 0:
            state = sum(held for (_, kind), held in self._held().items() if kind == "optimizer")
            self._files.lost.keep(self._files.root / "opt_state_mb.txt", f"{state / 1e6:.1f}\n")
        if taken == SNAPSHOT_STEPS and self._records_history:
            self._take_snapshot(step)

    def dump(self, moment: str, step: int, error: BaseException | None = None) -> MemoryDump:
        """Write what holds memory now; with `error`, where it was asked for in vain."""
        if error is None or self._engine is None:
            return self._write(moment, step, self._held())
        held = self._held() + count_saved(error, self._engine.module)
        return self._write(moment, step, held, _module_inside(error, self._engine))

    def _write(
        self, moment: str, step: int, held: Held, inside: str = "", counted: int | None = None
    ) -> MemoryDump:
        on_gpu, by_kind = self._device.type == "cuda", Counter[str]()
        for (_, kind), num_bytes in held.items():
            by_kind[kind] += num_bytes
        active, reserved = peak_memory(self._device)
        now = (
            torch.cuda.memory_allocated(self._device)
            if on_gpu
            else psutil.Process().memory_info().rss
        )
        dump = MemoryDump(
            rank=self._rank,
            moment=moment,
            step=step,
            device=str(self._device),
            counted_bytes=now if counted is None else counted,
            peak_bytes=active or reserved or 0,
            limit_bytes=_limit(self._device),
            by_kind=dict(by_kind.most_common()),
            owners=[
                Owner(module=module or "(model)", kind=kind, num_bytes=num_bytes)
                for (module, kind), num_bytes in held.most_common(MAX_OWNERS)
            ],
            inside=inside,
            stats=_whole_numbers(torch.cuda.memory_stats(self._device)) if on_gpu else {},
        )
        path = self._files.memory_dump(self._rank, moment)
        self._files.lost.keep(path, dump.to_json())
        self._files.lost.keep(path.with_suffix(".txt"), dump.to_text())
        return dump

    def _held(self) -> Held:
        return Counter() if self._engine is None else count_state(self._engine)

    def _take_snapshot(self, step: int) -> None:
        snapshot: Any = torch.cuda.memory._snapshot(self._device)
        torch.cuda.memory._record_memory_history(enabled=None)
        for hook in self._hooks:
            hook.remove()
        path = self._files.rank(self._rank) / "memory_snapshot.pickle"
        try:
            path.write_bytes(pickle.dumps(snapshot))
        except OSError as error:
            self._files.lost.note(path, error)
        held = count_at_peak(snapshot["device_traces"][self._device.index or 0])
        # The weights were there before the history began.
        state = count_state(self._engine)
        held.update({key: size for key, size in state.items() if key[1] == "parameters"})
        self._write("peak", step, held, counted=peak_memory(self._device)[0])


def count_state(engine: Any) -> Held:
    """Return the bytes of parameters, gradients and optimizer state by the module that has them, as
    this rank holds them."""
    held: Held = Counter()
    optimizer = getattr(engine, "inner", None) or getattr(engine, "optimizer", None)
    state = getattr(optimizer, "state", {})
    for name, parameter in engine.module.named_parameters():
        module = name.rpartition(".")[0]
        held[module, "parameters"] += _bytes(parameter)
        held[module, "gradients"] += _bytes(parameter.grad)
        kept = state.get(parameter, {}) if hasattr(state, "get") else {}
        held[module, "optimizer"] += sum(_bytes(value) for value in _tensors(kept))
    return +held  # without those that hold nothing


def _tensors(kept: Any) -> Iterable[Tensor]:
    values = kept.values() if isinstance(kept, dict) else ()
    return (value for value in values if isinstance(value, Tensor))


def _bytes(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def count_at_peak(history: list[dict[str, Any]]) -> Held:
    """Replay allocations and frees; return what was held at the largest moment, by the module that
    each allocation is named after."""
    total = most = 0
    at_most, live = -1, dict[int, tuple[int, str]]()
    for place, event in enumerate(history):
        total += _apply(event, live)
        if total > most:
            most, at_most = total, place
    live.clear()
    for event in history[: at_most + 1]:
        _apply(event, live)
    held: Held = Counter()
    for num_bytes, module in live.values():
        owner = (module, "activations") if module else OUTSIDE
        held[owner] += num_bytes
    return held


def _apply(event: dict[str, Any], live: dict[int, tuple[int, str]]) -> int:
    """Note an allocation or a free; return by how many bytes what is held has changed."""
    if event["action"] == "alloc":
        live[event["addr"]] = (event["size"], str(event.get("user_metadata", "")))
        return int(event["size"])
    if event["action"] == "free_requested":
        return -live.pop(event["addr"], (0, ""))[0]
    return 0


def count_saved(error: BaseException, model: nn.Module) -> Held:
    """Return the bytes that autograd has saved for backward, by the module whose weights are used
    nearest to it. The graph is found from the tensors in the frames of the error."""
    owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
    counted = {_place(p) for p in model.parameters()}
    held: Held = Counter()
    seen: set[Any] = set()
    waiting = [(node, "") for node in _graphs_of(error)]
    while waiting:
        node, inherited = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        name = _owner_of(node, owners) or inherited
        for tensor in _saved_by(node):
            if (place := _place(tensor)) not in counted:
                counted.add(place)
                held[name or "(no module)", "activations"] += tensor.untyped_storage().nbytes()
        waiting += [(following, name) for following, _ in node.next_functions if following]
    return held


def _graphs_of(error: BaseException) -> Iterator[Any]:
    frame = error.__traceback__
    while frame is not None:
        for value in list(frame.tb_frame.f_locals.values()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield value.grad_fn
        frame = frame.tb_next


def let_go(error: BaseException) -> None:
    """Drop what the frames of an error hold, and of those that it came from: all tensors of the
    step that failed hang on them. Their lines stay, for whoever prints it."""
    errors, seen = [error], set[int]()
    while errors:
        each = errors.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        errors += [e for e in (each.__cause__, each.__context__) if e is not None]
        for frame, _ in walk_tb(each.__traceback__):
            _empty(frame)


def _empty(frame: FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:  # it runs
        return
    # Up to Python 3.12 a copy of what it held was kept when it was read; that of a module is no
    # copy, and others live there.
    if isinstance(frame.f_locals, dict) and frame.f_locals is not frame.f_globals:
        frame.f_locals.clear()


def _owner_of(node: Any, owners: dict[int, str]) -> str:
    """Return the module whose weight a node uses: itself, or through views and casts of it."""
    for leaf, _ in node.next_functions:
        while leaf is not None:
            variable = getattr(leaf, "variable", None)
            if variable is not None and id(variable) in owners:
                return owners[id(variable)]
            following = leaf.next_functions
            leaf = following[0][0] if len(following) == 1 else None
    return ""


def _saved_by(node: Any) -> Iterator[Tensor]:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in (*names, "saved_tensors"):
        try:
            value = getattr(node, name, None)
        except RuntimeError:  # backward has freed it
            continue
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item


def _place(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # one without a storage of its own
        return id(tensor)


def _name_allocations(model: nn.Module) -> Iterator[Any]:
    """Let each allocation carry the name of the innermost module whose forward pass runs."""
    name_now = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    if name_now is None:  # an older torch: the history has Python's stacks, and no names
        return
    names: list[str] = []

    def hooks(name: str) -> tuple[Any, Any]:
        def begin(*_: Any) -> None:
            names.append(name)
            name_now(name)

        def end(*_: Any) -> None:
            if names:
                names.pop()
            name_now(names[-1] if names else "")

        return begin, end

    for name, module in model.named_modules():
        begin, end = hooks(name or type(module).__name__)
        yield module.register_forward_pre_hook(begin)
        yield module.register_forward_hook(end, always_call=True)


def _module_inside(error: BaseException, engine: Any) -> str:
    """Return the innermost module of the model whose method the error came out of."""
    if engine is None:
        return ""
    names = {id(module): name for name, module in engine.module.named_modules()}
    inside, frame = "", error.__traceback__
    while isinstance(frame, TracebackType):
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            inside = names[id(owner)]
        frame = frame.tb_next
    return inside


def _limit(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _whole_numbers(stats: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in stats.items() if isinstance(value, int)}
