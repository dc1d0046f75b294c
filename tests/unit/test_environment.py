"""The environment of a process: launcher, rank, sizes."""

import os

import pytest

from triton_ep.errors import ConfigError
from triton_ep.runtime.environment import Environment, parse_bytes, read_environment, set_defaults

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first-node",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "927465473",
    "PMIX_RANK": "5",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_ID": "5"}
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
SALLOC_SHELL = {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
DAEMON_OF_SRUN = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def _place(environment: Environment) -> tuple[object, ...]:
    return (
        environment.launcher,
        environment.rank,
        environment.world_size,
        environment.local_rank,
        environment.local_size,
    )


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        pytest.param({}, ("none", None, None, None, None), id="none"),
        pytest.param(TORCHRUN, ("torchrun", 5, 8, 1, 4), id="torchrun"),
        pytest.param(BY_HAND, ("torchrun", 5, 8, None, None), id="variables of torch, set by hand"),
        pytest.param(OPEN_MPI, ("mpirun", 5, 8, 1, 4), id="Open MPI"),
        pytest.param(MPICH, ("mpirun", 5, 8, 1, 4), id="MPICH"),
        pytest.param(SRUN, ("srun", 5, 8, 1, 4), id="srun"),
        pytest.param({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, ("srun", 5, 8, 1, 4), id="srun --mpi=pmi2"),
        pytest.param(SBATCH, ("none", None, None, None, None), id="sbatch without srun"),
        pytest.param(SALLOC_SHELL, ("none", None, None, None, None), id="shell of salloc"),
        pytest.param({**SBATCH, **OPEN_MPI}, ("mpirun", 5, 8, 1, 4), id="mpirun in sbatch"),
        pytest.param({**DAEMON_OF_SRUN, **OPEN_MPI}, ("mpirun", 5, 8, 1, 4), id="Open MPI over srun"),
        pytest.param({**DAEMON_OF_SRUN, **MPICH}, ("mpirun", 5, 8, 1, 4), id="MPICH over srun"),
        pytest.param({**SRUN, **TORCHRUN}, ("torchrun", 5, 8, 1, 4), id="torchrun in srun"),
        pytest.param({"RANK": "3"}, ("none", None, None, None, None), id="RANK of something else"),
    ],
)
def test_the_innermost_launcher_places_the_process(variables: dict[str, str], place: tuple[object, ...]) -> None:
    """Every launcher is recognised by its own variables, even if another launcher started it."""
    assert _place(read_environment(variables)) == place


def test_ranks_of_a_job_share_its_name_and_other_jobs_have_another() -> None:
    """The name under which ranks of a host meet is equal on all ranks and differs between jobs and job steps."""

    def job(variables: dict[str, str], **change: str) -> str | None:
        return read_environment({**variables, **change}).job

    assert job(OPEN_MPI) == job(OPEN_MPI, OMPI_COMM_WORLD_RANK="0", PMIX_RANK="0")
    assert job(OPEN_MPI) != job(OPEN_MPI, PMIX_NAMESPACE="927465474")
    assert job(SRUN) == job(SRUN, SLURM_PROCID="0")
    assert job(SRUN) != job(SRUN, SLURM_STEP_ID="4")
    assert job(MPICH) == job(MPICH, PMI_RANK="0", PMI_ID="0") is not None
    assert job({}) is None


