from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from edgevit.machine import machine_facts


def test_facts_are_this_machines():
    facts = machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["numpy"] == np.__version__
    total_kb = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert total_kb and facts["memory_bytes"] == 1024 * int(total_kb[1])
    stated = set(Path("/proc/cpuinfo").read_text().split())
    assert set(facts["cpu_flags"]) <= stated
    assert ("avx2" in facts["cpu_flags"]) == ("avx2" in stated)


def test_usable_cores_follow_the_affinity():
    core = min(os.sched_getaffinity(0))
    script = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from edgevit.machine import usable_cores; print(usable_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
