// Starting and supervising ranks on this machine: `train_gpt --ranks N`.
#pragma once

#include <string>
#include <vector>

#include "dist/environment.h"

// Runs `arguments` (without the program's name) as `ranks` ranks of this program on this machine and returns
// the exit status of the run: 0 where all ranks ended with 0. Stop signals reach every rank. Where one ends
// with another status, or is killed, the others are ended soon after; a line says so where no rank could.
// Ranks do not outlive this process.
//
// `run` is the program as a rank: processes call it through their own main; the simulator, whose devices are
// all in one process, calls it from a thread a rank.
int launch_ranks(int ranks, const std::vector<std::string>& arguments,
                 int (*run)(const RankEnvironment& environment, const std::vector<std::string>& arguments));
