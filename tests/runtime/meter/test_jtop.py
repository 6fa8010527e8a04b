"""The jtop source against real services and clients of jetson-stats, on a made-up sysfs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.device.conftest import ROOT, environment_with, find_python38

# Runs as the root of a throw-away system: a service, and a client that is ours.
INNER = """
[ -e /.fake_root ] || exit 1
V=$1; cd "$(dirname "$0")"
bash mkfake.sh
export JTOP_TESTING=true PYTHONPATH="$EDGEVIT_ROOT" PYTHONDONTWRITEBYTECODE=1
echo jtop:x:9999: >> /etc/group
timeout 30 $V/bin/python ours.py absent
$V/bin/python -c "
from jtop.service import JtopServer
JtopServer(force=True).loop_for_ever()" > service.log 2>&1 & SERVICE=$!
for i in $(seq 80); do [ -S /run/jtop.sock ] && break; sleep .25; done; sleep .5
timeout 60 $V/bin/python ours.py present $SERVICE
"""

OURS = """
import dataclasses, json, os, signal, sys, time
from edgevit.runtime.meter.boards import BOARDS
from edgevit.runtime.meter.jtop import JtopSource
from edgevit.runtime.meter.source import SourceUnavailableError

def say(what, **values):
    print("OURS", json.dumps({"what": what, **values}), flush=True)

def facts(reading):
    return dataclasses.asdict(reading)

board = next(row for row in BOARDS if row.module == "p3767")
if sys.argv[1] == "absent":
    try:
        JtopSource(board)
    except SourceUnavailableError as error:
        say("absent", reason=str(error))
    sys.exit()

unknown = JtopSource(None)
say("unknown board", reading=facts(unknown.read()))
unknown.close()
source = JtopSource(board)
say("first", name=source.name, reading=facts(source.read()))
current = "/fake_sys/bus/i2c/devices/1-0040/hwmon/hwmon1/curr1_input"
with open(current, "w") as file:
    file.write("3000\\n")
until_s = time.monotonic() + 15
while time.monotonic() < until_s and source.read().power_mw < 15000:
    time.sleep(0.1)
say("changed", reading=facts(source.read()))
service = sys.argv[2]
with open("/proc/%s/task/%s/children" % (service, service)) as file:
    for pid in file.read().split() + [service]:
        os.kill(int(pid), signal.SIGKILL)
until_s = time.monotonic() + 15
try:
    while time.monotonic() < until_s:
        source.read()
        time.sleep(0.1)
except SourceUnavailableError as error:
    say("lost", reason=str(error))
began_s = time.monotonic()
source.close()
say("closed", seconds=time.monotonic() - began_s)
"""


@pytest.fixture(scope="module", params=["7.2.2", "4.3.2"])
def said(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What our client says about each step, by step."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a made-up sysfs needs root and unshare")
    if subprocess.run(["unshare", "-m", "-p", "-f", "true"], capture_output=True).returncode:
        pytest.skip("this container may not make namespaces")
    requirements = [f"jetson-stats=={request.param}"]
    if request.param.startswith("4"):
        requirements.append("--no-binary=jetson-stats")  # 4.x comes as source only
    python = environment_with(requirements, find_python38())
    folder = tmp_path_factory.mktemp("jtop") / "fake"
    shutil.copytree(shared / "tools/jtop_fake", folder)
    (folder / "inner.sh").write_text(INNER)
    (folder / "ours.py").write_text(OURS)
    done = subprocess.run(
        ["bash", str(folder / "run.sh"), str(Path(python).parents[1])],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "EDGEVIT_ROOT": str(ROOT)},
    )
    lines = [json.loads(t[5:]) for t in done.stdout.splitlines() if t.startswith("OURS ")]
    assert lines, done.stdout + done.stderr
    return {"version": request.param, **{line.pop("what"): line for line in lines}}


def test_figures_of_a_real_service(said: dict[str, Any]) -> None:
    assert said["first"]["name"] == f"jtop {said['version']}"
    reading = said["first"]["reading"]
    # The made-up sysfs says 5064 mV and 1800 mA; 5056 and 620; 5056 and 410.
    assert reading["power_mw"] == pytest.approx(5.064 * 1800, abs=1)
    assert reading["points"]["power_mw"] == "VDD_IN (module)"
    rails = {rail["name"]: rail["power_mw"] for rail in reading["rails"]}
    assert rails == {
        "VDD_IN": pytest.approx(5.064 * 1800, abs=1),
        "VDD_CPU_GPU_CV": pytest.approx(5.056 * 620, abs=1),
        "VDD_SOC": pytest.approx(5.056 * 410, abs=1),
    }
    assert reading["ram_total_bytes"] == 15_656_152 * 1024
    # Total less free, buffers and what is cached.
    used_kib = 15_656_152 - 9_000_000 - 100_000 - 2_000_000
    assert reading["ram_used_bytes"] == used_kib * 1024
    assert (reading["temperature_c"], reading["points"]["temperature_c"]) == (49, "tj")
    assert reading["gpu_load_percent"] == 73
    assert reading["cpu_clock_mhz"] == 1190.4
    assert reading["gpu_clock_mhz"] == 624.75
    assert reading["memory_clock_mhz"] == 2133
    assert (reading["power_mode"], reading["jetson_clocks"]) == (None, None)


def test_an_unknown_board_has_rails_and_no_total(said: dict[str, Any]) -> None:
    reading = said["unknown board"]["reading"]
    assert reading["power_mw"] is None
    assert len(reading["rails"]) == 3
    assert "not known" in reading["absent"]["power_mw"]


def test_a_change_arrives_unfiltered(said: dict[str, Any]) -> None:
    # jtop's own mean would creep there.
    assert said["changed"]["reading"]["power_mw"] == pytest.approx(5.064 * 3000, abs=1)


def test_without_a_service_the_reason_is_said(said: dict[str, Any]) -> None:
    assert "not active" in said["absent"]["reason"]
    assert "\n" not in said["absent"]["reason"]


def test_a_service_that_is_killed_is_noticed(said: dict[str, Any]) -> None:
    assert said["lost"]["reason"]
    assert said["closed"]["seconds"] < 10