def test_where_to_meet_is_read() -> None:
    """Under torchrun an agent listens; with variables set by hand, rank 0 has to listen."""
    environment = read_environment(TORCHRUN)
    assert (environment.master_addr, environment.master_port, environment.agent_listens) == ("first-node", 29500, True)
    assert not read_environment(BY_HAND).agent_listens
    assert read_environment({"MASTER_ADDR": "", "MASTER_PORT": ""}) == Environment()


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2G", 2 << 30), ("1.5g", 3 << 29), ("512 MiB", 1 << 29), ("3KB", 3072), (" 1t ", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    """Units are powers of 1024, in upper or lower case, with or without B."""
    assert parse_bytes("X", text) == size


def test_heap_size_is_our_variable_then_that_of_nvshmem() -> None:
    """An empty variable counts as unset; NVSHMEM's own variables are reported by name."""
    nvshmem = {"NVSHMEM_SYMMETRIC_SIZE": "3G", "NVSHMEM_DEBUG": "INFO"}
    assert read_environment(nvshmem).heap_bytes == 3 << 30
    assert read_environment({**nvshmem, "TRITON_EP_HEAP_SIZE": "1G"}).heap_bytes == 1 << 30
    assert read_environment({**nvshmem, "TRITON_EP_HEAP_SIZE": ""}).heap_bytes == 3 << 30
    assert read_environment(nvshmem).nvshmem == ("NVSHMEM_DEBUG", "NVSHMEM_SYMMETRIC_SIZE")
    assert read_environment({"TRITON_EP_HEAP": "torch"}).heap == "torch" and read_environment({}).heap is None
    with pytest.raises(ConfigError, match="TRITON_EP_HEAP='mpi' in the environment is neither nvshmem nor torch"):
        read_environment({"TRITON_EP_HEAP": "mpi"})
    assert read_environment({}).heap_bytes is None


def test_a_gpu_takes_one_rank_unless_told() -> None:
    """An empty variable counts as unset."""
    found = [read_environment({"TRITON_EP_RANKS_PER_GPU": text}).ranks_per_gpu for text in ("", "1", "4")]
    assert [read_environment({}).ranks_per_gpu, *found] == [1, 1, 1, 4]


@pytest.mark.parametrize(("text", "value"), [("1", True), ("ON", True), ("0", False), ("no", False), ("", None)])
def test_interpreter_switch(text: str, value: bool | None) -> None:
    """The switch accepts the words that Triton accepts."""
    assert read_environment({"TRITON_INTERPRET": text}).triton_interpret is value


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRITON_INTERPRET": "maybe"}, "TRITON_INTERPRET='maybe'"),
        ({"TRITON_EP_HEAP_SIZE": "plenty"}, "TRITON_EP_HEAP_SIZE='plenty'"),
        ({"TRITON_EP_HEAP_SIZE": "0"}, "TRITON_EP_HEAP_SIZE='0'"),
        ({"TRITON_EP_RANKS_PER_GPU": "0"}, "TRITON_EP_RANKS_PER_GPU=0"),
        ({"TRITON_EP_RANKS_PER_GPU": "two"}, "TRITON_EP_RANKS_PER_GPU='two'"),
        ({"TRITON_EP_HEAP_SIZE": "0.2"}, "TRITON_EP_HEAP_SIZE='0.2'"),
        ({"TRITON_EP_HEAP_SIZE": "9" * 30}, f"TRITON_EP_HEAP_SIZE='{'9' * 30}' is more than a symmetric heap may have"),
        ({"TRITON_EP_HEAP_SIZE": "9" * 400}, r"'9{60}\.\.\. \(400 characters\)' is more than .* 70368744177664 bytes"),
        ({"NVSHMEM_SYMMETRIC_SIZE": "-1G"}, "NVSHMEM_SYMMETRIC_SIZE='-1G'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({**TORCHRUN, "RANK": "first"}, "RANK='first'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mpirun set OMPI_COMM_WORLD_RANK but not OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0"}, "mpirun set PMI_RANK but not PMI_SIZE"),
    ],
)
def test_bad_value_names_its_variable(variables: dict[str, str], message: str) -> None:
    """The error names the variable and its value."""
    with pytest.raises(ConfigError, match=message):
        read_environment(variables)


def test_defaults_do_not_replace_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set variable of a library stays; an unset one gets the default, also in the next reading."""
    monkeypatch.setenv("NVSHMEM_DEBUG", "INFO")
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "")
    monkeypatch.delenv("NVSHMEM_REMOTE_TRANSPORT")
    set_defaults({"NVSHMEM_DEBUG": "WARN", "NVSHMEM_REMOTE_TRANSPORT": "none"})
    assert (os.environ["NVSHMEM_DEBUG"], os.environ["NVSHMEM_REMOTE_TRANSPORT"]) == ("INFO", "none")
    assert {"NVSHMEM_DEBUG", "NVSHMEM_REMOTE_TRANSPORT"} <= set(read_environment().nvshmem)
