"""A timeline as text, for terminals and docs: a row a rank, a column a slot of time.

    rank 0  F0 F1 .  .  B0--- .  B1---
    rank 1  .  F0 B0--- F1 B1--- .  .

Small letters are a rank's later stages, or DualPipe's second direction.
"""

from paceline.schedules.timeline import Interval, RankTimeline, Timeline


def draw_text(timeline: Timeline, slot_s: float = 1.0) -> str:
    """Made for times that are whole slots: an action starts in the column its start falls into."""
    num_slots = round(timeline.total_s / slot_s)
    cell = len(str(timeline.schedule.num_microbatches - 1)) + 2
    lines = [_row(timeline, rank, slot_s, num_slots, cell) for rank in timeline.ranks]
    return "\n".join(lines) + "\n"


def _row(timeline: Timeline, rank: RankTimeline, slot_s: float, num_slots: int, cell: int) -> str:
    columns = [".".ljust(cell)] * num_slots
    for interval in rank.intervals:
        start = round(interval.started_s / slot_s)
        length = max(1, round((interval.ended_s - interval.started_s) / slot_s))
        text = _label(timeline, interval).ljust(length * cell - 1, "-" if length > 1 else " ") + " "
        for number in range(length):
            columns[start + number] = text[number * cell : (number + 1) * cell]
    return f"rank {rank.rank}  {''.join(columns)}".rstrip()


def _label(timeline: Timeline, interval: Interval) -> str:
    action = interval.action
    is_second = action.direction == 1 or action.stage >= timeline.schedule.num_ranks
    text = f"{action.kind}{action.microbatch}"
    return text.lower() if is_second else text
