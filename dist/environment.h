// Which rank this process is, as its launcher says.
#pragma once

#include <string>

struct RankEnvironment {
    int rank = 0, ranks = 1;
    int local_rank = 0, local_ranks = 1;  // on this node: the GPU; 0 ranks where nobody says how many
    int node = -1;                        // -1 where nobody says: ranks then go by their machines' names
    std::string job;                      // of this run, where its launcher has one: keeps two runs apart
    std::string address = "127.0.0.1";    // where rank 0 listens
    int port = 0;
    int listening_socket = -1;  // of rank 0, where its launcher opened one; else -1
    bool supervised = false;    // by launch_ranks, which reports a rank 0 that dies
};

// Reads the variables of, in this order:
//   torchrun, `--ranks` and hand-made scripts: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and
//     where they are set LOCAL_WORLD_SIZE, GROUP_RANK (the node), TORCHELASTIC_RUN_ID
//   Open MPI's mpirun: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   Slurm's srun: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE. The
//     shells of sbatch and salloc have most of these too, yet are no ranks: only in a step that srun started
//     is SLURM_STEP_ID the number of an ordinary step.
// MASTER_ADDR and MASTER_PORT also hold under mpirun and srun; without them the address is the first node of
// the job (this machine where all ranks are on it) and the port follows from the job's id and the user's.
// One rank where none of them is set. Fails, naming the variable and its value, on what makes no sense.
//
// Call it once, early: what `--ranks` handed down is taken out of the environment, so that it does not reach
// the processes that this one starts.
RankEnvironment rank_environment();
