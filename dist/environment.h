// Which rank this process is, as its launcher says.
#pragma once

#include <string>

struct RankEnvironment {
    int rank = 0, ranks = 1;
    int local_rank = 0, local_ranks = 1;  // on this node: the GPU, and who shares the CPU's cores
    int node = 0;
    std::string address = "127.0.0.1";  // where rank 0 listens
    int port = 0;
    int listening_socket = -1;  // of rank 0, where its launcher opened one; else -1
    bool supervised = false;    // by launch_ranks, which reports a rank 0 that dies
};

// Reads the variables of, in this order: torchrun and `--ranks` (RANK, WORLD_SIZE, LOCAL_RANK,
// LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT), Open MPI's mpirun (OMPI_COMM_WORLD_*), Slurm's
// srun (SLURM_*). MASTER_ADDR and MASTER_PORT also hold under mpirun and srun; without them the address is
// the first node of the job (this machine where all ranks are on it) and the port follows from the job's id.
// One rank where none of them is set. Fails, naming the variable and its value, on numbers that make no
// sense.
RankEnvironment rank_environment();
