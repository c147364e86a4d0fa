"""The variables of every launcher become one placement; missing or contradictory ones are one clear line."""

import pytest

from lockstep.config.placement import (
    MachineNode,
    Placement,
    is_loopback,
    parse_node,
    parse_placement,
    parse_placement_for,
    parse_role,
    without_local_rank,
)
from lockstep.errors import WorldError

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
TORCHRUN = {
    **ADDRESS,
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "20041",
}


def placed(environ: dict[str, str], *argv: str) -> Placement:
    return parse_placement(environ, ["script.py", *argv])


def test_nothing_set_is_a_world_of_one() -> None:
    assert placed({}) == Placement()
    assert placed({"WORLD_SIZE": "1"}) == Placement()
    assert placed({"RANK": "0", "WORLD_SIZE": "1"}) == Placement(launcher="hand-set")


def test_torchrun() -> None:
    assert placed(TORCHRUN) == Placement(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node=1,
        num_nodes=2,
        master_addr="127.0.0.1",
        master_port=29501,
        launcher="torchrun",
        store_is_hosted=True,
        attempt=2,
    )


def test_the_lockstep_agent_is_distinguished_from_torchrun() -> None:
    assert placed(TORCHRUN | {"LOCKSTEP_AGENT_PID": "7"}).launcher == "lockstep"


def test_hand_set_on_one_machine_needs_no_local_rank() -> None:
    place = placed({**ADDRESS, "RANK": "2", "WORLD_SIZE": "4"})
    assert (place.local_rank, place.local_world_size, place.num_nodes) == (2, 4, 1)
    assert place.launcher == "hand-set"
    assert not place.store_is_hosted


@pytest.mark.parametrize("argument", ["--local-rank=1", "--local_rank=1"])
def test_the_older_launchers_local_rank_argument(argument: str) -> None:
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4"}
    assert placed(environ, argument, "--epochs", "3").local_rank == 1
    assert without_local_rank(["s.py", argument, "--epochs", "3"]) == ["s.py", "--epochs", "3"]


def test_slurm_step() -> None:
    place = placed(SLURM)
    assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (5, 1, 6, 2)
    assert (place.node, place.num_nodes, place.launcher) == (2, 3, "slurm")
    assert (place.master_addr, place.master_port) == ("gpu07", 20041)


def test_a_slurm_task_on_each_machine_is_a_process_on_each() -> None:
    """Without `-n` the tasks form one job, not one training each in the same folder."""
    environ = SLURM | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    place = placed(environ | {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"})
    assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (2, 0, 3, 1)
    assert (place.node, place.num_nodes, place.master_addr) == (2, 3, "gpu07")
    assert placed(SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == Placement()


def test_slurm_on_one_node_stays_on_loopback() -> None:
    one_node = SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "6"}
    assert placed(one_node).is_on_one_machine


def test_slurm_address_can_be_set() -> None:
    place = placed(SLURM | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4000"})
    assert (place.master_addr, place.master_port) == ("10.1.1.1", 4000)


@pytest.mark.parametrize(
    ("counts", "node", "expected"), [("2(x3)", "0", 2), ("4,1", "1", 1), ("2(x2),1", "2", 1), ("3", "0", 3)]
)
def test_slurm_tasks_per_node(counts: str, node: str, expected: int) -> None:
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}
    assert placed(environ).local_world_size == expected


@pytest.mark.parametrize(
    ("nodelist", "first"), [("gpu[07-09]", "gpu07"), ("n1,n2", "n1"), ("a3", "a3"), ("n[1,4-6],x", "n1")]
)
def test_slurm_first_host(nodelist: str, first: str) -> None:
    assert placed(SLURM | {"SLURM_STEP_NODELIST": nodelist}).master_addr == first


def test_a_slurm_batch_script_is_not_a_worker() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "9"}
    assert placed(batch) == Placement()
    assert parse_role(False, batch) == "single"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**ADDRESS, "RANK": "4", "WORLD_SIZE": "4"}, ["RANK=4", "WORLD_SIZE=4", "0 to 3"]),
        ({**ADDRESS, "RANK": "-1", "WORLD_SIZE": "4"}, ["RANK=-1"]),
        ({**ADDRESS, "RANK": "0"}, ["WORLD_SIZE is not set", "RANK=0"]),
        ({**ADDRESS, "WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK is not set"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, ["MASTER_ADDR is not set"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, ["MASTER_PORT is not set"]),
        ({**ADDRESS, "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "65535"]),
        ({**ADDRESS, "RANK": "zero", "WORLD_SIZE": "2"}, ["RANK='zero'", "whole number"]),
        ({**ADDRESS, "RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, ["LOCAL_RANK is not set"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (SLURM | {"SLURM_PROCID": "6"}, ["SLURM_PROCID=6", "SLURM_STEP_NUM_TASKS=6"]),
    ],
)
def test_missing_or_contradictory_variables(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        placed(environ)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_explicit_rank_and_size_honour_or_set_the_address() -> None:
    assert parse_placement_for(1, 2, {}).master_addr == "127.0.0.1"
    assert parse_placement_for(1, 2, {}).master_port == 29500
    honoured = parse_placement_for(1, 2, {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "77"})
    assert (honoured.master_addr, honoured.master_port) == ("10.0.0.9", 77)
    assert parse_placement_for(-1, 1, {}) == Placement()
    with pytest.raises(WorldError, match="rank=2 but world_size=2"):
        parse_placement_for(2, 2, {})


@pytest.mark.parametrize(
    ("nproc_given", "environ", "expected"),
    [
        (True, {}, "agent"),
        (True, {"RANK": "4", "WORLD_SIZE": "8"}, "agent"),  # a hand-set RANK is this machine's first rank
        (True, TORCHRUN, "worker"),
        (False, TORCHRUN, "worker"),
        (False, {"RANK": "0", "WORLD_SIZE": "2"}, "worker"),
        (False, SLURM, "worker"),
        (True, SLURM, "agent"),
        (False, {}, "single"),
    ],
)
def test_agent_or_worker(nproc_given: bool, environ: dict[str, str], expected: str) -> None:
    assert parse_role(nproc_given, environ) == expected


def test_a_hand_set_rank_is_the_first_rank_of_an_agents_machine() -> None:
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
    assert parse_node(4, environ | {"RANK": "0"}) == MachineNode(0, 2, "10.0.0.1", 29500)
    assert parse_node(4, environ | {"RANK": "4"}) == MachineNode(1, 2, "10.0.0.1", 29500)
    assert parse_node(8, environ | {"RANK": "0"}) == MachineNode()
    with pytest.raises(WorldError, match="must be multiples of -n 3"):
        parse_node(3, environ | {"RANK": "4"})


def test_slurm_numbers_an_agents_machine() -> None:
    one_task_per_node = SLURM | {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}
    assert parse_role(True, one_task_per_node) == "agent"
    assert parse_node(2, one_task_per_node) == MachineNode(2, 3, "gpu07", 20041)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("10.0.0.1", False), ("n1", False)],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
