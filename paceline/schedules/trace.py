"""One measured pass as timeline.json: Chrome's trace events, which https://ui.perfetto.dev opens.

A process is a rank, a thread one of its stages, an arrow a result that went to another rank.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator
from typing import Any

from paceline.schedules.actions import Action, Kind
from paceline.schedules.measured import MeasuredPass
from paceline.schedules.timeline import RankTimeline, Timeline, Transfer

Event = dict[str, Any]
INSIDE_US = 0.5  # so that an arrow begins within the bar that it belongs to


def render_trace(done: MeasuredPass) -> str:
    """Render all pipelines of the pass, each from its own first start. Moments are in
    microseconds."""
    events: list[Event] = []
    for number, timeline in enumerate(done.pipelines):
        events += _Pipeline(timeline, number, len(done.pipelines)).events()
    body = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": done.step, "pass": done.number},
    }
    return json.dumps(body, allow_nan=False) + "\n"


class _Pipeline:
    """Pipeline `number` of `num_pipelines`: its rank r is rank r * num_pipelines + number."""

    def __init__(self, timeline: Timeline, number: int, num_pipelines: int) -> None:
        self.timeline, self.number, self.num_pipelines = timeline, number, num_pipelines

    def events(self) -> Iterator[Event]:
        for rank in self.timeline.ranks:
            yield from self._names(rank)
            yield from self._bars(rank)
        for place, transfer in enumerate(self.timeline.transfers):
            yield from self._arrow(place, transfer)

    def _pid(self, rank: int) -> int:
        return rank * self.num_pipelines + self.number

    def _names(self, rank: RankTimeline) -> Iterator[Event]:
        pid = self._pid(rank.rank)
        yield _meta("process_name", pid, 0, name=f"rank {pid}")
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
        for stage in self.timeline.schedule.stages_of(rank.rank):
            yield _meta("thread_name", pid, stage, name=f"stage {stage}")
            yield _meta("thread_sort_index", pid, stage, sort_index=stage)

    def _bars(self, rank: RankTimeline) -> Iterator[Event]:
        for interval in rank.intervals:
            action = interval.action
            yield {
                "ph": "X",
                "name": f"{action.kind}{action.microbatch}",
                "cat": str(action.kind),
                "pid": self._pid(rank.rank),
                "tid": action.stage,
                "ts": _us(interval.started_s),
                "dur": _us(interval.ended_s - interval.started_s),
                "args": {
                    "microbatch": action.microbatch,
                    "stage": action.stage,
                    "direction": action.direction,
                },
            }

    def _arrow(self, place: int, transfer: Transfer) -> Iterator[Event]:
        giver = transfer.action
        shared: Event = {
            "name": "activations" if giver.kind == Kind.FORWARD else "gradients",
            "cat": "transfer",
            "id": place * self.num_pipelines + self.number,
        }
        yield shared | {
            "ph": "s",
            "pid": self._pid(transfer.source),
            "tid": giver.stage,
            "ts": max(0.0, _us(transfer.started_s) - INSIDE_US),
        }
        yield shared | {
            "ph": "f",
            "bp": "e",
            "pid": self._pid(transfer.target),
            "tid": _taker_stage(giver),
            "ts": _us(transfer.ended_s),
        }


def _taker_stage(giver: Action) -> int:
    return giver.stage + 1 if giver.kind == Kind.FORWARD else giver.stage - 1


def _meta(what: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
