"""Metrics for TensorBoard: `tensorboard --logdir runs`."""

import importlib
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter

from zaya_jax.run.metrics import MetricSink
from zaya_jax.run.writing import make_folder, remove
from zaya_jax.train.sinks.mirror import scalars

# Protobuf makes their classes at run time, so type checkers do not see them.
event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
summary_pb2: Any = importlib.import_module("tensorboardX.proto.summary_pb2")


class TensorBoardSink(MetricSink):
    """Writes an event per step.

    Uses the writer below tensorboardX's `SummaryWriter`, whose thread would end on a full disk, after which the queue
    in front of it would block training.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Start a file of events in `folder` after `step`; TensorBoard drops the later steps of older files."""
        make_folder(folder)
        is_first = not any(folder.glob("events*"))
        # TensorBoard reads files in the order of their names, which start with the second.
        suffix = f".{time.time_ns()}"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        if not is_first:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.write_event(event_pb2.Event(step=step + 1, wall_time=time.time(), session_log=start))
        try:
            self._writer.flush()
        except OSError:  # a full disk would collect empty files
            for path in folder.glob(f"*{suffix}"):
                remove(path)
            raise

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Write the scalars of a step."""
        numbers = scalars(metrics) | scalars(timings, "timings/")
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        summary = summary_pb2.Summary(value=values)
        self._writer.write_event(event_pb2.Event(step=metrics["step"], wall_time=time.time(), summary=summary))

    def sync(self) -> str:
        """Flush the file."""
        self._writer.flush()
        return ""

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
