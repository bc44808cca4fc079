"""A process that builds plans of cuDNN's for its parent. It needs no GPU, but its driver's library.

python -m onchip.backends.cudnn.worker
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cudnn

from onchip.backends.cudnn.graph import graph_of
from onchip.backends.nvidia.worker import processor_s, serve


def build_plan(job: dict[str, Any]) -> dict[str, Any]:
    """Build the plan that the text in the file `source` asks for, for the GPU with the properties
    `device` (JSON of cuDNN's), and write it, compiled, to `plan`; its facts."""
    started = processor_s()
    properties = cudnn.create_device_properties(job["device"])
    text = Path(job["source"]).read_text()
    graph, place = graph_of(cudnn, text, device_property=properties)
    graph.validate()
    graph.build_operation_graph()
    modes = cudnn.heur_mode
    graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
    names = [graph.get_plan_name_at_index(n) for n in range(graph.get_execution_plan_count())]
    n = plan_at(names, place)
    graph.build_plan_at_index(n)
    workspace = graph.get_workspace_size_plan_at_index(n)
    Path(job["plan"]).write_bytes(bytes(graph.serialize()))
    return {"name": names[n], "workspace": workspace, "seconds": processor_s() - started}


def plan_at(names: Sequence[str], place: int) -> int:
    """Which of the plans is at that place among those of the library's engines ("eng4_k24=3"): the
    package has others, in Python. ValueError if there are fewer."""
    plans = [n for n, name in enumerate(names) if name.startswith("eng")]
    if place >= len(plans):
        raise ValueError(f"its heuristics propose {len(plans)} plans")
    return plans[place]


if __name__ == "__main__":
    serve(build_plan)
