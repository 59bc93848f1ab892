"""What mpiexec is told: its environment and its command line, for one host and for several."""

from __future__ import annotations

import os
import pwd

import pytest

from lowshard.launch.host import Host, Spread
from lowshard.launch.mpiexec import MpiInstall, rank_environment

MAPPING = "PRTE_MCA_rmaps_default_mapping_policy"
BINDING = "PRTE_MCA_hwloc_default_binding_policy"
TWO = Spread((Host("a", 3), Host("b", 2)))
SHELL = Spread((Host("a", 1),), shell="/bin/sh-to", iface="br0")


def install(family: str, from_wheel: bool) -> MpiInstall:
    return MpiInstall(family, family, "1", "/lib/libmpi.so", "", "/bin/mpiexec", from_wheel)


def test_the_users_own_settings_stay() -> None:
    own = {"OMPI_MCA_btl": "self,tcp", "OMP_NUM_THREADS": "3", MAPPING: ":core"}
    env = rank_environment(install("openmpi", True), 4, own, cores=8)
    assert {name: env[name] for name in own} == own
    assert env["OMPI_MCA_pml"] == "ob1"
    assert env["NUMBA_NUM_THREADS"] == "2"


def test_cores_are_shared_out_and_nothing_is_bound_when_they_do_not_suffice() -> None:
    few = rank_environment(install("openmpi", True), 8, {}, cores=2)
    assert (few["OMP_NUM_THREADS"], few[BINDING]) == ("1", "none")
    assert BINDING not in rank_environment(install("openmpi", True), 4, {}, cores=4)


def test_a_systems_open_mpi_keeps_its_own_transport_and_mpich_needs_nothing() -> None:
    assert "OMPI_MCA_pml" not in rank_environment(install("openmpi", False), 2, {}, cores=2)
    mpich = rank_environment(install("mpich", True), 2, {}, cores=2)
    assert not any(name.startswith(("OMPI", "PRTE")) for name in mpich)


def test_open_mpi_is_given_a_home_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_environment(install("openmpi", True), 2, {"HOME": ""})["HOME"] == ""
    monkeypatch.delenv("HOME")
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert rank_environment(install("openmpi", True), 2, {})["HOME"] == home
    assert "HOME" not in rank_environment(install("mpich", True), 2, {})


def test_the_ranks_of_one_host_have_no_network_and_those_of_several_have() -> None:
    alone = rank_environment(install("openmpi", True), 2, {}, cores=2)
    assert alone["OMPI_MCA_btl"] == "self,sm"
    assert rank_environment(install("openmpi", False), 2, {}, cores=2)["OMPI_MCA_btl"] == "^tcp"
    assert (
        rank_environment(install("openmpi", True), 5, {}, cores=2, spread=TWO)["OMPI_MCA_btl"]
        == "self,sm,tcp"
    )
    for name in ("HYDRA_IFACE", "UCX_NET_DEVICES", "FI_TCP_IFACE", "NCCL_SOCKET_IFNAME"):
        assert alone[name] == "lo"
        assert name not in rank_environment(install("mpich", True), 5, {}, cores=2, spread=TWO)


def test_threads_are_counted_by_the_fullest_host_and_hosts_are_filled_one_by_one() -> None:
    env = rank_environment(install("openmpi", True), 5, {}, cores=12, spread=TWO)
    assert env["OMP_NUM_THREADS"] == "4"
    assert env[MAPPING] == "slot:oversubscribe"
    assert "OMPI_MCA_btl_tcp_if_include" not in env
    assert BINDING not in rank_environment(install("openmpi", True), 5, {}, cores=3, spread=TWO)
    assert rank_environment(install("openmpi", True), 5, {}, cores=2, spread=TWO)[BINDING] == "none"


def test_the_hosts_use_the_interface_that_is_named() -> None:
    env = rank_environment(install("openmpi", False), 1, {}, spread=SHELL)
    assert env["OMPI_MCA_btl_tcp_if_include"] == env["LOWSHARD_INTERFACE"] == "br0"
    mpich = rank_environment(install("mpich", True), 1, {}, spread=SHELL)
    assert mpich["LOWSHARD_INTERFACE"] == "br0"
    assert not any(name.startswith(("OMPI", "PRTE")) for name in mpich)


@pytest.mark.parametrize(
    ("family", "spread", "expected"),
    [
        ("openmpi", None, "-n 2 x"),
        ("mpich", None, "-n 2 x"),
        ("openmpi", TWO, "-n 2 --hostfile f --wdir /w -x A -x B x"),
        ("mpich", TWO, "-n 2 -f f -wdir /w -genvlist A,B x"),
        (
            "openmpi",
            SHELL,
            "-n 2 --hostfile f --wdir /w --prtemca plm_ssh_agent /bin/sh-to -x A -x B x",
        ),
        (
            "mpich",
            SHELL,
            "-n 2 -f f -wdir /w -launcher ssh -launcher-exec /bin/sh-to -iface br0 -genvlist A,B x",
        ),
    ],
)
def test_the_command_line_names_hosts_shell_and_variables_in_each_mpis_words(
    family: str, spread: Spread | None, expected: str
) -> None:
    passed = () if spread is None else ("A", "B")
    words = install(family, True).command(2, ["x"], spread=spread, hostfile="f", cwd="/w", passed=passed)
    assert " ".join(words) == f"/bin/mpiexec {expected}"
