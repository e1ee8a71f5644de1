// Starting and supervising ranks on this machine: `train_gpt --ranks N`.
#pragma once

#include <string>
#include <vector>

#include "dist/environment.h"

// Runs `arguments` (without the program's name) as `ranks` ranks of this program on this machine and returns
// the exit status of the run: 0 where all ranks ended with 0; 128 + signal where stop signals ended them;
// else 1. SIGINT, SIGTERM and SIGHUP reach every rank once, also those of a terminal's keys, and a run that
// is stopped (Ctrl-Z) and continued is so with all its ranks. Where one fails, the others get a few seconds
// to end by themselves; `report` is called with a line that says so where no rank could. Ranks do not outlive
// this process. Ranks from 1 on have neither stdin nor stdout.
//
// `run` is the program as a rank: processes call it through their own main; the simulator, whose devices are
// all in one process, calls it from a thread a rank (launcher_threads.cpp).
int launch_ranks(int ranks, const std::vector<std::string>& arguments,
                 int (*run)(const RankEnvironment& environment, const std::vector<std::string>& arguments),
                 void (*report)(const std::string& line));
